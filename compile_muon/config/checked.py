"""Dataclasses that check themselves: one line declares the default and the range of a setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from compile_muon.config.accept import missing, taken
from compile_muon.errors import ConfigError, config_error, raise_all

if TYPE_CHECKING:
    from typing_extensions import Self


class Mistakes:
    """A collection of errors, so that a user reads of all mistakes at once."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    def add(self, error: ConfigError) -> None:
        """Add `error` to the collection."""
        self.found.extend(error.errors)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Add a ConfigError that the block raises, and go on after the block."""
        try:
            yield
        except ConfigError as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raise the collection as one ConfigError, if there is any error."""
        raise_all(self.found)


def setting(
    default: object, check: Callable[..., Any], *, none: bool = False, also: object = None, **limits: object
) -> Any:
    """Return a field of a :class:`Checked` dataclass.

    ``check(path, value, **limits)`` returns the canonical value, or raises a ConfigError about ``path``. A `default` of
    None without `none` makes a setting required; `none` accepts None; `also` is one more accepted value.
    ``docs/settings.py`` makes tables of these and of the docstring of the dataclass, which says what the setting means.
    """

    def accept(path: str, value: object) -> Any:
        if value is None and default is None and not none:
            raise missing(path)
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

    Raises a ConfigError about every bad field, and every contradiction between good ones.
    """

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        field_values = {f.name: getattr(self, f.name) for f in fields(self)}
        good = self.canonical(field_values, mistakes, lambda name: f"{type(self).__name__}.{name}")
        for f in fields(self):
            # A bad value is replaced by the default, so that it causes no contradiction on top.
            object.__setattr__(self, f.name, good.get(f.name, f.default))
        for error in self.contradictions():
            mistakes.add(error)
        mistakes.raise_all()

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def contradiction(self, name: str, problem: str, remedy: str) -> ConfigError:
        """Return an error about a field."""
        return config_error(f"{type(self).__name__}.{name}", getattr(self, name), problem, remedy)

    def contradictions(self) -> Iterator[ConfigError]:
        """Yield the errors between fields that are each valid."""
        return iter(())

    @classmethod
    def checked(cls, name: str, value: object, path: str) -> Any:
        """Return `value` in canonical form for the field `name`; a ConfigError names the user's `path` of it."""
        return cls.__dataclass_fields__[name].metadata["check"](path, value)

    @classmethod
    def canonical(cls, values: Mapping[str, Any], mistakes: Mistakes, path: Callable[[str], str]) -> dict[str, Any]:
        """Return the valid ones of `values` (field -> value) in canonical form; errors go to `mistakes`."""
        good = {}
        for name, value in values.items():
            with mistakes.collected():
                good[name] = cls.checked(name, value, path(name))
        return good

    @classmethod
    def read(cls, values: Mapping[str, Any], mistakes: Mistakes, path: str) -> Self | None:
        """Build an instance from the valid values of the user's section `path`; errors go to `mistakes`.

        Returns None if values contradict each other, or a required one is missing.
        """
        good = cls.canonical(values, mistakes, lambda name: f"{path}.{name}")
        try:
            return cls(**good)
        except ConfigError as error:
            for field_error in error.errors:
                name = field_error.field.removeprefix(f"{cls.__name__}.")
                if name in good or name not in values:  # else `canonical` has reported it
                    mistakes.add(field_error.renamed(f"{path}.{name}"))
            return None
