"""Simulate several ranks of one job: a collective begins when the last rank of its group has issued it.

A rank simulated alone assumes that all others keep its pace, which holds where all compute the same between two
collectives. Owners of different matrices lead and lag by turns, so that each waits for the others, even if all compute
equally long in sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from compile_muon.simulate.engine import Timeline

#: ranks of a group -> when the last of them issues each of its collectives
Others = Mapping[tuple[int, ...], tuple[float, ...]]
#: seconds; a smaller difference between rounds counts as none
_NOTHING = 1e-6


def simulate_together(
    plays: Mapping[int, Callable[[Others], Timeline]], *, kind: Callable[[tuple[int, ...]], Hashable] = tuple
) -> dict[int, Timeline]:
    """Return the timeline of each rank, in which no collective begins before all simulated ranks have issued it.

    `plays`: :func:`~.engine.simulate` of each rank, or of some, as a function of ``others``. `kind` maps the ranks of a
    group to its kind: in groups of one kind all simulated ranks wait for each other, as if they stood for ranks that
    are not simulated; by default only ranks of the same group do. A collective does not wait for a rank without it
    (which owns nothing of a bucket). Raises a ValueError if two ranks of a group issue different collectives.
    """
    # Repeat until no collective is issued later. One is final once all ahead of it are: at most a round per collective.
    others: dict[int, Others] = {rank: {} for rank in plays}
    while True:
        timelines = {rank: play(others[rank]) for rank, play in plays.items()}
        before, others = others, _last_of_all(timelines, kind)
        if all(_as_early(others[rank], before[rank]) for rank in plays):
            return timelines


def _last_of_all(timelines: Mapping[int, Timeline], kind: Callable[[tuple[int, ...]], Hashable]) -> dict[int, Others]:
    """Return for each rank when the last of its kind of group, itself included, issues each of its collectives."""
    last: dict[tuple[Hashable, tuple[str, int]], float] = {}
    first_of: dict[tuple[int, ...], int] = {}
    for rank, timeline in timelines.items():
        for group, times in timeline.issued.items():
            first_rank = first_of.setdefault(group, rank)
            if list(timelines[first_rank].issued[group]) != list(times):
                raise ValueError(f"ranks {first_rank} and {rank} issue other collectives to the group {group}")
            for name, time in times.items():
                last[kind(group), name] = max(time, last.get((kind(group), name), time))
    return {
        rank: {group: tuple(last[kind(group), name] for name in times) for group, times in timeline.issued.items()}
        for rank, timeline in timelines.items()
    }


def _as_early(found: Others, before: Others) -> bool:
    return found.keys() == before.keys() and all(
        now <= then + _NOTHING for group in found for now, then in zip(found[group], before[group], strict=True)
    )
