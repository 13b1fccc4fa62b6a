"""The commit protocol: a checkpoint is the folder ``step-N``, and a folder of that name is complete.

It is written as ``step-N.tmp`` and renamed once all of it, its manifest last, is on the disk; the rename is the commit.
What a crash leaves has a name ending in ``.tmp``, which is never read and goes with the next save. Only one rank calls
what changes anything here.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from compile_muon.storage.disk import sync_folder

__all__ = ["STATE", "TENSORS", "Folder"]

#: subfolders of a checkpoint: tensors of all ranks; everything else
TENSORS, STATE = "tensors", "state"

_COMMITTED = re.compile(r"step-(0|[1-9][0-9]*)(\.replaced)?")
_LEFTOVER = re.compile(r"step-[0-9]+(\.replaced)?(\.removed)?\.tmp")


class Folder:
    """Checkpoints in one folder.

    Args:
        path: created by the first save.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(os.path.abspath(path))

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
            The name of a file in it, which nothing left over from another run has.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in list(self.path.iterdir()):
            if _LEFTOVER.fullmatch(entry.name):
                self._erase(entry)
            elif (match := _COMMITTED.fullmatch(entry.name)) and match[2]:
                final = self._final(int(match[1]))
                self._remove(entry) if final.exists() else entry.rename(final)
        for part in (TENSORS, STATE):
            (self.unfinished(step) / part).mkdir(parents=True)
        token = f"begun-{secrets.token_hex(8)}"
        (self.unfinished(step) / token).touch()
        return token

    def commit(self, step: int) -> None:
        """Make the checkpoint of ``step`` count; every file in it is on the disk already."""
        unfinished, final = self.unfinished(step), self._final(step)
        for part in (unfinished / TENSORS, unfinished / STATE, unfinished):
            sync_folder(part)
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            final.rename(replaced)  # a folder cannot be renamed over another that is not empty
        unfinished.rename(final)
        sync_folder(self.path)
        if replaced.exists():
            self._remove(replaced)

    def prune(self, keep_last: int, committed: int) -> None:
        """Remove all but the last ``keep_last`` checkpoints, and never the one just ``committed``."""
        for step in self.steps()[:-keep_last]:
            if step != committed:
                self._remove(self._final(step))

    def _final(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def _remove(self, path: Path) -> None:
        """By another name first: half a checkpoint must not carry the name of a whole one."""
        doomed = path.with_name(f"{path.name}.removed.tmp")
        if doomed.exists():
            self._erase(doomed)
        path.rename(doomed)
        self._erase(doomed)

    @staticmethod
    def _erase(path: Path) -> None:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
