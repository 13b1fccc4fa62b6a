"""Stores of optimizer state: in memory, or in a file of which a few buckets are in memory at a time.

A file has two places, generations, for every slot. Readers read the current one. A step writes the other, which becomes
current when all of the step is written: a step that fails half-way, in arithmetic or in a disk, leaves the current one
intact. The file has no name: it goes when the process does, however that ends. Runs go on from checkpoints.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compile_muon.errors import OffloadError, warn_user
from compile_muon.files.disk import unnamed_file

ALIGNED = 4096  # bytes: requests past the page cache begin and end with a page
_PIECE, _THREADS = 8 << 20, 4  # bytes of one request, and how many are under way at a time


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


@dataclass(eq=False)
class Slot:
    """A slot: one tensor of optimizer state on this rank."""

    name: str  # in errors
    shape: tuple[int, ...]
    dtype: torch.dtype
    use: str = ""  # which of its parameter's buckets has it; see :class:`~compile_muon.offload.layout.Chunk`
    label: str = ""  # of the state in errors; empty where nothing checks that it is finite
    whole: Slot = None  # type: ignore[assignment]  # the slot these are rows of; itself by default, set below
    first: int = 0  # index of these rows in `whole`

    def __post_init__(self) -> None:
        if self.whole is None:
            self.whole = self

    @property
    def nbytes(self) -> int:
        """Bytes of one generation."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def begin(self) -> int:
        """Offset in :attr:`whole`, in bytes."""
        return self.first * math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, first: int, count: int) -> Slot:
        """Return some of its rows as a slot of their own."""
        return replace(self, shape=(count, *self.shape[1:]), whole=self, first=first)


@dataclass(eq=False)
class Bucket:
    """Slots that are read and written together: neighbours in a file."""

    slots: Sequence[Slot]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, where each slot begins at a page boundary."""
        return sum(_up(slot.nbytes) for slot in self.slots)

    def views(self, memory: Tensor) -> dict[Slot, Tensor]:
        """Return views of the slots in ``memory``, a tensor of bytes, by their whole slots."""
        slot_views, begin = {}, 0
        for slot in self.slots:
            slot_views[slot.whole] = memory[begin : begin + slot.nbytes].view(slot.dtype).view(slot.shape)
            begin += _up(slot.nbytes)
        return slot_views


class Store:
    """State in memory, of the parameters' device or pinned on the host: written in place, so most calls do nothing."""

    device = torch.device("cpu")  # of the tensors that :meth:`open` returns
    folder: Path | None = None  # on the disk that has the file; None in memory
    bytes_read = bytes_written = 0  # of a disk, so far

    def __init__(self, buckets: Sequence[Bucket], device: torch.device, *, pin: bool = False) -> None:
        self.device = device
        wholes = dict.fromkeys(slot.whole for bucket in buckets for slot in bucket.slots)
        self._tensors = {
            slot: torch.zeros(slot.shape, dtype=slot.dtype, device=device, pin_memory=pin and slot.nbytes > 0)
            for slot in wholes
        }

    def start(self, bucket: Bucket) -> bool:
        """Begin to read a bucket that will be opened soon; return whether there is room for it."""
        return True

    def open(self, bucket: Bucket, *, read: bool = True) -> dict[Slot, Tensor]:
        """Return a bucket's slots in host or device memory, by their whole slots, until :meth:`leave` or :meth:`close`.

        ``read`` is False for a caller that overwrites all of it.

        Raises:
            OffloadError: the bucket cannot be read.
        """
        tensors = {slot.whole: self._tensors[slot.whole] for slot in bucket.slots}
        rows = {slot.whole: slot for slot in bucket.slots if slot is not slot.whole}
        return tensors | {whole: tensors[whole].narrow(0, slot.first, slot.shape[0]) for whole, slot in rows.items()}

    def leave(self, bucket: Bucket, ready: Callable[[], object] | None = None) -> None:
        """End the use of a bucket that was only read. ``ready`` returns when nothing reads its memory any more."""

    def close(self, bucket: Bucket, ready: Callable[[], object] | None = None) -> None:
        """Store a bucket that was written to. ``ready`` returns when its memory has the final values."""

    def finish(self) -> None:
        """Wait until every closed bucket is stored; raise OffloadError if one could not be written."""

    def commit(self, buckets: Collection[Bucket]) -> None:
        """Make the stored contents of these closed buckets current; other buckets keep their former contents."""

    def forget(self, bucket: Bucket | None = None) -> None:
        """Drop what was read ahead of a bucket that nobody works on: its :meth:`current` tensors will be written to.
        None drops all buckets, with the contents that were closed since the last commit."""

    def current(self, slot: Slot) -> Tensor:
        """Return the stored tensor of a whole slot, in host memory or mapped from the file, to read or write all of it.
        A step writes all rows of a whole slot, or none, also where these are slots of their own."""
        return self._tensors[slot]


