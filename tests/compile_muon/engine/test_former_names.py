"""Names of 0.1.0, of what keeps states and of modules that moved."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from compile_muon import Extension, MuonZeroWarning
from compile_muon.engine.extension import hooks_of
from compile_muon.engine.state_provider import StateProvider, StateRequest
from compile_muon.runtime import lender


def test_names_of_the_first_version_warn_and_are_taken() -> None:
    with pytest.warns(FutureWarning, match="now called compile_muon.engine.state_provider.StateProvider"):
        base = lender.Lender
    assert base is StateProvider
    with pytest.warns(MuonZeroWarning, match="Keeping.lend is called provide from 0.2 on"):

        class Keeping(StateProvider):
            beside = False

            def lend(self, *args: Any, **options: Any) -> Any:
                return iter([("own", "states")])

    kept = Keeping()

    class Former(Extension):
        pass

    Former.lender = kept  # type: ignore[attr-defined]

    assert not kept.all_resident
    assert list(kept.provide([], StateRequest.ALL, 1)) == [("own", "states")]
    with pytest.warns(MuonZeroWarning, match="Former.lender is called state_provider from 0.2 on"):
        assert hooks_of([Former()]).state_provider is kept
    with pytest.raises(AttributeError, match="no attribute 'Borrower'"):
        _ = lender.Borrower


@pytest.mark.parametrize(
    ("module", "now", "name"),
    [
        ("runtime.peers", "engine.peers", "Peers"),
        ("runtime.state_provider", "engine.state_provider", "StateProvider"),
        ("passes.layout", "passes.language.layout", "Layout"),
        ("passes.spec", "passes.language.spec", "MuonSpec"),
    ],
)
def test_modules_that_moved_warn_and_are_taken(module: str, now: str, name: str) -> None:
    former = importlib.import_module(f"compile_muon.{module}")
    with pytest.warns(FutureWarning, match=rf"compile_muon.{module}.{name} is now called compile_muon.{now}.{name}"):
        found = getattr(former, name)
    assert found is getattr(importlib.import_module(f"compile_muon.{now}"), name)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = former.missing
