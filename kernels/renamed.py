"""Names of the last release, kept for this one: each warns, and names the one that took its place."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType

__all__ = ["former", "moved", "warn_renamed"]


def warn_renamed(old: str, new: str, *, calls: int = 1) -> None:
    """Say that ``old`` is called ``new``; the warning points as many calls up from the function that calls this."""
    warnings.warn(
        f"{old} is now called {new}; the old name goes in the next release", FutureWarning, stacklevel=2 + calls
    )


def former(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """A module's ``__getattr__`` for names that it had.

    Args:
        module: its ``__name__``.
        names: the new name of each old one.
    """

    def getter(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return getter


def moved(module: str, now: str, names: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], object]:
    """The ``__getattr__`` of a module that is another one now.

    Args:
        module: its ``__name__``.
        now: that of the module which has what it had.
        names: the new name of each one that is called otherwise there.
    """

    def getter(name: str) -> object:
        there = importlib.import_module(now)
        if name.startswith("__") or not hasattr(there, names.get(name, name)):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{now}.{names.get(name, name)}")
        return getattr(there, names.get(name, name))

    return getter
