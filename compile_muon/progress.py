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
from contextlib import contextmanager

import torch.distributed as dist

from compile_muon.passes.torch_private import inductor_cache

__all__ = ["compiling", "is_first_rank", "underway"]

_log = logging.getLogger("compile_muon")
_PAUSES = (5.0, 15.0, 30.0, 60.0)  # seconds ahead of each line; the last repeats


def is_first_rank() -> bool:
    """Return whether this process prints for all ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@contextmanager
def underway(what: str, pauses: tuple[float, ...] = _PAUSES) -> Iterator[None]:
    """Log progress of the work inside the block, on rank 0; quick work logs nothing.

    Lines are ``INFO`` of the logger "compile_muon", and go to stderr where no logging is set up. ``what``: for example
    "saving checkpoint 400"; ``pauses``: seconds before each line.
    """
    if not is_first_rank():
        yield
        return
    done, began = threading.Event(), time.monotonic()
    watcher = threading.Thread(target=_watch, args=(what, began, done, pauses), daemon=True, name="muon_zero progress")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(what: str, began: float, done: threading.Event, pauses: tuple[float, ...]) -> None:
    lines = 0
    while not done.wait(pauses[min(lines, len(pauses) - 1)]):
        lines += 1
        _say(f"{what}: {time.monotonic() - began:.0f} s so far")
    if lines:
        _say(f"{what}: done after {time.monotonic() - began:.0f} s")


class _Compiling:
    """Graphs that are compiled one behind another, or one for another, from the first until none has come for a while.

    Attributes:
        first, pause, quiet: seconds until the first line; between lines; without a graph until the last line.
    """

    first, pause, quiet = 5.0, 30.0, 5.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = self._done = 0
        self._what = ""

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Around the compilation of a graph.

        Args:
            what: "a frame (blocks.4)".
        """
        if not is_first_rank():
            yield
            return
        with self._lock:
            begins, self._seen, self._what = not self._seen, self._seen + 1, what
        if begins:
            self._began = time.monotonic()
            threading.Thread(target=self._tell, args=(what,), daemon=True, name="muon_zero compiling").start()
        try:
            yield
        finally:
            with self._lock:
                self._done += 1
                self._ended = time.monotonic()

    def _tell(self, what: str) -> None:
        told, before = 0, _Before(what)
        while True:
            time.sleep(min(self.quiet, self.first, self.pause) / 5)
            with self._lock:
                now, done, seen, idle = time.monotonic(), self._done, self._seen, self._done == self._seen
                if idle and now - self._ended > self.quiet:
                    self._seen = self._done = 0
                    break
            if not idle and now - self._began > self.first + told * self.pause:
                last = f"; it took {before.seconds:.0f} s here last time" if not told and before.seconds else ""
                told += 1
                _say(f"compiling {self._what}: {done} of {seen} graphs done, {now - self._began:.0f} s so far{last}")
        if told:
            before.note(self._ended - self._began)
            _say(f"compiling: {done} graphs done after {self._ended - self._began:.0f} s")


compiling = _Compiling()


class _Before:
    """How long a program compiled when it last did, in a file beside Inductor's cache.

    Args:
        what: its first graph.
    """

    def __init__(self, what: str) -> None:
        key = hashlib.sha256(f"{os.path.abspath(sys.argv[0])} {what}".encode()).hexdigest()[:16]
        self._path, self.seconds = os.path.join(inductor_cache(), "muon_zero_seconds", key), 0.0
        with contextlib.suppress(OSError, ValueError), open(self._path, encoding="ascii") as file:
            self.seconds = float(file.read())

    def note(self, seconds: float) -> None:
        """It took as long now."""
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with open(self._path, "w", encoding="ascii") as file:
                file.write(f"{seconds:.1f}")


def _say(line: str) -> None:
    unset = _log.level == logging.NOTSET and not _log.hasHandlers()
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", line)
    elif unset and not _log.disabled and logging.root.manager.disable < logging.INFO and sys.stderr is not None:
        print(f"compile_muon: {line}", file=sys.stderr, flush=True)
