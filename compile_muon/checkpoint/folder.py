"""The commit protocol: a checkpoint is the folder ``step-N``, and a folder of that name is complete.

It is written as ``step-N.tmp`` and renamed once all of it, its manifest last, is on the disk; the rename is the commit.
What a crash leaves has a name ending in ``.tmp``, which is never read and goes with the next save. Only one rank calls
what changes anything here.

Names like these are other tools' too. What goes or moves is a plain folder that has our manifest, or, while it is
written, a file that says so; everything else stays as it is, and where it is in the way, a save is refused.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from compile_muon.checkpoint.writer import Writer
from compile_muon.errors import CheckpointError
from compile_muon.files.disk import open_plain, sync_folder

__all__ = ["FORMAT", "NAME", "STATE", "TENSORS", "Folder"]

#: subfolders of a checkpoint: tensors of all ranks; everything else
TENSORS, STATE = "tensors", "state"
#: of the manifest, and what it says it is of
NAME, FORMAT = "manifest.json", "compile_muon checkpoint"

_COMMITTED = re.compile(r"step-(0|[1-9][0-9]*)(\.replaced)?")
_LEFTOVER = re.compile(r"step-[0-9]+(\.replaced)?(\.removed)?\.tmp")
_BEGUN = re.compile(r"begun-[0-9a-f]{16}")


class Folder:
    """Checkpoints in one folder.

    Args:
        path: created by the first save.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(os.path.abspath(path))
        self._writer = Writer(self.path)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending; none where there is no such folder."""
        if not self.path.is_dir():
            return []
        with os.scandir(self.path) as entries:
            found = [m for entry in entries if (m := _COMMITTED.fullmatch(entry.name)) and entry.is_dir()]
        return sorted({int(match[1]) for match in found})

    def at(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is."""
        replaced = self.path / f"step-{step}.replaced"  # a crash while the same step was saved again
        return replaced if replaced.is_dir() and not self._final(step).exists() else self._final(step)

    def unfinished(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is written."""
        return self.path / f"step-{step}.tmp"

    def begin(self, step: int) -> str:
        """Remove what crashes left, and make an empty place for ``step``.

        Returns:
            The name of a file in it, which nothing left over from another run has; it says that the folder is ours as
            long as there is no manifest.
        Raises:
            CheckpointError: something that no checkpointer wrote is in the way, and stays; or another process writes
                into the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._writer.hold()
        for entry in list(self.path.iterdir()):
            if _LEFTOVER.fullmatch(entry.name) and _is_ours(entry):
                _erase(entry)
            elif (match := _COMMITTED.fullmatch(entry.name)) and match[2] and _is_ours(entry):
                final = self._final(int(match[1]))
                if not os.path.lexists(final):
                    entry.rename(final)
                elif _is_ours(final):
                    self._remove(entry)
        unfinished, final = self.unfinished(step), self._final(step)
        replaced = _replaced(final)
        in_the_way = [final] if os.path.lexists(final) and not _is_ours(final) else []
        in_the_way += [path for path in (replaced, _doomed(replaced), unfinished) if not _is_free(path)]
        if in_the_way:
            raise CheckpointError(
                f"{in_the_way[0]}: is in the way, and is not what a Checkpointer wrote, or has lost its {NAME}; move "
                "it, or save into another folder"
            )
        unfinished.mkdir(exist_ok=True)
        token = f"begun-{secrets.token_hex(8)}"
        (unfinished / token).touch(exist_ok=False)
        for part in (TENSORS, STATE):
            (unfinished / part).mkdir()
        return token

    def commit(self, step: int, token: str) -> None:
        """Make the checkpoint of ``step`` count, begun as ``token``; every file in it is on the disk already.

        Raises:
            CheckpointError: something that no checkpointer wrote came in the way meanwhile; it stays.
        """
        unfinished, final = self.unfinished(step), self._final(step)
        (unfinished / token).unlink()
        for part in (unfinished / TENSORS, unfinished / STATE, unfinished):
            sync_folder(part)
        replaced = _replaced(final)
        again = os.path.lexists(final)
        if again:  # a folder cannot be renamed over another that is not empty
            _check_ours(final)
            final.rename(replaced)
        unfinished.rename(final)
        sync_folder(self.path)
        if again:
            self._remove(replaced)

    def prune(self, keep_last: int, committed: int) -> None:
        """Remove all but the last ``keep_last`` checkpoints of ours, and never the one just ``committed``.

        Raises:
            CheckpointError: something that no checkpointer wrote has the name under which one would go.
        """
        for step in self.ours()[:-keep_last]:
            if step != committed:
                self._remove(self.at(step))

    def ours(self) -> list[int]:
        """Those of :meth:`steps` that a checkpointer wrote."""
        return [step for step in self.steps() if _is_ours(self.at(step))]

    def _final(self, step: int) -> Path:
        return self.path / f"step-{step}"

    @staticmethod
    def _remove(path: Path) -> None:
        """By another name first: half a checkpoint must not carry the name of a whole one."""
        doomed = _doomed(path)
        if not _is_free(doomed):
            _check_ours(doomed)
            _erase(doomed)
        path.rename(doomed)
        _erase(doomed)


def _replaced(final: Path) -> Path:
    return final.with_name(f"{final.name}.replaced")


def _doomed(path: Path) -> Path:
    return path.with_name(f"{path.name}.removed.tmp")


def _is_free(path: Path) -> bool:
    """Whether nothing is there, or a plain folder with nothing in it: what a crash left before it was marked, say."""
    if not os.path.lexists(path):
        return True
    return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)


def _erase(path: Path) -> None:
    """Remove a folder of ours; what says that it is goes last, so that a crash on the way leaves no stranger."""
    with os.scandir(path) as entries:
        inside = sorted(entries, key=lambda entry: bool(_BEGUN.fullmatch(entry.name)) or entry.name == NAME)
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    path.rmdir()


def _is_ours(path: Path) -> bool:
    """Whether a Checkpointer wrote it, or had begun to; nothing but a plain file is opened for the question."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return False
        if any(_BEGUN.fullmatch(name) for name in os.listdir(path)):
            return True
        with open_plain(path / NAME) as file:
            body = json.loads(file.read())
    except (OSError, CheckpointError, ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("format") == FORMAT


def _check_ours(path: Path) -> None:
    if not _is_ours(path):
        raise CheckpointError(f"{path}: is in the way, and is not what a Checkpointer wrote; move it")
