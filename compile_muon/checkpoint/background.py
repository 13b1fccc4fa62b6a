"""One thread that writes behind training, one job at a time, whose error is not lost."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from compile_muon.errors import CheckpointError

__all__ = ["Background"]


class Background:
    """Runs jobs one after the other; what one raised, :meth:`wait` raises, or the end of the program."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run ``job`` in a thread; nothing may be running."""

        def run() -> None:
            try:
                job()
            except BaseException as error:
                self._error = error

        # Not a daemon: a program that ends waits for what it saved last.
        self._thread = threading.Thread(target=run, name="compile_muon checkpoint")
        atexit.register(self.wait)
        self._thread.start()

    def wait(self) -> None:
        """Return when the job is done.

        Raises:
            CheckpointError: it failed; said once.
        """
        if self._thread is None:
            return
        self._thread.join()
        atexit.unregister(self.wait)
        error, self._thread, self._error = self._error, None, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint was not written: {type(error).__name__}: {error}") from error
