"""What :mod:`compile_muon.runtime.state_provider` was called in 0.1.0: the name goes with the next version."""

from __future__ import annotations

from typing import Any

from compile_muon.errors import warn_user
from compile_muon.runtime import state_provider

__all__: list[str] = []

_NAMES = {"Lender": "StateProvider", "Lent": "StateRequest", "Lend": "ProvideStates"}


def __getattr__(name: str) -> Any:
    now = _NAMES.get(name, name)
    if not hasattr(state_provider, now):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_user(f"{__name__}.{name} is compile_muon.runtime.state_provider.{now} from 0.2 on; import that")
    return getattr(state_provider, now)
