"""Names of the last release, kept for this one: each warns, and names the one that took its place."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping

__all__ = ["former", "warn_renamed"]


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
