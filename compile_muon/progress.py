"""Progress of slow work: a line after some seconds, and one when it is done."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["is_first_rank", "underway"]

_log = logging.getLogger("compile_muon")
_PAUSES = (5.0, 15.0, 30.0, 60.0)  # seconds ahead of each line; the last repeats


def is_first_rank() -> bool:
    """Return whether this process prints for all ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@contextmanager
def underway(what: str, pauses: tuple[float, ...] = _PAUSES) -> Iterator[None]:
    """Log progress of the work inside the block, on rank 0; quick work logs nothing.

    Lines go to the logger "compile_muon" where that shows ``INFO``, else to a terminal. ``what``: for example
    "compiling a frame (blocks.4)"; ``pauses``: seconds before each line.
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


def _say(line: str) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", line)
    elif sys.stderr is not None and sys.stderr.isatty():
        print(f"compile_muon: {line}", file=sys.stderr, flush=True)
