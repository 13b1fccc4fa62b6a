"""The suite sees the package as it is installed."""

import sys
from pathlib import Path

# `python -m pytest` puts the checkout's root first on the path. There `kernels` is our folder, and a transformers that
# has PyPI's package of that name cannot be imported. Ranks take their path from here.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
