"""Files that outlive a crash, and files that go with the process."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from compile_muon.errors import DamagedError


def open_plain(path: Path, *, links: bool = False) -> BinaryIO:
    """Open a plain file for reading: opening a pipe would wait, and opening a device may do anything. Follow ``links``
    only where told: caches of weights are made of links; in a checkpoint one may lead anywhere."""
    try:
        # Ahead of open(), which rewinds a tape; and after it, for a file that was put there in between.
        if stat.S_ISREG((os.stat(path) if links else os.lstat(path)).st_mode):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
            if stat.S_ISREG(os.fstat(handle).st_mode):
                return os.fdopen(handle, "rb")
            os.close(handle)
    except FileNotFoundError:
        raise DamagedError(f"{path}: is missing") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    raise DamagedError(f"{path}: is not a plain file")


def open_within(folder: Path, name: str) -> BinaryIO:
    """Open a plain file in plain folders inside of a plain ``folder``, no link on the way."""
    *folders, last = name.split("/")
    for part in ("", *folders):
        folder = folder / part
        try:
            mode = os.lstat(folder).st_mode
        except FileNotFoundError:
            raise DamagedError(f"{folder}: is missing") from None
        if not stat.S_ISDIR(mode):
            raise DamagedError(f"{folder}: is not a plain folder")
    return open_plain(folder / last)


def new_file(path: Path, *, replace: bool = False) -> BinaryIO:
    """Make a file to write, through no link; with ``replace`` in place of a plain one, and of nothing else."""
    if replace and os.path.lexists(path):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "is in the way, and no plain file; move it", str(path))
        os.unlink(path)
    return open(path, "xb")


def write_bytes(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a new file, or in place of a plain one with ``replace``, and have it on the disk before this returns."""
    with new_file(path, replace=replace) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Have a file on the disk, or the names in a folder: the fsync of its files does not cover names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unnamed_file(folder: Path, nbytes: int) -> int:
    """Open a new file of that size without a name, all of it allocated; the file goes when it is closed."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return os.dup(file.fileno())


def memory_in_file(folder: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Make a tensor in a file without a name, where the kernel may keep its pages; the file goes with the tensor."""
    if not (size := shape.numel()):
        return torch.empty(shape, dtype=dtype, device="cpu")
    file = unnamed_file(folder, size * dtype.itemsize)
    try:
        return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=dtype, device="cpu").view(shape)
    finally:
        os.close(file)  # the mapping keeps it
