"""The order of a device's operations: vector clocks over the log of its streams.

Every operation carries, for each stream, how many operations of it are done before this one may begin, known from its
own place, events and the host's waits. Two operations are ordered if one counts the other as done (Lamport 1978;
Mattern 1989, "Virtual time and global states of distributed systems"). Two that touch the same memory, one of them
writing, and are not ordered, are a race, even if no run shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["RANGED", "Access", "Op", "ordered", "unordered"]

#: kinds whose operations say which ranges of memory they touch
RANGED = ("nccl", "copy", "memset")


@dataclass(frozen=True)
class Access:
    """A range of memory; ``writes`` is True too where that is unknown."""

    start: int
    nbytes: int
    writes: bool

    def meets(self, other: Access) -> bool:
        """Return whether the two touch the same bytes and one of them writes."""
        overlap = self.start < other.start + other.nbytes and other.start < self.start + self.nbytes
        return overlap and (self.writes or other.writes)


@dataclass(frozen=True)
class Op:
    """An operation in the log of the device."""

    kind: str  # of ``device.KINDS``
    stream: int
    name: str
    amount: int = 0  # bytes of copies and of collectives' inputs, blocks of kernels
    ranks: int = 0  # in the communicator of a collective
    clock: tuple[int, ...] = ()  # by stream, operations that are done before this one ends, itself included
    touches: tuple[Access, ...] = ()


def _before(first: Op, second: Op) -> bool:
    place = first.clock[first.stream]
    return len(second.clock) > first.stream and second.clock[first.stream] >= place


def ordered(first: Op, second: Op) -> bool:
    """Return whether one of the operations ends before the other begins.

    >>> copy = Op("copy", 0, "copy", clock=(1,))
    >>> ordered(copy, Op("kernel", 1, "reads", clock=(0, 1)))    # on another stream, which waited for nothing
    False
    >>> ordered(copy, Op("kernel", 1, "reads", clock=(1, 2)))    # behind an event of the copy's stream
    True
    """
    return first.stream == second.stream or _before(first, second) or _before(second, first)


def unordered(ops: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """Yield pairs that touch the same memory and are not ordered, one of them a collective, copy or memset."""
    touching = [op for op in ops if op.touches]
    for i, first in enumerate(touching):
        for second in touching[i + 1 :]:
            if first.kind not in RANGED and second.kind not in RANGED:
                continue
            if ordered(first, second):
                continue
            if any(a.meets(b) for a in first.touches for b in second.touches):
                yield first, second
