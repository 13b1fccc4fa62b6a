"""What the passes put into a graph, and for what: the schedule orders it, ranges and the simulator name it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.fx import Node

__all__ = ["Category", "Work", "note_work", "work_of"]

#: key of node.meta
_KEY = "muon_zero_work"


class Category(str, Enum):
    """Why ranks meet."""

    #: weights, for the forward or backward that uses them
    GATHER = "gather"
    #: gradients
    REDUCE = "reduce"
    #: matrices to those that orthogonalize them, and directions back
    EXCHANGE = "exchange"
    #: weights that are resident, once a step
    REFRESH = "refresh"
    #: norms and whether everything is finite, once a step
    CHECKS = "checks"


@dataclass(frozen=True)
class Work:
    """One bucket's way through a graph.

    Args:
        category: why ranks meet for it, or would if there were several.
        bucket: its number among those of the same category, the same on every rank.
        nbytes: what one collective of it sends and receives, on average over the ranks.
        needs: of an exchange: the buckets of gradients whose reduction it reads.
        hops: of an exchange: collectives, each behind the one before; ranks that own nothing may have the last alone.
        travels: of an exchange: whether matrices meet ahead of Newton-Schulz, rather than directions behind it alone.
        handed_round: of an exchange: whether directions go on to those that hold the same pieces.

    All of it is the same on every rank, though what a rank has to do may be nothing.
    """

    category: Category
    bucket: int
    nbytes: int = 0
    needs: frozenset[int] = frozenset()
    hops: int = 0
    travels: bool = True
    handed_round: bool = False


def note_work(node: Node, work: Work) -> None:
    """Say what ``node`` belongs to."""
    node.meta[_KEY] = work


def work_of(node: Node) -> Work | None:
    """What ``node`` belongs to; None for the model's own."""
    return node.meta.get(_KEY)
