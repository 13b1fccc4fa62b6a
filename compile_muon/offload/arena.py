"""Buckets of a store on the device that computes: a few at a time, copied on streams of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compile_muon.offload.store import Bucket, MemoryStore, Slot, Store

__all__ = ["Arena"]


@dataclass(eq=False)
class _Room:
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


class Arena:
    """Where work on a store's buckets is done.

    Args:
        store: of the buckets.
        buckets: all of them.
        device: that computes. Of memory that it sees itself, nothing is copied: where that is a buffer between it and
            a disk, the disk waits for the work that was queued on it.
        buffers: how many buckets it holds.
        real: False for fake tensors, which have no streams.
    """

    def __init__(
        self, store: Store, buckets: Sequence[Bucket], device: torch.device, *, buffers: int, real: bool
    ) -> None:
        self.store = store
        self._device = device
        self._beside = device.type == "cpu" or store.device == device
        self._streams = not self._beside and real
        if self._streams:
            largest = max(bucket.nbytes for bucket in buckets)
            memory = torch.empty(min(buffers, len(buckets)), largest, dtype=torch.uint8, device=device)
            self._rooms = [_Room(room) for room in memory]
            self._in, self._out = torch.Stream(device), torch.Stream(device)
        self._written: dict[Bucket, torch.Event] = {}
        self._lent: dict[Bucket, dict[Slot, Tensor]] = {}
        self._clock = 0

    def start(self, bucket: Bucket) -> bool:
        """It will be asked for soon; whether there is room for it."""
        if not self._streams or not isinstance(self.store, MemoryStore):
            return self.store.start(bucket)
        if all(room.bucket in self._lent for room in self._rooms):
            return False
        self._lift(bucket)
        return True

    def open(self, bucket: Bucket) -> dict[Slot, Tensor]:
        """Its slots on the device; call :meth:`close` or :meth:`leave` behind the work on them.

        Raises:
            OffloadError: it cannot be read.
        """
        if self._beside:
            return self.store.open(bucket)
        if not self._streams:
            found = {slot: tensor.to(self._device) for slot, tensor in self.store.open(bucket).items()}
        else:
            room = self._lift(bucket)
            assert room.arrived is not None
            torch.accelerator.current_stream().wait_event(room.arrived)
            found = bucket.views(room.memory)
        self._lent[bucket] = found
        return found

    def leave(self, bucket: Bucket) -> None:
        """It was only read."""
        self._lent.pop(bucket, None)
        self.store.leave(bucket, self._worked())
        if self._streams:
            room = next(room for room in self._rooms if room.bucket is bucket)
            room.free = torch.accelerator.current_stream().record_event()

    def close(self, bucket: Bucket) -> None:
        """It was written to: keep it."""
        if self._beside:
            self.store.close(bucket, self._worked())
            return
        found, host = self._lent.pop(bucket), self.store.open(bucket, read=False)
        if not self._streams:
            for slot, tensor in host.items():
                tensor.copy_(found[slot])
            return
        room = next(room for room in self._rooms if room.bucket is bucket)
        self._out.wait_event(torch.accelerator.current_stream().record_event())
        with self._out:
            for slot, tensor in host.items():
                tensor.copy_(found[slot], non_blocking=True)
            written = self._out.record_event()
        room.free = self._written[bucket] = written
        room.bucket = None  # in a file it is not current yet
        self.store.close(bucket, written.synchronize)

    def _worked(self) -> Callable[[], object] | None:
        """Returns when the device has done what is queued, where it works in a buffer of the store's."""
        if self._device.type == "cpu" or not self._beside or isinstance(self.store, MemoryStore):
            return None
        return torch.accelerator.current_stream().record_event().synchronize

    def discard(self) -> None:
        """Forget what is in buffers and lent: someone wrote to what is kept, or a step is given up."""
        self.settle()
        self._lent.clear()
        self.store.discard()
        for room in self._rooms if self._streams else ():
            room.bucket = None

    def forget(self, bucket: Bucket) -> None:
        """Someone writes to what is kept of this one: nobody works on it now, and what was read of it ahead is old."""
        self.settle()
        self.store.forget(bucket)
        for room in self._rooms if self._streams else ():
            if room.bucket is bucket:
                room.bucket = None

    def settle(self) -> None:
        """Wait until host memory has what was closed."""
        written, self._written = self._written, {}
        for event in written.values():
            event.synchronize()

    def _lift(self, bucket: Bucket) -> _Room:
        """Begin to copy it, over what was used longest ago."""
        self._clock += 1
        for room in self._rooms:
            if room.bucket is bucket:
                room.used = self._clock
                return room
        room = min((room for room in self._rooms if room.bucket not in self._lent), key=lambda room: room.used)
        host = self.store.open(bucket)
        if room.free is not None:
            self._in.wait_event(room.free)
        if (written := self._written.get(bucket)) is not None:
            self._in.wait_event(written)
        room.bucket, room.used = bucket, self._clock
        with self._in:
            for slot, view in bucket.views(room.memory).items():
                view.copy_(host[slot], non_blocking=True)
            room.arrived = self._in.record_event()
        if not isinstance(self.store, MemoryStore):
            room.arrived.synchronize()  # the store's buffer is for others now
            self.store.leave(bucket)
        return room
