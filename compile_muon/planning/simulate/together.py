"""Ranks of one job, played together: a collective begins when the last rank of its group has issued it.

One rank alone is played as if all kept its pace. They do where they compute the same between two collectives; where
they own different matrices one is ahead now and another then, and each waits for the other by turns, though all compute
equally long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from compile_muon.planning.simulate.engine import Timeline

__all__ = ["simulate_together"]

#: by a group's ranks, when the last of them issues each collective
Others = Mapping[tuple[int, ...], tuple[float, ...]]

#: seconds; a rank that comes no later than this is not late
_NOTHING = 1e-6


def simulate_together(
    plays: Mapping[int, Callable[[Others], Timeline]], *, kind: Callable[[tuple[int, ...]], Hashable] = tuple
) -> dict[int, Timeline]:
    """The timeline of each rank, in which none waits for less than the others that are played.

    Each is played again with what the others did until none comes later any more. A collective is final once those
    ahead of it are, so there are no more rounds than collectives.

    Args:
        plays: :func:`~.engine.simulate` of each rank of the job, or of some, as a function of ``others``.
        kind: of a group's ranks. In groups of one kind all ranks that are played wait for each other, as if they stood
            for those that are not; by default those of the same group. A collective that another rank has none of (a
            company of ranks that own nothing of a bucket) does not wait for it.
    Raises:
        ValueError: two ranks of a group issue different collectives.
    """
    others: dict[int, Others] = {rank: {} for rank in plays}
    while True:
        timelines = {rank: play(others[rank]) for rank, play in plays.items()}
        found = _last_of_all(timelines, kind)
        if all(_as_early(found[rank], others[rank]) for rank in plays):
            return timelines
        others = found


def _last_of_all(timelines: Mapping[int, Timeline], kind: Callable[[tuple[int, ...]], Hashable]) -> dict[int, Others]:
    """Of each rank, when the last of those that it meets, itself among them, issues each of its collectives."""
    last: dict[tuple[Hashable, tuple[str, int]], float] = {}
    first_of: dict[tuple[int, ...], int] = {}
    for rank, timeline in timelines.items():
        for group, issued in timeline.issued.items():
            other = first_of.setdefault(group, rank)
            if list(timelines[other].issued[group]) != list(issued):
                raise ValueError(f"ranks {other} and {rank} issue other collectives to the group {group}")
            for name, time in issued.items():
                last[kind(group), name] = max(time, last.get((kind(group), name), time))
    return {
        rank: {group: tuple(last[kind(group), name] for name in issued) for group, issued in timeline.issued.items()}
        for rank, timeline in timelines.items()
    }


def _as_early(found: Others, before: Others) -> bool:
    return found.keys() == before.keys() and all(
        now <= then + _NOTHING for group in found for now, then in zip(found[group], before[group], strict=True)
    )
