"""The suite sees the package as it is installed."""

import contextlib
import sys
from pathlib import Path

# `python -m pytest` puts the checkout's root first on the path. There `kernels` is our folder, and a transformers that
# has PyPI's package of that name cannot be imported. Ranks take their path from here.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

# No test measures absolute time: a draw that took a second said that other ranks had the cores. The tests that run on
# a GPU need no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")
