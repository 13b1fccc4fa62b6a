"""Names of 0.1.0 of what keeps states."""

from __future__ import annotations

from typing import Any

import pytest

from compile_muon import Extension, MuonZeroWarning
from compile_muon.engine.extension import hooks_of
from compile_muon.runtime import lender
from compile_muon.runtime.state_provider import StateProvider, StateRequest


def test_names_of_the_first_version_warn_and_are_taken() -> None:
    with pytest.warns(MuonZeroWarning, match="StateProvider from 0.2 on"):
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
