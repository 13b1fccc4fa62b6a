"""Files that outlive a crash, and files that go with the process."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["memory_in_file", "sync_folder", "unnamed_file", "write_bytes"]


def write_bytes(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a new file, or over another with ``replace``, and have it on the disk before this returns."""
    with open(path, "wb" if replace else "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk: its files' own fsync does not."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unnamed_file(folder: Path, nbytes: int) -> int:
    """Open a new file of that size without a name, all of it allocated; it goes when it is closed."""
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        file, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except BaseException:
        os.close(file)
        raise
    return file


def memory_in_file(folder: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A new tensor in a file without a name, whose pages the kernel may write there; the file goes with the tensor."""
    if not (size := shape.numel()):
        return torch.empty(shape, dtype=dtype)
    file = unnamed_file(folder, size * dtype.itemsize)
    try:
        return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=dtype).view(shape)
    finally:
        os.close(file)  # the mapping keeps it
