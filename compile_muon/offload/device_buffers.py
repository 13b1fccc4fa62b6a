"""The pool of buffers in which a device works on buckets: a few of them at a time, copied on streams of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compile_muon.offload.store import Bucket, Slot, Store

__all__ = ["DeviceBuffers", "ReadAhead"]

#: of a bucket, how often it has been opened in a step; of none, the beginning
_Visit = tuple[Bucket | None, int]


@dataclass(eq=False)
class _Buffer:
    """Device memory of one bucket.

    Args:
        memory: bytes.
        bucket: what is in it or on its way into it.
        arrived: once it is there.
        free: once nobody reads or copies from it.
    """

    memory: Tensor
    bucket: Bucket | None = None
    arrived: torch.Event | None = None
    free: torch.Event | None = None
    used: int = 0


class DeviceBuffers:
    """Where work on buckets is done, of whatever store: the one pool of buffers on the device.

    Args:
        placed: each store, its buckets, and the device that computes with them. Of memory that it sees itself, nothing
            is copied: where that is a buffer between it and a disk, the disk waits for the work that was queued on it.
        count: how many buckets it holds.
        real: False for fake tensors, which have no streams.
    Attributes:
        stores: all of them; ``on_disk`` whether a disk has a part in it.
    """

    def __init__(
        self, placed: Sequence[tuple[Store, Sequence[Bucket], torch.device]], *, count: int, real: bool
    ) -> None:
        self.stores = [store for store, *_ in placed]
        self._store_of = {bucket: store for store, buckets, _ in placed for bucket in buckets}
        self.on_disk = any(store.folder is not None for store in self.stores)
        self._keeper = {slot.whole: store for bucket, store in self._store_of.items() for slot in bucket.slots}
        self._users = {bucket: user for _, buckets, user in placed for bucket in buckets if user.type != "cpu"}
        copied = {bucket: user for bucket, user in self._users.items() if self._store_of[bucket].device != user}
        self._buffers: list[_Buffer] = []
        if real and copied:
            largest, device = max(bucket.nbytes for bucket in copied), next(iter(copied.values()))
            memory = torch.empty(min(count, len(copied)), largest, dtype=torch.uint8, device=device)
            self._buffers = [_Buffer(each) for each in memory]
            self._in, self._out = torch.Stream(device), torch.Stream(device)
        self._copied = frozenset(copied)
        self._written: dict[Bucket, torch.Event] = {}
        self._in_use: dict[Bucket, dict[Slot, Tensor]] = {}
        self._clock = 0

    @property
    def in_use(self) -> bool:
        """Whether somebody works on a bucket, or has broken off amid that."""
        return bool(self._in_use)

    def in_file(self, bucket: Bucket) -> bool:
        """Whether it is in one."""
        return self._store_of[bucket].folder is not None

    def current(self, slot: Slot) -> Tensor:
        """See :meth:`~compile_muon.offload.store.Store.current`."""
        return self._keeper[slot].current(slot)

    def start(self, bucket: Bucket) -> bool:
        """It will be asked for soon; whether there is room for it."""
        if self.in_file(bucket) or not self._has(bucket):
            return self._store_of[bucket].start(bucket)
        if all(buffer.bucket in self._in_use for buffer in self._buffers):
            return False
        self._lift(bucket)
        return True

    def open(self, bucket: Bucket) -> dict[Slot, Tensor]:
        """Its slots on the device, by those that they are rows of; call :meth:`close` or :meth:`leave` behind the work.

        Raises:
            OffloadError: it cannot be read.
        """
        store = self._store_of[bucket]
        self._in_use[bucket] = found = dict[Slot, Tensor]()
        if bucket not in self._copied:
            found |= store.open(bucket)
        elif self._has(bucket):
            buffer = self._lift(bucket)
            assert buffer.arrived is not None
            torch.accelerator.current_stream().wait_event(buffer.arrived)
            found |= bucket.views(buffer.memory)
        else:
            found |= {slot: tensor.to(self._users[bucket]) for slot, tensor in store.open(bucket).items()}
        return found

    def leave(self, bucket: Bucket) -> None:
        """It was only read."""
        self._store_of[bucket].leave(bucket, self._worked(bucket))
        if self._has(bucket):
            self._buffer_of(bucket).free = torch.accelerator.current_stream().record_event()
        self._in_use.pop(bucket, None)

    def close(self, bucket: Bucket) -> None:
        """It was written to: keep it."""
        store, found = self._store_of[bucket], self._in_use[bucket]
        if bucket not in self._copied:
            store.close(bucket, self._worked(bucket))
        elif not self._has(bucket):
            for slot, tensor in store.open(bucket, read=False).items():
                tensor.copy_(found[slot])
        else:
            buffer, host = self._buffer_of(bucket), store.open(bucket, read=False)
            self._out.wait_event(torch.accelerator.current_stream().record_event())
            with self._out:
                for slot, tensor in host.items():
                    tensor.copy_(found[slot], non_blocking=True)
                written = self._out.record_event()
            buffer.free = self._written[bucket] = written
            buffer.bucket = None  # in a file it is not current yet
            store.close(bucket, written.synchronize)
        del self._in_use[bucket]

    def commit(self, buckets: Collection[Bucket]) -> None:
        """What these were closed with is current from now on."""
        for store in self.stores:
            store.commit(buckets)

    def finish(self) -> None:
        """Return once all that was closed is kept.

        Raises:
            OffloadError: some of it could not be written.
        """
        for store in self.stores:
            store.finish()

    def forget(self, bucket: Bucket | None = None) -> None:
        """Someone writes to what is kept of this one: nobody works on it now, and what was read of it ahead is old.
        Of all, and what is in use too, where it is None: they are others now, or a step is given up."""
        self.settle()
        if bucket is None:
            self._in_use.clear()
        for store in self.stores:
            store.forget(bucket)
        for buffer in self._buffers:
            if bucket in (None, buffer.bucket):
                buffer.bucket = None

    def settle(self) -> None:
        """Wait until host memory has what was closed."""
        written, self._written = self._written, {}
        for event in written.values():
            event.synchronize()

    def _has(self, bucket: Bucket) -> bool:
        """Whether it takes turns in the buffers here."""
        return bool(self._buffers) and bucket in self._copied

    def _buffer_of(self, bucket: Bucket) -> _Buffer:
        return next(buffer for buffer in self._buffers if buffer.bucket is bucket)

    def _worked(self, bucket: Bucket) -> Callable[[], object] | None:
        """Returns when the device has done what is queued, where it works in a buffer of the store's."""
        own_buffer = bucket not in self._users or bucket in self._copied
        if own_buffer or not self.in_file(bucket):
            return None
        return torch.accelerator.current_stream().record_event().synchronize

    def _lift(self, bucket: Bucket) -> _Buffer:
        """Begin to copy it, over what was used longest ago."""
        self._clock += 1
        for buffer in self._buffers:
            if buffer.bucket is bucket:
                buffer.used = self._clock
                return buffer
        buffer = min((each for each in self._buffers if each.bucket not in self._in_use), key=lambda each: each.used)
        store = self._store_of[bucket]
        host = store.open(bucket)
        if buffer.free is not None:
            self._in.wait_event(buffer.free)
        if (written := self._written.get(bucket)) is not None:
            self._in.wait_event(written)
        buffer.bucket, buffer.used = bucket, self._clock
        with self._in:
            for slot, view in bucket.views(buffer.memory).items():
                view.copy_(host[slot], non_blocking=True)
            buffer.arrived = self._in.record_event()
        if self.in_file(bucket):
            buffer.arrived.synchronize()  # the store's buffer is for others now
            store.leave(bucket)
        return buffer


