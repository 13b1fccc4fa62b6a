"""Shared with tests of several ranks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Dynamo knows nothing of other tests."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
