"""Progress of slow work: a line after some seconds, and one when it is done."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist

from compile_muon.passes.torch_private import inductor_cache

_log = logging.getLogger("compile_muon")
_PAUSES = (5.0, 15.0, 30.0, 60.0)  # seconds ahead of each line; the last repeats


def is_first_rank() -> bool:
    """Return whether this process prints for all ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class Work:
    """Pieces of work, each inside a block, of which rank 0 tells as one: from the first until none has come for
    ``quiet`` seconds. Quick work has no line.

    Lines are ``INFO`` of the logger "compile_muon", and go to stderr where no logging is set up. ``pauses``: seconds
    before each line.
    """

    def __init__(self, pauses: tuple[float, ...], quiet: float = 0.0) -> None:
        self._pauses, self._quiet = pauses, quiet
        self._changed = threading.Condition()
        self._pieces = self._done = 0

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Enclose a piece, such as "a frame (blocks.4)"."""
        if not is_first_rank():
            yield
            return
        teller = None
        with self._changed:
            if not self._pieces:
                self._began, self._first = time.monotonic(), what
                teller = threading.Thread(target=self._tell, daemon=True, name="muon_zero progress")
            self._what, self._pieces = what, self._pieces + 1
        if teller is not None:
            teller.start()
        try:
            yield
        finally:
            with self._changed:
                self._done, self._ended = self._done + 1, time.monotonic()
                self._changed.notify()
            if teller is not None and not self._quiet:
                teller.join()

    def _tell(self) -> None:
        lines, due = 0, self._began + self._pauses[0]
        with self._changed:
            while True:
                now, idle = time.monotonic(), self._done == self._pieces
                if idle and now >= self._ended + self._quiet:
                    break
                if not idle and now >= due:
                    _say(self.so_far(now - self._began, again=lines > 0))
                    lines += 1
                    due = now + self._pauses[min(lines, len(self._pauses) - 1)]
                self._changed.wait((self._ended + self._quiet if idle else due) - now)
            if lines:
                _say(self.at_end(self._ended - self._began))
            self._pieces = self._done = 0

    def so_far(self, seconds: float, *, again: bool) -> str:
        """Return a line about running work; ``again``: it has had one."""
        return f"{self._what}: {seconds:.0f} s so far"

    def at_end(self, seconds: float) -> str:
        """Return the line about work that is done."""
        return f"{self._what}: done after {seconds:.0f} s"


def underway(what: str, pauses: tuple[float, ...] = _PAUSES) -> AbstractContextManager[None]:
    """Return a context that tells of the work inside, for example "saving checkpoint 400"; see :class:`Work`."""
    return Work(pauses)(what)


class Compilation(Work):
    """Graphs that are compiled one behind another, or one for another."""

    def so_far(self, seconds: float, *, again: bool) -> str:
        before = 0.0
        if not again:
            with contextlib.suppress(OSError, ValueError), open(self._seconds_file(), encoding="ascii") as file:
                before = float(file.read())
        last = f"; it took {before:.0f} s here last time" if before else ""
        return f"compiling {self._what}: {self._done} of {self._pieces} graphs done, {seconds:.0f} s so far{last}"

    def at_end(self, seconds: float) -> str:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._seconds_file()), exist_ok=True)
            with open(self._seconds_file(), "w", encoding="ascii") as file:
                file.write(f"{seconds:.1f}")
        return f"compiling: {self._done} graphs done after {seconds:.0f} s"

    def _seconds_file(self) -> str:
        """Return the file beside Inductor's cache that has the seconds of the latest compilation that began so."""
        key = hashlib.sha256(f"{os.path.abspath(sys.argv[0])} {self._first}".encode()).hexdigest()[:16]
        return os.path.join(inductor_cache(), "muon_zero_seconds", key)


compiling = Compilation((5.0, 30.0), quiet=5.0)


def _say(line: str) -> None:
    unset = _log.level == logging.NOTSET and not _log.hasHandlers()
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", line)
    elif unset and not _log.disabled and logging.root.manager.disable < logging.INFO and sys.stderr is not None:
        print(f"compile_muon: {line}", file=sys.stderr, flush=True)
