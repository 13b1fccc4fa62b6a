"""Models that are found by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def tiny_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of this name, as a user has one on the path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import tiny_gpt

    return tiny_gpt
