"""Device buffers: a pool in which the device works on a few buckets at a time, copied on streams of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compile_muon.offload.store import Bucket, Slot, Store

#: a store, its buckets, and the device that computes with them
Placed = tuple[Store, Sequence[Bucket], torch.device]
#: a bucket, and how often the step has opened it; (None, 0) is the beginning of a step
_Visit = tuple[Bucket | None, int]


@dataclass(eq=False)
class _Buffer:
    """Device memory of one bucket."""

    memory: Tensor  # bytes
    bucket: Bucket | None = None  # in it, or on its way into it
    arrived: torch.Event | None = None  # on the copy stream, once the bucket is there
    free: torch.Event | None = None  # once nothing reads or copies from it
    used: int = 0  # clock of the latest use, for eviction


class DeviceBuffers:
    """The pool of buffers on the device, for ``count`` buckets of all stores.

    Nothing is copied of a store in the own memory of the device that computes; where this memory is a buffer of a file,
    the disk waits for the work queued on it. ``real`` is False for fake tensors, which have no streams.
    """

    def __init__(self, placed: Sequence[Placed], *, count: int, real: bool) -> None:
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
            self._buffers = [_Buffer(block) for block in memory]
            self._in, self._out = torch.Stream(device), torch.Stream(device)
        self._copied = frozenset(copied)
        self._written: dict[Bucket, torch.Event] = {}
        self.in_use: dict[Bucket, dict[Slot, Tensor]] = {}  # open, by work that goes on or that broke off
        self._clock = 0

    def in_file(self, bucket: Bucket) -> bool:
        return self._store_of[bucket].folder is not None

    def current(self, slot: Slot) -> Tensor:
        """Return the stored tensor of a slot, see :meth:`~compile_muon.offload.store.Store.current`."""
        return self._keeper[slot].current(slot)

    def start(self, bucket: Bucket) -> bool:
        """Begin to read a bucket that will be opened soon; return whether there is room for it."""
        if self.in_file(bucket) or not self._has(bucket):
            return self._store_of[bucket].start(bucket)
        if all(buffer.bucket in self.in_use for buffer in self._buffers):
            return False
        self._lift(bucket)
        return True

    def open(self, bucket: Bucket) -> dict[Slot, Tensor]:
        """Return a bucket's slots on the device, by their whole slots, until :meth:`leave` or :meth:`close`."""
        store = self._store_of[bucket]
        self.in_use[bucket] = device_slots = dict[Slot, Tensor]()
        if bucket not in self._copied:
            device_slots |= store.open(bucket)
        elif self._has(bucket):
            buffer = self._lift(bucket)
            assert buffer.arrived is not None
            torch.accelerator.current_stream().wait_event(buffer.arrived)
            device_slots |= bucket.views(buffer.memory)
        else:
            device_slots |= {slot: tensor.to(self._users[bucket]) for slot, tensor in store.open(bucket).items()}
        return device_slots

    def leave(self, bucket: Bucket) -> None:
        """End the work on a bucket that was only read."""
        self._store_of[bucket].leave(bucket, self._worked(bucket))
        if self._has(bucket):
            self._buffer_of(bucket).free = torch.accelerator.current_stream().record_event()
        self.in_use.pop(bucket, None)

    def close(self, bucket: Bucket) -> None:
        """End the work on a bucket that was written to, and copy it back to its store."""
        store, device_slots = self._store_of[bucket], self.in_use[bucket]
        if bucket not in self._copied:
            store.close(bucket, self._worked(bucket))
        elif not self._has(bucket):
            for slot, tensor in store.open(bucket, read=False).items():
                tensor.copy_(device_slots[slot])
        else:
            buffer, host = self._buffer_of(bucket), store.open(bucket, read=False)
            # The copy to the host comes behind the device's work on the bucket.
            self._out.wait_event(torch.accelerator.current_stream().record_event())
            with self._out:
                for slot, tensor in host.items():
                    tensor.copy_(device_slots[slot], non_blocking=True)
                written = self._out.record_event()
            buffer.free = self._written[bucket] = written
            buffer.bucket = None  # read again from the store: a file's new generation is current only after the commit
            store.close(bucket, written.synchronize)
        del self.in_use[bucket]

    def commit(self, buckets: Collection[Bucket]) -> None:
        """Make the contents with which these buckets were closed current."""
        for store in self.stores:
            store.commit(buckets)

    def finish(self) -> None:
        """Wait until every closed bucket is stored; raise OffloadError if one could not be written."""
        for store in self.stores:
            store.finish()

    def forget(self, bucket: Bucket | None = None) -> None:
        """Drop what was read ahead of a bucket, because its stored tensors will be written to; nobody works on it. None
        drops all buckets, those in use too: their contents were replaced, or a step is given up."""
        self.settle()
        if bucket is None:
            self.in_use.clear()
        for store in self.stores:
            store.forget(bucket)
        for buffer in self._buffers:
            if bucket in (None, buffer.bucket):
                buffer.bucket = None

    def settle(self) -> None:
        """Wait until the copies of closed buckets to host memory are done."""
        written, self._written = self._written, {}
        for event in written.values():
            event.synchronize()

    def _has(self, bucket: Bucket) -> bool:
        """Return whether a bucket takes turns in the buffers of this pool."""
        return bool(self._buffers) and bucket in self._copied

    def _buffer_of(self, bucket: Bucket) -> _Buffer:
        return next(buffer for buffer in self._buffers if buffer.bucket is bucket)

    def _worked(self, bucket: Bucket) -> Callable[[], object] | None:
        """Return a function that waits for the device's queued work, where it works in a buffer of the file store."""
        own_buffer = bucket not in self._users or bucket in self._copied
        if own_buffer or not self.in_file(bucket):
            return None
        return torch.accelerator.current_stream().record_event().synchronize

    def _lift(self, bucket: Bucket) -> _Buffer:
        """Begin to copy a bucket to the device, over the bucket used longest ago; return its buffer."""
        self._clock += 1
        for buffer in self._buffers:
            if buffer.bucket is bucket:
                buffer.used = self._clock
                return buffer
        buffer = min((each for each in self._buffers if each.bucket not in self.in_use), key=lambda each: each.used)
        store = self._store_of[bucket]
        host = store.open(bucket)
        if buffer.free is not None:  # the device may still work on the bucket that is evicted
            self._in.wait_event(buffer.free)
        if (written := self._written.get(bucket)) is not None:  # its own copy to the host may still be under way
            self._in.wait_event(written)
        buffer.bucket, buffer.used = bucket, self._clock
        with self._in:
            for slot, view in bucket.views(buffer.memory).items():
                view.copy_(host[slot], non_blocking=True)
            buffer.arrived = self._in.record_event()
        if self.in_file(bucket):
            buffer.arrived.synchronize()  # leave() lets the store reuse the host buffer that the copy reads
            store.leave(bucket)
        return buffer


