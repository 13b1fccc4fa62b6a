"""The only writer of a folder: two runs in one, say a process that was taken for dead beside its restart, would remove
what the other one writes.

The lock is the operating system's, so a process that ends loses it, however it ends. It is of the folder itself, and
where a file system has none of folders (NFS), of a file in it. A file system without locks has none of this.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
import weakref
from pathlib import Path

from compile_muon.errors import CheckpointError

__all__ = ["LOCK", "Writer"]

#: beside the checkpoints of a folder that cannot be locked itself, as long as somebody writes there
LOCK = ".writer"


class Writer:
    """This process as the writer of a folder, from its first save until the object goes.

    Args:
        folder: that has checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: tuple[int, Path] | None = None

    def hold(self) -> None:
        """Be the writer; several objects of one process are one.

        Raises:
            CheckpointError: another process is.
        """
        if self._held is not None and _is_at(*self._held):
            return
        for path, how in ((self._folder, os.O_RDONLY), (self._folder / LOCK, os.O_RDWR | os.O_CREAT)):
            file = os.open(path, how | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _holder_of(file, path)
                os.close(file)
                if error.errno != errno.EAGAIN:
                    continue  # no locks of such
                if holder.get("process") == os.getpid():
                    return
                raise self._taken(holder) from None
            if path is not self._folder:
                os.ftruncate(file, 0)
                own = {"process": os.getpid(), "host": socket.gethostname(), "since": _text(time.time())}
                os.pwrite(file, json.dumps(own).encode(), 0)
            self._held = file, path
            weakref.finalize(self, _release, file, path, os.getpid())
            return

    def _taken(self, holder: dict[str, object]) -> CheckpointError:
        who = "another process writes there"
        if holder.keys() >= {"process", "host", "since"}:
            who = f"process {holder['process']} on {holder['host']}, since {holder['since']}, writes there"
        return CheckpointError(f"folder = {self._folder}: {who}; end that run, or save into another folder")


def _holder_of(file: int, path: Path) -> dict[str, object]:
    """What is known of the process that has the lock of an open file."""
    if path.name == LOCK:
        try:
            found = json.loads(os.pread(file, 1000, 0))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}
    inode = os.fstat(file).st_ino
    try:
        locks = Path("/proc/locks").read_text()
        process = int(re.findall(rf"FLOCK .* (\d+) [0-9a-f:]+:{inode} ", locks)[0])
        return {"process": process, "host": socket.gethostname(), "since": _text(os.stat(f"/proc/{process}").st_mtime)}
    except (OSError, IndexError):
        return {}


def _text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False


def _release(file: int, path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a process that was forked
        if path.name == LOCK and _is_at(file, path):
            path.unlink(missing_ok=True)
        os.close(file)
