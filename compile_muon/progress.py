"""What a run shows of work that takes long: a line after some seconds, and one when it is done."""

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
    """Whether this process shows what is shown once for all ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@contextmanager
def underway(what: str, pauses: tuple[float, ...] = _PAUSES) -> Iterator[None]:
    """Around work on one process that may take long; quick work shows nothing.

    Rank 0 says so, to the logger "compile_muon" where that shows ``INFO``, else on a terminal.

    Args:
        what: "compiling a frame (blocks.4)".
        pauses: seconds ahead of each line.
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
    said = 0
    while not done.wait(pauses[min(said, len(pauses) - 1)]):
        said += 1
        _say(f"{what}: {time.monotonic() - began:.0f} s so far")
    if said:
        _say(f"{what}: done after {time.monotonic() - began:.0f} s")


def _say(line: str) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", line)
    elif sys.stderr is not None and sys.stderr.isatty():
        print(f"compile_muon: {line}", file=sys.stderr, flush=True)
