"""Dataclasses that check themselves: one line declares a setting's name, default and range; the rest reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from compile_muon.config.checks import taken
from compile_muon.errors import ConfigError, config_error, raise_all

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Checked", "Mistakes", "setting"]


class Mistakes:
    """Collects errors, so that who made several mistakes reads of all of them at once."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    def add(self, error: ConfigError) -> None:
        """Keep ``error`` for the end."""
        self.found.extend(error.errors)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """``with mistakes.collected():`` goes on after the block where the block raises a ConfigError."""
        try:
            yield
        except ConfigError as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raise what was collected as one ConfigError; nothing where there is nothing."""
        raise_all(self.found)


def setting(
    default: object, check: Callable[..., Any], *, none: bool = False, also: object = None, **limits: object
) -> Any:
    """A field of a :class:`Checked` dataclass.

    Args:
        default: as in ``dataclasses.field``; None without ``none`` for a setting that has to be given.
        check: ``check(path, value, **limits)`` returns the canonical value, or raises a ConfigError about ``path``.
        none: whether None is a value as well.
        also: one more value.

    What it means stands in the docstring of the dataclass; ``docs/settings.py`` makes tables of both.
    """

    def accept(path: str, value: object) -> Any:
        if value is None and default is None and not none:
            raise config_error(path, value, "is missing", "write the number")
        if (value is None and none) or (also is not None and type(value) is type(also) and value == also):
            return value
        return check(path, value, **limits)

    def values() -> str:
        more = "" if also is None else f"{json.dumps(also)}, or "
        return more + taken(check, **limits) + (", or None" if none and default is not None else "")

    return field(default=default, metadata={"check": accept, "values": values, "needed": default is None and not none})


@dataclass(frozen=True)
class Checked:
    """Base of frozen dataclasses whose fields are made by :func:`setting`.

    Raises:
        ConfigError: about every bad field, and every contradiction between the others.
    """

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        good = self.canonical(given, mistakes, lambda name: f"{type(self).__name__}.{name}")
        for f in fields(self):
            # The default stands in for a bad value, which then contradicts nothing.
            object.__setattr__(self, f.name, good.get(f.name, f.default))
        for error in self.contradictions():
            mistakes.add(error)
        mistakes.raise_all()

    def contradiction(self, name: str, problem: str, remedy: str) -> ConfigError:
        """The error about a field."""
        return config_error(f"{type(self).__name__}.{name}", getattr(self, name), problem, remedy)

    def contradictions(self) -> Iterator[ConfigError]:
        """What is wrong between fields that are each right."""
        return iter(())

    @classmethod
    def checked(cls, name: str, value: object, path: str) -> Any:
        """The canonical form of ``value`` for the field ``name``, which the user knows as ``path``.

        Raises:
            ConfigError: naming ``path``.
        """
        return cls.__dataclass_fields__[name].metadata["check"](path, value)

    @classmethod
    def canonical(cls, values: Mapping[str, Any], mistakes: Mistakes, path: Callable[[str], str]) -> dict[str, Any]:
        """The good ones of ``values`` (field -> value) in canonical form; the bad ones go to ``mistakes``."""
        good = {}
        for name, value in values.items():
            with mistakes.collected():
                good[name] = cls.checked(name, value, path(name))
        return good

    @classmethod
    def read(cls, values: Mapping[str, Any], mistakes: Mistakes, path: str) -> Self | None:
        """One of the section that the user knows as ``path``, of what is right in it.

        Returns:
            None where its values contradict each other or lack one; what is wrong goes to ``mistakes``.
        """
        good = cls.canonical(values, mistakes, lambda name: f"{path}.{name}")
        try:
            return cls(**good)
        except ConfigError as error:
            for each in error.errors:
                name = each.field.removeprefix(f"{cls.__name__}.")
                if name in good or name not in values:  # else it has been complained of
                    mistakes.add(each.renamed(f"{path}.{name}"))
            return None