class ReadAhead:
    """Opens buckets, and begins to read what was opened behind them the last time.

    Args:
        buffers: that it reads into.
        count: how many buckets are in them or on their way.
    """

    def __init__(self, buffers: DeviceBuffers, count: int) -> None:
        self._buffers, self._count = buffers, count
        # What was opened behind it, the last time, each by how often it had been in the step; behind None, first.
        self._followed: dict[_Visit, _Visit] = {}
        self._visits: Counter[Bucket | None] = Counter()
        self._last: _Visit = None, 0

    def open(self, bucket: Bucket) -> dict[Slot, Tensor]:
        """Its slots; what is opened behind what is remembered."""
        if bucket is not self._last[0]:
            self._visits[bucket] += 1
            before, self._last = self._last, (bucket, self._visits[bucket])
            self._followed[before] = self._last
        return self._buffers.open(bucket)

    def go(self) -> None:
        """Begin to read what came behind the last in a step before, as far as there is room beside that."""
        visit = self._last
        for _ in range(self._count - (visit[0] is not None)):
            if (following := self._followed.get(visit)) is None:
                break
            bucket, _ = visit = following
            if bucket is None or not self._buffers.start(bucket):
                break

    def next_step(self) -> None:
        """What the next step reads is current from now on."""
        self._followed.pop(self._last, None)
        self._visits.clear()
        self._last = None, 0
        self.go()
