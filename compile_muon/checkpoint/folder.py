"""The commit protocol: a checkpoint is the folder ``step-N``, and a folder of that name is complete.

The folder is written as ``step-N.tmp`` and renamed once all of it, its manifest last, is on the disk; the rename is the
commit. Leftovers of a crash have names ending in ``.tmp``, which are never read and go with the next save. One rank
alone calls what changes anything here.

Names like these are other tools' too. A folder goes or moves if it is a plain one with our manifest, or, while it is
written, with a file that says so; everything else stays, and where it is in the way, a save is refused.

One process writes into a folder at a time: of two runs in one, say a process that was taken for dead beside its
restart, each would remove what the other one writes. The lock is the operating system's, so a process that ends loses
it. The lock is of a file in the folder, which stays there, because NFS has no locks of folders.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
import weakref
from pathlib import Path

from compile_muon.errors import CheckpointError, printable
from compile_muon.files.disk import open_plain, sync

#: subfolders of a checkpoint: tensors of all ranks; everything else
TENSORS, STATE = "tensors", "state"
#: of the manifest, and what it says it is of
NAME, FORMAT = "manifest.json", "compile_muon checkpoint"
#: beside the checkpoints: says who writes there, and is locked as long as somebody does
LOCK = ".writer"

_COMMITTED = re.compile(r"step-(0|[1-9][0-9]*)(\.replaced)?")
_LEFTOVER = re.compile(r"step-[0-9]+(\.replaced)?(\.removed)?\.tmp")
_BEGUN = re.compile(r"begun-[0-9a-f]{16}")


class Folder:
    """Checkpoints in one folder, which the first save makes."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(os.path.abspath(path))
        self._lock: int | None = None

    def steps(self) -> list[int]:
        """List the steps of committed checkpoints, ascending; none where there is no such folder."""
        if not self.path.is_dir():
            return []
        with os.scandir(self.path) as entries:
            return sorted({int(m[1]) for e in entries if (m := _COMMITTED.fullmatch(e.name)) and e.is_dir()})

    def at(self, step: int) -> Path:
        """Locate the checkpoint of ``step``."""
        final = self.path / f"step-{step}"
        replaced = _beside(final, ".replaced")  # a crash while the same step was saved again
        return replaced if replaced.is_dir() and not final.exists() else final

    def unfinished(self, step: int) -> Path:
        """Name the place where the checkpoint of ``step`` is written."""
        return self.path / f"step-{step}.tmp"

    def begin(self, step: int) -> str:
        """Remove what crashes left, and make an empty place for ``step``.

        Return the name of a file in it, which no leftover of another run has: a mark as long as there is no manifest.
        Refuse where another process writes into the folder, or a stranger's thing is in the way, which stays.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._be_the_writer()
        for entry in list(self.path.iterdir()):
            if _LEFTOVER.fullmatch(entry.name) and _is_ours(entry):
                _erase(entry)
            elif (match := _COMMITTED.fullmatch(entry.name)) and match[2] and _is_ours(entry):
                final = entry.with_suffix("")
                if not os.path.lexists(final):
                    entry.rename(final)
                elif _is_ours(final):
                    _remove(entry)
        unfinished, final = self.unfinished(step), self.path / f"step-{step}"
        replaced = _beside(final, ".replaced")
        if os.path.lexists(final):
            _check_ours(final)
        for path in (replaced, _beside(replaced, ".removed.tmp"), unfinished):
            if not _is_free(path):
                raise _in_the_way(path)
        unfinished.mkdir(exist_ok=True)
        token = f"begun-{secrets.token_hex(8)}"
        (unfinished / token).touch(exist_ok=False)
        for part in (TENSORS, STATE):
            (unfinished / part).mkdir()
        return token

    def commit(self, step: int, token: str) -> None:
        """Make the checkpoint of ``step`` count, begun as ``token``; every file in it is on the disk already. Something
        that no checkpointer wrote may have come in the way meanwhile; it stays, and is an error."""
        unfinished, final = self.unfinished(step), self.path / f"step-{step}"
        (unfinished / token).unlink()
        for part in (unfinished / TENSORS, unfinished / STATE, unfinished):
            sync(part)
        replaced = _beside(final, ".replaced")
        if again := os.path.lexists(final):  # a folder cannot be renamed over another that is not empty
            _check_ours(final)
            final.rename(replaced)
        unfinished.rename(final)
        sync(self.path)
        if again:
            _remove(replaced)

    def prune(self, keep_last: int, committed: int) -> None:
        """Remove all but the last ``keep_last`` checkpoints of ours, and never the one just ``committed``."""
        for step in self.ours()[:-keep_last]:
            if step != committed:
                _remove(self.at(step))

    def ours(self) -> list[int]:
        """List those of :meth:`steps` that a checkpointer wrote."""
        return [step for step in self.steps() if _is_ours(self.at(step))]

    def _be_the_writer(self) -> None:
        """Lock the folder from the first save until this object goes; several objects of one process are one writer."""
        path = self.path / LOCK
        if self._lock is not None and _is_at(self._lock, path):
            return
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            writer = os.pread(file, 200, 0).decode(errors="replace") or "another process"
            os.close(file)
            if error.errno != errno.EAGAIN or writer.startswith(f"process {os.getpid()} on {socket.gethostname()} "):
                return  # a file system without locks, or another object of this process
            said = f"folder = {self.path}: {printable(writer)} writes there; end that run, or save into another folder"
            raise CheckpointError(said) from None
        os.ftruncate(file, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} (since {since})".encode(), 0)
        self._lock = file
        weakref.finalize(self, os.close, file)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _is_free(path: Path) -> bool:
    """Tell whether nothing is there, or an empty plain folder: a crash leaves one before it is marked, say."""
    return not os.path.lexists(path) or (stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path))


def _remove(path: Path) -> None:
    """Remove by another name first: half a checkpoint must not carry the name of a whole one."""
    doomed = _beside(path, ".removed.tmp")
    if not _is_free(doomed):
        _check_ours(doomed)
        _erase(doomed)
    path.rename(doomed)
    _erase(doomed)


def _erase(path: Path) -> None:
    """Remove a folder of ours; the file that marks it goes last, so that a crash on the way leaves no stranger."""
    for entry in sorted(path.iterdir(), key=lambda entry: bool(_BEGUN.fullmatch(entry.name)) or entry.name == NAME):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    path.rmdir()


def _is_ours(path: Path) -> bool:
    """Tell whether a Checkpointer wrote it, or had begun to; nothing but a plain file is opened for the question."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return False
        if any(map(_BEGUN.fullmatch, os.listdir(path))):
            return True
        with open_plain(path / NAME) as file:
            body = json.loads(file.read())
    except (OSError, CheckpointError, ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("format") == FORMAT


def _check_ours(path: Path) -> None:
    if not _is_ours(path):
        raise _in_the_way(path)


def _in_the_way(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: is in the way, and is not what a Checkpointer wrote, or has lost its {NAME}; move it, or save into "
        "another folder"
    )


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False
