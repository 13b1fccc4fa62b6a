"""One thread that writes behind training, one job at a time, whose error is not lost."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future

from compile_muon.errors import CheckpointError

__all__ = ["Background"]


class Background:
    """Runs jobs one after the other; what one raised, :meth:`wait` raises, or the end of the program."""

    def __init__(self) -> None:
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` in a thread, which ends with it; nothing may be running."""
        atexit.register(self.wait)
        self._job = Future()
        # No daemon: a program that ends waits for it, and so for what it saved last.
        threading.Thread(target=_run, args=(job, self._job), name="compile_muon checkpoint").start()
        return self._job

    def wait(self) -> None:
        """Return when the job is done.

        Raises:
            CheckpointError: it failed; said once.
        """
        if self._job is None:
            return
        error = self._job.exception()
        atexit.unregister(self.wait)
        self._job = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint was not written: {type(error).__name__}: {error}") from error


def _run(job: Callable[[], None], result: Future[None]) -> None:
    try:
        job()
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(None)
