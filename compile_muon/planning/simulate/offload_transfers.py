"""Buckets of offloaded state beside a step: on their way to the device and back, while kernels run.

What opens a bucket waits until it is there. What follows it in a step is read ahead, as far as buffers are free, from
the commit of the step before on. A bucket keeps its buffer from the beginning of its read until another is opened, or
until it is where it is kept. Each way between host and device, and the disk, serves one bucket at a time, first come;
of a file, a bucket goes on to the device when it is asked for. Requests are made when the device is there, of which the
host is ahead at times. Where the host computes a step, the device waits for the weights. docs/how-to/offload.md is the
same for users.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from compile_muon.offload.store import Bucket

__all__ = ["OffloadTransfers", "Move", "Moves", "OnHost"]


class Move(Enum):
    """What is asked for, of a bucket.

    Attributes:
        OPEN: it is about to be used.
        LEAVE: it was only read.
        CLOSE: it was written to.
        COMMIT: of none: all that was closed in this step is kept.
        COMPUTE: the host makes a step of what comes to it, and weights go back (:class:`OnHost`).
    """

    OPEN = "open"
    LEAVE = "leave"
    CLOSE = "close"
    COMMIT = "commit"
    COMPUTE = "compute"


@dataclass(frozen=True)
class OnHost:
    """A bucket whose step the host computes.

    Args:
        to_host, to_device: bytes that cross the link ahead of it and behind it.
        streamed: bytes of host memory that it reads and writes.
    """

    to_host: int
    to_device: int
    streamed: int


Moves = Sequence[tuple[Move, Bucket | OnHost | None]]


class OffloadTransfers:
    """Plays the moves of one step after the other; each step is the same.

    Args:
        moves: of a step.
        buffers: how many buckets are on the device or on their way.
        host: bytes/s between host and device, each way; 0 where no bucket goes there.
        disk: bytes/s of a disk, reads and writes together; 0 without one.
        memory: bytes/s of its memory that the host reads and writes in a step that it computes; 0 for no time at all.

    Attributes:
        bytes_in, bytes_out: of what this step has opened and closed, so far.
        travels: of each bucket: by which way, from when to when.
    """

    def __init__(self, moves: Moves, *, buffers: int, host: float, disk: float, memory: float = 0.0) -> None:
        self._order = list(_reads(moves))
        self._host, self._disk, self._memory = host or math.inf, disk, memory or math.inf
        self._asked: list[float] = []  # of what the host computes in this step: when it asks for the next gradients
        self._free = [0.0] * max(buffers, _together(moves))
        self._waiting: deque[tuple[Bucket, float]] = deque()  # read, or being read: when it is there
        self._next = 0
        self._ways: dict[str, float] = defaultdict(lambda: -math.inf)  # when each is free
        self._kept: dict[Bucket, float] = {}
        self._left: Bucket | None = None
        self.bytes_in = self.bytes_out = 0
        self.travels: list[tuple[str, float, float]] = []
        self._read_ahead(0.0)

    def play(self, move: Move, bucket: Bucket | OnHost | None, now: float) -> float:
        """When whoever asks may go on."""
        if isinstance(bucket, OnHost):
            return self._compute(bucket, now)
        if self._left is not None and bucket is not self._left and move is not Move.CLOSE:
            heapq.heappush(self._free, now)
            self._left = None
        if move is Move.LEAVE:
            self._left = bucket
        elif move is Move.OPEN and bucket is self._left:
            self._left = None
        elif move is Move.OPEN:
            self._read_ahead(now)
            opened, there = self._waiting.popleft()
            self.bytes_in += opened.nbytes
            now = max(now, self.travel("in", opened.nbytes, max(there, now)) if self._disk else there)
        elif bucket is not None:
            self._kept[bucket] = self._write(bucket, now)
            heapq.heappush(self._free, self._kept[bucket])
        else:
            now = max(now, *self._kept.values()) if self._disk and self._kept else now
            self._next = 0
            self._asked.clear()
        self._read_ahead(now)
        return now

    def _compute(self, step: OnHost, now: float) -> float:
        """When its weights are back. Gradients of a bucket leave once the host is done with the one before the last,
        and those of the first two once the device is done with them."""
        first = self._asked[0] if self._asked else now
        left = first if len(self._asked) < 3 else self._asked[-2]
        there = self.travel("out", step.to_host, left)
        done = self.travel("host", step.streamed, there)
        self._asked = [*(self._asked or [first]), done]
        self.bytes_out += step.to_host
        self.bytes_in += step.to_device
        return max(now, self.travel("in", step.to_device, done))

    def next_step(self, seconds: float) -> None:
        """The step has taken so long: times count from its end on."""
        self._free = [free - seconds for free in self._free]
        self._waiting = deque((bucket, there - seconds) for bucket, there in self._waiting)
        self._ways.update({way: free - seconds for way, free in self._ways.items()})
        self._kept.clear()  # what comes next has its buffer from one of these
        self.bytes_in = self.bytes_out = 0
        self.travels = [(way, start - seconds, end - seconds) for way, start, end in self.travels if end > seconds]

    def _read_ahead(self, now: float) -> None:
        while self._free and self._next < len(self._order):
            bucket = self._order[self._next]
            begin = max(now, heapq.heappop(self._free), self._kept.get(bucket, now))
            self._waiting.append((bucket, self.travel("disk" if self._disk else "in", bucket.nbytes, begin)))
            self._next += 1

    def _write(self, bucket: Bucket, now: float) -> float:
        self.bytes_out += bucket.nbytes
        end = self.travel("out", bucket.nbytes, now)
        return self.travel("disk", bucket.nbytes, end) if self._disk else end

    def travel(self, way: str, nbytes: int, now: float) -> float:
        """Over this way as soon as it is free; when it is over."""
        start = max(now, self._ways[way])
        rate = {"disk": self._disk, "host": self._memory}.get(way, self._host)
        end = self._ways[way] = start + nbytes / rate
        if end > start:
            self.travels.append((way, start, end))
        return end


def _reads(moves: Moves) -> Iterator[Bucket]:
    """Those that are opened, but where they are there already: none has been opened since they were left."""
    left = None
    for move, bucket in moves:
        if isinstance(bucket, OnHost):
            continue
        if move is Move.OPEN and bucket is not None and bucket is not left:
            yield bucket
        if move is not Move.CLOSE:
            left = bucket if move is Move.LEAVE else None


def _together(moves: Moves) -> int:
    """The most that are open at a time."""
    steps = {Move.OPEN: 1, Move.CLOSE: -1, Move.LEAVE: -1, Move.COMMIT: 0, Move.COMPUTE: 0}
    count = most = 0
    for move, _ in moves:
        count += steps[move]
        most = max(most, count)
    return most
