"""Labels on nodes that passes insert: category and bucket of their collective, for schedule, profiler and simulator."""

from dataclasses import dataclass
from enum import Enum

from torch.fx import Node

#: key of node.meta
_KEY = "muon_zero_work"


class Category(str, Enum):
    """The purpose of a collective."""

    #: unshard weights for the forward or backward that uses them
    GATHER = "gather"
    #: reduce gradients
    REDUCE = "reduce"
    #: send matrices to their owners, and directions back
    EXCHANGE = "exchange"
    #: gather resident weights anew, once a step
    REFRESH = "refresh"
    #: all-reduce norms and found_inf, once a step
    CHECKS = "checks"


@dataclass(frozen=True)
class Work:
    """The label of one bucket's nodes, equal on every rank, even one that sends nothing."""

    category: Category
    bucket: int  # number within its category
    nbytes: int = 0  # of a gather's full weights; of an exchange's send and receive buffers, averaged over ranks
    needs: frozenset[int] = frozenset()  # numbers of the REDUCE buckets whose gradients it reads
    hops: int = 0  # of an exchange: collectives, one after the other; ranks that own nothing may run only the last
    travels: bool = True  # whether updates travel before Newton-Schulz; else only directions travel, after it
    handed_round: bool = False  # whether directions are sent on to the replica group at the end


def note_work(node: Node, work: Work) -> None:
    """Label ``node``."""
    node.meta[_KEY] = work


def work_of(node: Node) -> Work | None:
    """Return the label of ``node``; None for a node of the model."""
    return node.meta.get(_KEY)
