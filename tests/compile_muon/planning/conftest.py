"""What the tests plan is found by name, as a user's model is on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
