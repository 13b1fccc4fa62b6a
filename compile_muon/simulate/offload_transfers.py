"""Move buckets of offloaded state to the device and back during a step, while kernels run.

Opening a bucket waits until it is on the device. The next buckets of the step are prefetched as far as buffers are
free, from the commit of the previous step on. A bucket holds its buffer from the start of its read until another bucket
is opened or, if it was written, until it is stored. Each way between host and device, and the disk, serves one bucket
at a time, in order; a bucket of a file is prefetched to host memory and goes on to the device when it is opened.
Requests are made at the time of the device, which the host may be ahead of. Where the host computes a step, the device
waits for the weights. docs/how-to/offload.md explains it to users.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from compile_muon.offload.store import Bucket


class Move(Enum):
    """A request for a bucket of offloaded state."""

    OPEN = "open"  # about to be used
    LEAVE = "leave"  # was only read
    CLOSE = "close"  # was written
    COMMIT = "commit"  # of no bucket: everything closed in this step is stored
    COMPUTE = "compute"  # the host computes a step (:class:`OnHost`): gradients go there, weights come back


@dataclass(frozen=True)
class OnHost:
    """A bucket whose step the host computes."""

    to_host: int  # bytes over the link ahead of the step
    to_device: int  # bytes over the link behind it
    streamed: int  # bytes of host memory read and written


Moves = Sequence[tuple[Move, Bucket | OnHost | None]]


class OffloadTransfers:
    """Carries out the moves of one step after another; every step has the same.

    `buffers`: buckets on the device or on their way; `host`: bytes/s between host and device, each way, 0 where no
    bucket goes there; `disk`: bytes/s of a disk, reads and writes together, 0 without one; `memory`: bytes/s of host
    memory that a step on the host reads and writes, 0 for no time at all.
    """

    def __init__(self, moves: Moves, *, buffers: int, host: float, disk: float, memory: float = 0.0) -> None:
        self._order = list(_reads(moves))
        self._host, self._disk, self._memory = host or math.inf, disk, memory or math.inf
        # when the host may fetch gradients: the first request, then the end of each bucket
        self._asked: list[float] = []
        # A heap of times: when each buffer is free.
        self._free = [0.0] * max(buffers, _together(moves))
        # buckets prefetched or on their way, and when they are there
        self._waiting: deque[tuple[Bucket, float]] = deque()
        self._next = 0  # position in the order of the next bucket to prefetch
        self._ways: dict[str, float] = defaultdict(lambda: -math.inf)  # when each way is free
        self._kept: dict[Bucket, float] = {}  # when each bucket written in this step is stored
        self._left: Bucket | None = None  # last bucket read, whose buffer is not reused yet
        self.bytes_in = self.bytes_out = 0  # of the buckets opened and closed in this step so far
        self.travels: list[tuple[str, float, float]] = []  # (way, start, end) of each bucket
        self._read_ahead(0.0)

    def play(self, move: Move, bucket: Bucket | OnHost | None, now: float) -> float:
        """Carry out a move at time `now`; return when the device may go on."""
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
        """Return when the weights of a step on the host are back on the device.

        Gradients of a bucket leave once the host has computed the last bucket but one; those of the first two once the
        device has asked for the first.
        """
        first = self._asked[0] if self._asked else now
        leaves_at = first if len(self._asked) < 3 else self._asked[-2]
        arrived_at = self.travel("out", step.to_host, leaves_at)
        computed_at = self.travel("host", step.streamed, arrived_at)
        self._asked = [*(self._asked or [first]), computed_at]
        self.bytes_out += step.to_host
        self.bytes_in += step.to_device
        return max(now, self.travel("in", step.to_device, computed_at))

    def next_step(self, seconds: float) -> None:
        """Begin the next step: the last one took `seconds`, and times count from its end."""
        self._free = [free - seconds for free in self._free]
        self._waiting = deque((bucket, there - seconds) for bucket, there in self._waiting)
        self._ways.update({way: free - seconds for way, free in self._ways.items()})
        self._kept.clear()  # the next read of a bucket waits for a buffer that one of these writes frees
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
        """Send bytes over `way` ("in", "out", "disk", "host") as soon as it is free; return when they have arrived."""
        start = max(now, self._ways[way])
        rate = {"disk": self._disk, "host": self._memory}.get(way, self._host)
        end = self._ways[way] = start + nbytes / rate
        if end > start:
            self.travels.append((way, start, end))
        return end


def _reads(moves: Moves) -> Iterator[Bucket]:
    """Yield the buckets that a step reads. A bucket opened again right after it was left is still on the device."""
    left_bucket = None
    for move, bucket in moves:
        if move is Move.OPEN and isinstance(bucket, Bucket) and bucket is not left_bucket:
            yield bucket
        if move not in (Move.CLOSE, Move.COMPUTE):
            left_bucket = bucket if move is Move.LEAVE else None


def _together(moves: Moves) -> int:
    """Return the most buckets that are open at a time."""
    steps = {Move.OPEN: 1, Move.CLOSE: -1, Move.LEAVE: -1}
    return max(accumulate(steps.get(move, 0) for move, _ in moves), default=0)
