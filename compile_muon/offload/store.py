"""Where optimizer state is kept: in memory, or in a file of which a few buckets are in memory at a time.

In a file every slot has two places, generations. Readers read the current one. A step writes the other, which becomes
current when all of the step is written: a step that fails half-way, in arithmetic or in a disk, leaves what it found.
The file has no name: it goes when the process does, however that ends. What a run goes on from is a checkpoint.
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

__all__ = ["ALIGNED", "Bucket", "FileStore", "Slot", "Store"]

ALIGNED = 4096  # bytes: requests past the page cache begin and end with a page
_PIECE, _THREADS = 8 << 20, 4  # bytes of one request, and how many are under way at a time


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


@dataclass(eq=False)
class Slot:
    """One tensor.

    Args:
        name: of it, for errors.
        shape, dtype: of what this rank holds.
        use: which of its parameter's buckets has it; see :class:`~compile_muon.offload.layout.Chunk`.
        label: what errors call the state; empty where nobody asks whether it is finite.
        whole: the tensor that these are rows of; itself where it is no part of another.
        first: of these rows, in it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    use: str = ""
    label: str = ""
    whole: Slot = None  # type: ignore[assignment]  # set below
    first: int = 0

    def __post_init__(self) -> None:
        if self.whole is None:
            self.whole = self

    @property
    def nbytes(self) -> int:
        """Of one generation."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def begin(self) -> int:
        """In bytes, in :attr:`whole`."""
        return self.first * math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, first: int, count: int) -> Slot:
        """Some of its rows, as a slot of their own."""
        return replace(self, shape=(count, *self.shape[1:]), whole=self, first=first)


@dataclass(eq=False)
class Bucket:
    """Slots that are read and written together: neighbours in a file."""

    slots: Sequence[Slot]

    @property
    def nbytes(self) -> int:
        """In memory: slots begin with a page."""
        return sum(_up(slot.nbytes) for slot in self.slots)

    def views(self, memory: Tensor) -> dict[Slot, Tensor]:
        """The slots in ``memory``, which are bytes, by the tensors that they are rows of."""
        found, begin = {}, 0
        for slot in self.slots:
            found[slot.whole] = memory[begin : begin + slot.nbytes].view(slot.dtype).view(slot.shape)
            begin += _up(slot.nbytes)
        return found


class Store:
    """State in memory, on the parameters' device or pinned on the host: written in place, so most calls do nothing.

    Args:
        device: whose memory.
        pin: for copies that a GPU makes by itself.
    Attributes:
        device: whose memory :meth:`open` gives.
        folder: on the disk that has it; None in memory.
        bytes_read, bytes_written: of a disk, so far.
    """

    device = torch.device("cpu")
    folder: Path | None = None
    bytes_read = bytes_written = 0

    def __init__(self, buckets: Sequence[Bucket], device: torch.device, *, pin: bool = False) -> None:
        self.device = device
        wholes = dict.fromkeys(slot.whole for bucket in buckets for slot in bucket.slots)
        self._tensors = {
            slot: torch.zeros(slot.shape, dtype=slot.dtype, device=device, pin_memory=pin and slot.nbytes > 0)
            for slot in wholes
        }

    def start(self, bucket: Bucket) -> bool:
        """It will be asked for soon; whether there is room for it."""
        return True

    def open(self, bucket: Bucket, *, read: bool = True) -> dict[Slot, Tensor]:
        """Its slots in host or device memory, by those that they are rows of, until :meth:`leave` or :meth:`close`.

        Args:
            read: False for who writes all of it.
        Raises:
            OffloadError: it cannot be read.
        """
        found = {slot.whole: self._tensors[slot.whole] for slot in bucket.slots}
        rows = {slot.whole: slot for slot in bucket.slots if slot is not slot.whole}
        return found | {whole: found[whole].narrow(0, slot.first, slot.shape[0]) for whole, slot in rows.items()}

    def leave(self, bucket: Bucket, ready: Callable[[], object] | None = None) -> None:
        """What :meth:`open` gave was only read. ``ready`` returns when nobody reads it any more."""

    def close(self, bucket: Bucket, ready: Callable[[], object] | None = None) -> None:
        """What :meth:`open` gave was written to: keep it. ``ready`` returns when all of it is there."""

    def finish(self) -> None:
        """Return once all that was closed is kept.

        Raises:
            OffloadError: some of it could not be written.
        """

    def commit(self, buckets: Collection[Bucket]) -> None:
        """What these were closed with, and is kept, is current from now on; what others were closed with is not."""

    def forget(self, bucket: Bucket | None = None) -> None:
        """Someone writes to :meth:`current` of this bucket, which nobody works on: what was read of it ahead is old.
        Of all where it is None, with what was closed since the last commit."""

    def current(self, slot: Slot) -> Tensor:
        """What is kept, in host memory or as mapped from a file, for whoever looks at all of it.

        Args:
            slot: a whole one. Where its rows are slots, a step writes all of them or none.
        """
        return self._tensors[slot]


@dataclass(eq=False)
class _Held:
    """A buffer, and what is in it or on its way into it or out of it.

    Args:
        memory: its bytes.
        bucket: what it holds of the current generation.
        wrote: what was last written from it.
        left: returns when nobody reads from it any more.
        opened: whether somebody works on it.
        ahead: whether it was read and not asked for yet.
    """

    memory: Tensor
    bucket: Bucket | None = None
    wrote: Bucket | None = None
    reading: list[Future[int]] = field(default_factory=list)
    writing: list[Future[int]] = field(default_factory=list)
    left: Callable[[], object] | None = None
    used: int = 0
    opened: bool = False
    ahead: bool = False

    @property
    def busy(self) -> bool:
        """Whether it is still being written from."""
        return not all(request.done() for request in self.writing)

    def drop_reads(self) -> None:
        """Wait for what is on its way into it, which nobody wants."""
        for request in self.reading:
            request.exception()
        self.reading = []


class FileStore(Store):
    """In a file without a name.

    Args:
        folder: on the disk that is to hold it.
        buckets: of slots; each slot in one. Rows of a larger one begin and end with a page, but for its last.
        buffers: how many buckets may be in memory.
        pin: for copies that a GPU makes by itself.
    Raises:
        OffloadError: the folder is not there, or the disk has no room for all of it; nothing is left behind then.
    """

    def __init__(
        self, folder: str | os.PathLike, buckets: Sequence[Bucket], *, buffers: int, pin: bool = False
    ) -> None:
        self.folder = Path(folder)
        wholes = list(dict.fromkeys(slot.whole for bucket in buckets for slot in bucket.slots))
        *starts, self.nbytes = accumulate((_up(slot.nbytes) for slot in wholes), initial=0)
        self._file = _unnamed(self.folder, max(2 * self.nbytes, ALIGNED))
        weakref.finalize(self, os.close, self._file)
        _pass_the_cache(self._file, self.folder)
        self._places: dict[Slot, tuple[int, int]] = {}  # bytes: in generation 0 of the file, and in the bucket
        # One mapping: each keeps a descriptor, of which a process may have a thousand.
        memory = np.memmap(f"/proc/self/fd/{self._file}", np.uint8, "r+")
        start_of = dict(zip(wholes, starts, strict=True))
        self._mapped = {
            slot: tuple(_viewed(memory[g * self.nbytes + start :], slot) for g in range(2))
            for slot, start in start_of.items()
        }
        # Which is current; a step writes the other.
        self._generation = dict.fromkeys(wholes, 0)
        for bucket in buckets:
            begin = 0
            for slot in bucket.slots:
                self._places[slot] = start_of[slot.whole] + slot.begin, begin
                begin += _up(slot.nbytes)
        largest = max([ALIGNED, *(bucket.nbytes for bucket in buckets)])
        self._held = [_Held(_buffer(largest, pin=pin)) for _ in range(min(buffers, len(buckets)))]
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="muon_zero offload")
        self._lock = threading.RLock()  # backward runs on a thread of autograd's
        self._clock = 0

    def start(self, bucket: Bucket) -> bool:
        """Begin to read it, over what was used longest ago; never over what was read and not asked for."""
        with self._lock:
            if any(held.bucket is bucket for held in self._held):
                return True
            free = [held for held in self._held if not (held.opened or held.ahead or held.busy)]
            if not free:
                return False
            self._take(min(free, key=lambda held: held.used), bucket, read=True)
            return True

    def open(self, bucket: Bucket, *, read: bool = True) -> dict[Slot, Tensor]:
        """Its slots in a buffer, once they are read."""
        with self._lock:
            held = next((held for held in self._held if held.bucket is bucket), None)
            if held is None:
                free = [held for held in self._held if not held.opened]
                held = min(free, key=lambda held: (held.ahead, held.busy, held.used))
                self._take(held, bucket, read=read)
            self._clock += 1
            held.used, held.opened, held.ahead = self._clock, True, False
            reading, held.reading = held.reading, []
            try:
                self.bytes_read += sum(request.result() for request in reading)
            except OSError as error:
                held.bucket, held.opened = None, False
                raise self._failed("read", bucket, error) from error
            return bucket.views(held.memory)

    def _take(self, held: _Held, bucket: Bucket, *, read: bool) -> None:
        self._finish(held)
        held.drop_reads()
        held.bucket, held.ahead = bucket, True
        if read:
            held.reading = self._requests(self._read, held, bucket, False, held.left)

    def leave(self, bucket: Bucket, ready: Callable[[], object] | None = None) -> None:
        """Its buffer may be for another one."""
        with self._lock:
            for held in self._held:
                if held.bucket is bucket:
                    held.opened, held.left = False, ready

    def close(self, bucket: Bucket, ready: Callable[[], object] | None = None) -> None:
        """Write it to the other generation, from threads."""
        with self._lock:
            for other in self._held:
                if other.wrote is bucket:  # to the same place
                    self._finish(other)
            held = next(held for held in self._held if held.bucket is bucket)
            held.writing = self._requests(self._write, held, bucket, True, ready)
            held.bucket, held.wrote, held.opened = None, bucket, False  # not what is current

    def finish(self) -> None:
        """Wait for the writes."""
        with self._lock:
            for held in self._held:
                self._finish(held)

    def commit(self, buckets: Collection[Bucket]) -> None:
        """The generation that was written becomes current."""
        with self._lock:
            for whole in {slot.whole for bucket in buckets for slot in bucket.slots} & self._generation.keys():
                self._generation[whole] ^= 1
            for held in self._held:
                if held.bucket in buckets:
                    held.bucket, held.ahead = None, False  # read before

    def forget(self, bucket: Bucket | None = None) -> None:
        """What was read of it ahead; of all where it is None, with what was written, which never becomes current."""
        with self._lock:
            for held in self._held:
                if bucket is None:
                    for request in held.writing:
                        request.exception()
                    held.writing, held.opened = [], False
                if bucket in (None, held.bucket):
                    held.drop_reads()
                    held.bucket, held.ahead = None, False

    def current(self, slot: Slot) -> Tensor:
        """As mapped from the file."""
        return self._mapped[slot][self._generation[slot]]

    # ------------------------------------------------------------------ buffers

    def _finish(self, held: _Held) -> None:
        """Wait until it is written."""
        writing, held.writing = held.writing, []
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

    def _read(self, memory: Tensor, place: int) -> int:
        """From the file into a buffer; how many bytes it got, which may be fewer."""
        return os.preadv(self._file, [memory.numpy().data], place)

    def _write(self, memory: Tensor, place: int) -> int:
        return os.pwritev(self._file, [memory.numpy().data], place)

    def _requests(
        self,
        call: Callable[[Tensor, int], int],
        held: _Held,
        bucket: Bucket,
        other: bool,
        ready: Callable[[], object] | None,
    ) -> list[Future[int]]:
        """Neighbours of the current generation, or of the other, in pieces, once ``ready`` returns."""
        first = None if ready is None else self._threads.submit(ready)
        runs: list[list[int]] = []
        for slot in bucket.slots:
            (offset, begin), generation = self._places[slot], self._generation[slot.whole] ^ other
            size, place = _up(slot.nbytes), generation * self.nbytes + offset
            if runs and runs[-1][2] + runs[-1][1] == place:
                runs[-1][1] += size
            else:
                runs.append([begin, size, place])
        return [
            self._threads.submit(
                _all_of, call, held.memory[begin + k : begin + min(k + _PIECE, size)], place + k, first
            )
            for begin, size, place in runs
            for k in range(0, size, _PIECE)
        ]


def _buffer(nbytes: int, *, pin: bool) -> Tensor:
    """Bytes that start with a page; pinned memory does as well."""
    if pin:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _viewed(memory: np.ndarray, slot: Slot) -> Tensor:
    """The slot at the start of it."""
    return torch.from_numpy(memory[: slot.nbytes]).view(slot.dtype).view(slot.shape)


def _all_of(call: Callable[[Tensor, int], int], memory: Tensor, place: int, first: Future[Any] | None) -> int:
    """Until all bytes are read or written: a call may do a part."""
    if first is not None:
        first.result()
    done = 0
    while done < len(memory):
        count = call(memory[done:], place + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends early")
        done += count
    return done


def _unnamed(folder: Path, nbytes: int) -> int:
    """A file of that size without a name, all of it allocated."""
    try:
        return unnamed_file(folder, nbytes)
    except OSError as error:
        raise OffloadError(
            f"offload.nvme_path = {str(folder)!r}: has no place for {nbytes:,} bytes of optimizer state of this rank "
            f"({error.strerror}): nothing was sharded; give a folder on a disk with that much room, or offload to the "
            "cpu"
        ) from error


def _pass_the_cache(file: int, folder: Path) -> None:
    """Read and write it past the page cache, where the file system can."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file, [mmap.mmap(-1, ALIGNED)], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        problem = "its file system has no O_DIRECT; state goes by the page cache"
        warn_user(f"offload.nvme_path = {str(folder)!r}: {problem}", own=True)
