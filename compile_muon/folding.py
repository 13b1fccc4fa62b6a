"""Folding of rows whose names differ in a number alone, for tables."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

_Same = TypeVar("_Same", bound=Hashable)


def folded(rows: Iterable[tuple[str, _Same]]) -> list[tuple[str, _Same]]:
    """Fold rows that are equal but for one number in their names into one, at the place of the first.

    >>> folded([("h.0.up", "muon"), ("h.0.norm", "adamw"), ("h.1.up", "muon"), ("h.1.norm", "adamw")])
    [('h.0…1.up × 2', 'muon'), ('h.0…1.norm × 2', 'adamw')]
    """
    split_rows = [(name.split("."), 1, same) for name, same in rows]
    for place in range(max((len(parts) for parts, _, _ in split_rows), default=0)):
        groups: dict[object, list[tuple[list[str], int, _Same]]] = {}
        for number, (parts, count, same) in enumerate(split_rows):
            numbered = place < len(parts) and parts[place].isdecimal()
            key = (place, *parts[:place], None, *parts[place + 1 :], count, same) if numbered else number
            groups.setdefault(key, []).append((parts, count, same))
        split_rows = [_one(group, place) for group in groups.values()]
    return [(".".join(parts) + (f" × {count}" if count > 1 else ""), same) for parts, count, same in split_rows]


def _one(group: Sequence[tuple[list[str], int, _Same]], place: int) -> tuple[list[str], int, _Same]:
    parts, _, same = group[0]
    if len(group) > 1:
        parts = [*parts[:place], _runs([int(name_parts[place]) for name_parts, _, _ in group]), *parts[place + 1 :]]
    return parts, sum(count for _, count, _ in group), same


def _runs(numbers: Sequence[int]) -> str:
    """Join ascending numbers, runs of neighbours as "first…last".

    >>> _runs([0, 1, 2, 4, 6, 7])
    '0…2,4,6…7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}…{b}" for a, b in runs)
