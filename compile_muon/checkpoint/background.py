"""One thread that writes behind training, one job at a time, whose error is not lost."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from compile_muon.errors import CheckpointError

__all__ = ["Background"]


class Background:
    """Runs jobs one after the other; what one raised, :meth:`wait` raises, or the end of the program."""

    def __init__(self) -> None:
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` in a thread, which ends with it; nothing may be running."""
        atexit.register(self.wait)
        threads = ThreadPoolExecutor(1, "compile_muon checkpoint")
        self._job = threads.submit(job)
        threads.shutdown(wait=False)  # a program that ends waits for it all the same, and so for what it saved last
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