class ReadAhead:
    """Opens buckets, and reads ahead in the order of the step before; ``count``: buckets in buffers or on their way."""

    def __init__(self, buffers: DeviceBuffers, count: int) -> None:
        self._buffers, self._count = buffers, count
        # The visit that followed each visit, the last time.
        self._followed: dict[_Visit, _Visit] = {}
        self._visits: Counter[Bucket | None] = Counter()
        self._last: _Visit = None, 0

    def open(self, bucket: Bucket) -> dict[Slot, Tensor]:
        """Open a bucket, and remember it as the successor of the one opened before."""
        if bucket is not self._last[0]:
            self._visits[bucket] += 1
            before, self._last = self._last, (bucket, self._visits[bucket])
            self._followed[before] = self._last
        return self._buffers.open(bucket)

    def go(self) -> None:
        """Begin to read the buckets that followed the latest one in a step before, as far as there is room."""
        visit = self._last
        for _ in range(self._count - (visit[0] is not None)):
            if (following := self._followed.get(visit)) is None:
                break
            bucket, _ = visit = following
            if bucket is None or not self._buffers.start(bucket):
                break

    def next_step(self) -> None:
        """Begin a new step: its first bucket to be read is current by now."""
        self._followed.pop(self._last, None)
        self._visits.clear()
        self._last = None, 0
        self.go()
