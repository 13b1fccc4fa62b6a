"""Where this rank is in training, and what it says when a collective does not end.

A rank that is killed, hangs or raises stops the others in a collective, and what PyTorch then says names a socket. So
every rank keeps its status (step, half, frame, collectives so far) where the others can read it
(:mod:`compile_muon.agreement.heartbeat`), and whoever is stopped tells everyone's.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import takewhile
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from compile_muon.agreement.frame_log import frame_label
from compile_muon.agreement.heartbeat import Entry, Heartbeat, backend_of
from compile_muon.errors import PeerError
from compile_muon.passes.torch_private import collective_failed, store_of

__all__ = ["EVALUATION", "TRAINING", "RankStatus", "holder_of_all"]

#: what weights are gathered for: the forward and backward of training, a forward without one
TRAINING, EVALUATION = "training", "evaluation"

_log = logging.getLogger("compile_muon")


class RankStatus:
    """Where this rank is; a context manager around whatever may wait for other ranks.

    ``with status.at("forward", frame, names): ...``

    Args:
        group: of the optimizer; None for one process, which has nobody to tell.
        device: that the group works on.
    Attributes:
        step: the step under way, from 1.
        collectives: how many were started before.
        phase: what weights were last gathered for, see :meth:`change`.
        changes: how often that was another.
        heartbeat: where the others read it; None for one process, or if the group has no store.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.step = 1
        self.collectives = 0
        self.phase = TRAINING
        self.changes = 0
        self._at: tuple[int, str, str, Sequence[str]] = (1, "", "", ())
        self._entered: float | None = None
        self._raised = ""
        self.heartbeat: Heartbeat | None = None
        if group is None or device is None or backend_of(group, device) == "fake":
            return
        store = store_of(group)
        if store is not None:
            self.heartbeat = Heartbeat(store, group, device)
            self.heartbeat.publish(self.told())
            arguments = (weakref.ref(self), self.heartbeat)
            beats = threading.Thread(target=_keep_up, args=arguments, name="muon_zero_place", daemon=True)
            beats.start()
            weakref.finalize(self, self.heartbeat.end, beats)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankStatus:
        """A copied model has no optimizer, and meets nobody."""
        return memo.setdefault(id(self), RankStatus())

    def at(self, half: str, frame: str = "", names: Sequence[str] = ()) -> RankStatus:
        """Say where, with parameters of these ``names``; ``with`` says for how long."""
        self._at = (self.step, half, frame, names)
        return self

    def __enter__(self) -> RankStatus:
        self._raised = ""
        self._entered = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave.

        Raises:
            PeerError: in place of the error of a collective, with everyone's place.
        """
        if error is None or self.heartbeat is None or isinstance(error, PeerError):
            self._entered = None
            return
        try:
            if not collective_failed(error):
                self._raised = f"{type(error).__name__}: {_first_line(error)}"[:200]
                self.heartbeat.publish(self.told())
                return
            # What torch said comes first: it is what users search for.
            self._raised = PeerError.__name__
            raise PeerError(f"{_first_line(error)}\n{self.everyone()}") from error
        finally:
            self._entered = None

    def change(self, phase: str) -> None:
        """Weights are about to be gathered for ``phase``: if for another one before, all ranks wait for each other.

        A rank that evaluates alone would otherwise gather weights with others that train: it gets right numbers, and
        the others the wrong collectives, until one has another size and the backend ends the process.

        Raises:
            PeerError: other ranks do something else.
        """
        if phase == self.phase:
            return
        before, self.phase = self.phase, phase
        self.meet(
            f"this rank changes over from {before} to {phase}, and at stage 3 weights are gathered from all ranks for "
            "each: do it on every rank, as often, or use stage 2."
        )

    def meet(self, because: str) -> None:
        """Wait, without a collective, until all ranks come to a meeting like this one.

        Args:
            because: what all have to do together, a sentence.
        Raises:
            PeerError: other ranks do something else.
        """
        self.changes += 1
        if self.heartbeat is not None:
            try:
                self.heartbeat.meet_at(self.told())
            except PeerError as error:
                raise PeerError(f"{because}\n{error}") from None

    def everyone(self) -> str:
        """Where all ranks are; empty for one process. Takes a few beats."""
        return "" if self.heartbeat is None else self.heartbeat.ask(self.told())

    def told(self) -> Entry:
        """The status as the others read it."""
        step, half, name, names = self._at
        label = frame_label(name)
        frame = f" of {label}" if label else ""
        where = f"{half}{frame}{holder_of_all(names)}"
        inside = self._entered is not None
        return Entry(step, where, inside, self.collectives, self._raised, changes=self.changes)

    def waited(self) -> float:
        """Seconds since it was entered; 0 outside."""
        entered = self._entered
        return 0.0 if entered is None else time.monotonic() - entered


def _keep_up(reference: weakref.ref[RankStatus], heartbeat: Heartbeat) -> None:
    """Thread: publish the status as long as it lives, and speak up where the backend would end the process."""
    spoken = False
    while not heartbeat.stopped.wait(heartbeat.interval):
        status = reference()
        if status is None or not heartbeat.publish(status.told()):
            return
        heartbeat.remember()
        late = status.waited() > heartbeat.patience
        if late and not spoken:
            _log.error("no collective has ended for %.0f s: %s", status.waited(), heartbeat.ask(status.told()))
        spoken = late
        del status


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def holder_of_all(names: Sequence[str]) -> str:
    """The innermost module that holds all these parameters, in parentheses.

    >>> holder_of_all(["blocks.4.up.weight", "blocks.4.down.weight"])
    ' (blocks.4)'
    """
    if not names:
        return ""
    modules = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, modules)]
    if not shared and len(names) > 1:
        return f" ({names[0]} to {names[-1]})"
    return f" ({'.'.join(shared) or names[0]})"
