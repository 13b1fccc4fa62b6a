"""The gate's files import each other, as a command and as tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
