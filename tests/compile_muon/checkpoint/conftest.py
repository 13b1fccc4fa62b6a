"""Kinds of damage are shared with the campaign that tries more of them."""

import sys
from pathlib import Path

# At the end: nothing in benchmarks/ may stand in front of anything.
sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
