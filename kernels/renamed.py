"""Names of the last release, kept for this one: each warns, and names the one that took its place."""

from __future__ import annotations

import importlib
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

    return _getter(module, module, names.get)


def moved(module: str, now: str, names: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], object]:
    """The ``__getattr__`` of a module that is another one now.

    Args:
        module: its ``__name__``.
        now: that of the module which has what it had.
        names: the new name of each one that is called otherwise there.
    """

    return _getter(module, now, lambda name: None if name.startswith("__") else names.get(name, name))


def _getter(module: str, now: str, called: Callable[[str], str | None]) -> Callable[[str], object]:
    def getter(name: str) -> object:
        there, new = importlib.import_module(now), called(name)
        if new is None or not hasattr(there, new):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{now}.{new}")
        return getattr(there, new)

    return getter