@dataclass(eq=False)
class _SwapBuffer:
    """A buffer, and the bucket that is in it or on its way in or out."""

    memory: Tensor  # bytes
    bucket: Bucket | None = None  # whose current generation is in the buffer
    wrote: Bucket | None = None  # last written from the buffer
    reading: list[Future[int]] = field(default_factory=list)
    writing: list[Future[int]] = field(default_factory=list)
    left: Callable[[], object] | None = None  # returns when nothing reads from the buffer any more
    used: int = 0  # clock of the latest use, for eviction
    opened: bool = False  # a caller works on it
    ahead: bool = False  # read, and not opened yet

    @property
    def busy(self) -> bool:
        """Whether writes from the buffer are still under way."""
        return not all(request.done() for request in self.writing)

    def drop_reads(self) -> None:
        """Wait for reads into the buffer whose contents are no longer wanted."""
        for request in self.reading:
            request.exception()
        self.reading = []


class FileStore(Store):
    """State in a file without a name, in ``folder``; a constructor that raises OffloadError leaves nothing behind.

    ``buckets``: each slot is in one; rows of a larger slot begin and end at a page boundary, except its last.
    ``buffers``: buckets that may be in memory. ``pin``: buffers are pinned, for asynchronous copies to a GPU.
    """

    def __init__(self, folder: str | Path, buckets: Sequence[Bucket], *, buffers: int, pin: bool = False) -> None:
        self.folder = Path(folder)
        wholes = list(dict.fromkeys(slot.whole for bucket in buckets for slot in bucket.slots))
        *starts, self.nbytes = accumulate((_up(slot.nbytes) for slot in wholes), initial=0)
        size = max(2 * self.nbytes, ALIGNED)
        try:
            self._file = unnamed_file(self.folder, size)
        except OSError as error:
            raise OffloadError(
                f"offload.nvme_path = {str(folder)!r}: has no place for {size:,} bytes of optimizer state of this rank "
                f"({error.strerror}): nothing was sharded; give a folder on a disk with that much room, or offload to "
                "the cpu"
            ) from error
        weakref.finalize(self, os.close, self._file)
        _pass_the_cache(self._file, self.folder)
        self._places: dict[Slot, tuple[int, int]] = {}  # offsets: in generation 0 of the file, and in the bucket
        # One mapping for all slots: each mapping keeps a file descriptor open, and a process may have a thousand.
        memory = np.memmap(f"/proc/self/fd/{self._file}", np.uint8, "r+")
        start_of = dict(zip(wholes, starts, strict=True))
        self._mapped = {
            slot: tuple(
                torch.from_numpy(memory[begin:][: slot.nbytes]).view(slot.dtype).view(slot.shape)
                for begin in (start, self.nbytes + start)
            )
            for slot, start in start_of.items()
        }
        # The current generation of each whole slot.
        self._generation = dict.fromkeys(wholes, 0)
        for bucket in buckets:
            begin = 0
            for slot in bucket.slots:
                self._places[slot] = start_of[slot.whole] + slot.begin, begin
                begin += _up(slot.nbytes)
        largest = max([ALIGNED, *(bucket.nbytes for bucket in buckets)])
        self._swap_buffers = [_SwapBuffer(_buffer(largest, pin=pin)) for _ in range(min(buffers, len(buckets)))]
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="muon_zero offload")
        self._lock = threading.RLock()  # fetches of a backward run on an autograd thread
        self._clock = 0

    def start(self, bucket: Bucket) -> bool:
        """Begin to read a bucket, over the one used longest ago, never over one that was read and not opened yet."""
        with self._lock:
            if any(buffer.bucket is bucket for buffer in self._swap_buffers):
                return True
            free = [buffer for buffer in self._swap_buffers if not (buffer.opened or buffer.ahead or buffer.busy)]
            if not free:
                return False
            self._take(min(free, key=lambda buffer: buffer.used), bucket, read=True)
            return True

    def open(self, bucket: Bucket, *, read: bool = True) -> dict[Slot, Tensor]:
        with self._lock:
            buffer = next((buffer for buffer in self._swap_buffers if buffer.bucket is bucket), None)
            if buffer is None:
                free = [buffer for buffer in self._swap_buffers if not buffer.opened]
                buffer = min(free, key=lambda buffer: (buffer.ahead, buffer.busy, buffer.used))
                self._take(buffer, bucket, read=read)
            self._clock += 1
            buffer.used, buffer.opened, buffer.ahead = self._clock, True, False
            reading, buffer.reading = buffer.reading, []
            try:
                self.bytes_read += sum(request.result() for request in reading)
            except OSError as error:
                buffer.bucket, buffer.opened = None, False
                raise self._failed("read", bucket, error) from error
            return bucket.views(buffer.memory)

    def _take(self, buffer: _SwapBuffer, bucket: Bucket, *, read: bool) -> None:
        self._finish(buffer)
        buffer.drop_reads()
        buffer.bucket = None  # until its reads are under way: who raises amid them leaves an empty buffer
        if read:
            buffer.reading = self._requests(buffer, bucket, buffer.left, write=False)
        buffer.bucket, buffer.ahead = bucket, True

    def leave(self, bucket: Bucket, ready: Callable[[], object] | None = None) -> None:
        with self._lock:
            for buffer in self._swap_buffers:
                if buffer.bucket is bucket:
                    buffer.opened, buffer.left = False, ready

    def close(self, bucket: Bucket, ready: Callable[[], object] | None = None) -> None:
        """Write a bucket to the other generation, on threads."""
        with self._lock:
            for other in self._swap_buffers:
                if other.wrote is bucket:  # two writes to the same place must not overtake each other
                    self._finish(other)
            buffer = next(buffer for buffer in self._swap_buffers if buffer.bucket is bucket)
            buffer.writing = self._requests(buffer, bucket, ready, write=True)
            buffer.bucket, buffer.wrote, buffer.opened = None, bucket, False  # has the next generation, not the current

    def finish(self) -> None:
        with self._lock:
            for buffer in self._swap_buffers:
                self._finish(buffer)

    def commit(self, buckets: Collection[Bucket]) -> None:
        """Make the written generation of these buckets current."""
        with self._lock:
            for whole in {slot.whole for bucket in buckets for slot in bucket.slots} & self._generation.keys():
                self._generation[whole] ^= 1
            for buffer in self._swap_buffers:
                if buffer.bucket in buckets:
                    buffer.bucket, buffer.ahead = None, False  # has the former generation

    def forget(self, bucket: Bucket | None = None) -> None:
        """Drop what was read ahead of a bucket; of all, with what was written and not committed, where it is None."""
        with self._lock:
            for buffer in self._swap_buffers:
                if bucket is None:
                    for request in buffer.writing:
                        request.exception()
                    buffer.writing, buffer.opened = [], False
                if bucket in (None, buffer.bucket):
                    buffer.drop_reads()
                    buffer.bucket, buffer.ahead = None, False

    def current(self, slot: Slot) -> Tensor:
        return self._mapped[slot][self._generation[slot]]

    # ------------------------------------------------------------------ buffers

    def _finish(self, buffer: _SwapBuffer) -> None:
        writing, buffer.writing = buffer.writing, []
        try:
            self.bytes_written += sum(request.result() for request in writing)
        except OSError as error:
            raise self._failed("write", None, error) from error

    def _failed(self, what: str, bucket: Bucket | None, error: OSError) -> OffloadError:
        which = "" if bucket is None else f", {bucket.slots[0].name}"
        return OffloadError(
            f"offload.nvme_path = {str(self.folder)!r}: cannot {what} optimizer state{which} "
            f"({error.strerror or error}): weights and state are as they were; make room, mend the disk, or offload to "
            "the cpu"
        )

    # ------------------------------------------------------------------ the file

    def _requests(
        self, buffer: _SwapBuffer, bucket: Bucket, ready: Callable[[], object] | None, *, write: bool
    ) -> list[Future[int]]:
        """Submit reads of a bucket's current generation, or writes of the other, in pieces, neighbours in the file
        together, once ``ready`` returns."""
        first = None if ready is None else self._threads.submit(ready)
        runs: list[list[int]] = []
        for slot in bucket.slots:
            (offset, begin), generation = self._places[slot], self._generation[slot.whole] ^ write
            size, place = _up(slot.nbytes), generation * self.nbytes + offset
            if runs and runs[-1][2] + runs[-1][1] == place:
                runs[-1][1] += size
            else:
                runs.append([begin, size, place])
        pieces = [
            (buffer.memory[begin + k : begin + min(k + _PIECE, size)], place + k)
            for begin, size, place in runs
            for k in range(0, size, _PIECE)
        ]
        return [self._threads.submit(self._transfer, memory, place, first, write) for memory, place in pieces]

    def _transfer(self, memory: Tensor, place: int, first: Future[Any] | None, write: bool) -> int:
        """Read or write all of ``memory`` at ``place`` in the file, by several calls if need be; return its bytes."""
        if first is not None:
            first.result()
        call, done = os.pwritev if write else os.preadv, 0
        while done < len(memory):
            count = call(self._file, [memory[done:].numpy().data], place + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ends early")
            done += count
        return done


def _buffer(nbytes: int, *, pin: bool) -> Tensor:
    """Allocate bytes that begin at a page boundary, as pinned memory does too."""
    if pin:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _pass_the_cache(file: int, folder: Path) -> None:
    """Set O_DIRECT, to bypass the page cache, where the file system supports it."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file, [mmap.mmap(-1, ALIGNED)], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        problem = "its file system has no O_DIRECT; state goes by the page cache"
        warn_user(f"offload.nvme_path = {str(folder)!r}: {problem}", this_rank=True)
