"""Files that outlive a crash."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_folder", "write_bytes"]


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
