"""Comparison of a mapping over ranks: gather every rank's, find the entries that differ, and word which rank has which.

``if differences := compare({"stage": 2}, group): raise ConfigError(f"ranks disagree on {worded(differences)}; ...")``
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from compile_muon.errors import listed

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_FEW = 8  # most ranks that a message names


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return ``value`` of every rank, small and pickled, on every rank; of one process without a group."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def compare(mine: Mapping[K, Any], group: dist.ProcessGroup | None, absent: object = None) -> dict[K, list[Any]]:
    """Return :func:`differing` entries of every rank's ``mine``, on every rank. Collective with a group."""
    return differing(gather_objects(mine, group), absent)


def differing(everyone: Sequence[Mapping[K, Any]], absent: object = None) -> dict[K, list[Any]]:
    """Return the entries in which ranks differ, in the ranks' order, each with every rank's value or ``absent``.

    >>> differing([{"lr": 1, "decay": 2}, {"lr": 3, "decay": 2, "beta": 4}])
    {'lr': [1, 3], 'beta': [None, 4]}
    """
    keys = dict.fromkeys(key for facts in everyone for key in facts)
    columns = {key: [facts.get(key, absent) for facts in everyone] for key in keys}
    return {key: column for key, column in columns.items() if any(value != column[0] for value in column[1:])}


def worded(differences: Mapping[Any, Sequence[object]]) -> str:
    """Return the result of :func:`differing` in words, for an error.

    >>> worded({"lr": [1, 3, 1]})
    'lr = 3 on rank 1, 1 on ranks 0, 2'
    """
    return listed([f"{entry} = {by_rank(column)}" for entry, column in differences.items()])


def by_rank(values: Sequence[object], numbers: Sequence[int] | None = None) -> str:
    """Return in words which ranks (``numbers``, or from 0) have which value, the rarest first.

    >>> by_rank([2, 3, 2])
    '3 on rank 1, 2 on ranks 0, 2'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in zip(numbers or range(len(values)), values, strict=True):
        ranks.setdefault(str(value), []).append(rank)
    rarest = sorted(ranks.items(), key=lambda item: len(item[1]))
    return listed([f"{value} on {ranks_named(who)}" for value, who in rarest])


def ranks_named(ranks: Sequence[int]) -> str:
    """Return at least one rank in words.

    >>> ranks_named([1]), ranks_named([0, 2]), ranks_named(range(64))
    ('rank 1', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, … (64 in all)')
    """
    more = f", … ({len(ranks)} in all)" if len(ranks) > _FEW else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_FEW]))}{more}"
