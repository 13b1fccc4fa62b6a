"""GPUDirect Storage through kvikio: a disk reads into the memory of a GPU and writes from it, past the host's.

cuFile does not order itself with kernels: the pool of buffers says when what was queued on a buffer is done, and
threads of the store wait for that. kvikio orders its calls behind the default stream besides, which is more than is
needed.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compile_muon.errors import warn_user
from compile_muon.offload.store import ALIGNED, Bucket, FileStore, Slot

__all__ = ["DirectStore", "on_disk"]

_PROOF = 3 << 20  # numbers of 4 bytes: more than one request
_log = logging.getLogger("compile_muon")


class DirectStore(FileStore):
    """In a file without a name, with buffers on the device.

    Args:
        folder, buckets, buffers: as of :class:`FileStore`.
        device: that computes.
    Raises:
        OffloadError: as of :class:`FileStore`.
        RuntimeError: cuFile does not take the file.
    """

    def __init__(
        self, folder: str | os.PathLike, buckets: Sequence[Bucket], *, buffers: int, device: torch.device
    ) -> None:
        self.device = device
        super().__init__(folder, buckets, buffers=buffers, enter=partial(_enter, device))
        self._direct = _opened(self._file)

    def discard(self) -> None:
        """As of :class:`FileStore`, once the device is done with buffers that nobody gave back."""
        torch.cuda.synchronize(self.device)
        super().discard()

    def _buffer(self, nbytes: int, *, pin: bool) -> Tensor:
        memory = torch.empty(nbytes + ALIGNED, dtype=torch.uint8, device=self.device)
        begin = -memory.data_ptr() % ALIGNED
        return memory[begin : begin + nbytes]

    def _read(self, memory: Tensor, place: int) -> int:
        return self._called(self._direct.raw_read, memory, place)

    def _write(self, memory: Tensor, place: int) -> int:
        return self._called(self._direct.raw_write, memory, place)

    def _called(self, call: Callable[..., int], memory: Tensor, place: int) -> int:
        try:
            return call(memory, file_offset=place)
        except RuntimeError as error:  # all that cuFile and the kernel say
            raise OSError(errno.EIO, str(error)) from error


def _enter(device: torch.device) -> None:
    """Give a thread the device's context, which cuFile wants: CUDA does with the first call that needs one."""
    torch.cuda.set_device(device)
    torch.cuda.mem_get_info(device)


def on_disk(
    folder: str | os.PathLike, buckets: Sequence[Bucket], *, buffers: int, pin: bool, device: torch.device
) -> FileStore:
    """State in a file: straight to the device where kvikio is installed and serves the folder, else by the host.

    Raises:
        OffloadError: as of :class:`FileStore`.
    """
    if device.type == "cuda" and getattr(importlib.util.find_spec("kvikio"), "origin", None) is not None:
        refused = _refused(folder, device)
        if refused is None:
            _log.info("offload.nvme_path = %r: state travels by GPUDirect Storage", str(folder))
            return DirectStore(folder, buckets, buffers=buffers, device=device)
        warn_user(
            f"offload.nvme_path = {str(folder)!r}: kvikio is installed, but {refused}; state travels by host memory",
            own=True,
        )
    return FileStore(folder, buckets, buffers=buffers, pin=pin)


def _refused(folder: str | os.PathLike, device: torch.device) -> str | None:
    """Why not to use it: libraries fall back to the host by themselves, slower than :class:`FileStore` does."""
    try:
        import kvikio.cufile_driver
        import kvikio.defaults
    except ImportError as error:  # libraries of CUDA that it wants are not there
        return f"cannot be imported ({error})"
    if kvikio.defaults.is_compat_mode_preferred():
        return "is in compatibility mode (KVIKIO_COMPAT_MODE, no libcufile, or /run/udev cannot be read)"
    if not kvikio.cufile_driver.get("is_gds_available"):
        return "the driver nvidia-fs is not loaded"
    try:
        return _differs(folder, device)
    except RuntimeError as error:
        return f"a file there cannot be used ({error.__cause__ or error})"


def _differs(folder: str | os.PathLike, device: torch.device) -> str | None:
    """What is wrong with numbers that travel both ways: the device's to the mapped file, and back."""
    slot = Slot("numbers", (_PROOF,), torch.int32)
    bucket = Bucket([slot])
    store = DirectStore(folder, [bucket], buffers=1, device=device)
    numbers = torch.arange(_PROOF, dtype=slot.dtype)
    store.open(bucket)[slot].copy_(numbers)
    torch.cuda.synchronize(device)
    store.close(bucket)
    store.finish()
    store.commit([bucket])
    if not torch.equal(store.current(slot), numbers):
        return "the host does not read there what the device wrote"
    store.current(slot).neg_()
    if not torch.equal(store.open(bucket)[slot].cpu(), -numbers):
        return "the device does not read there what the host wrote"
    return None


def _opened(file: int) -> Any:
    """The file for cuFile, or an error: by itself kvikio goes by the host without a word."""
    import kvikio.defaults

    with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
        return kvikio.CuFile(f"/proc/self/fd/{file}", "r+")
