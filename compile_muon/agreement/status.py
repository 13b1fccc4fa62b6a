"""The status of this rank in training, the error when a collective does not end, and the frames that met other ranks.

A rank that is killed, hangs or raises stops the others in a collective, whose PyTorch error names a socket. So every
rank keeps its status (step, half, frame, collectives so far) where the others can read it
(:mod:`compile_muon.agreement.heartbeat`), and a stopped rank reports all of them.

Collectives pair up by order alone. A rank that runs two equal blocks in the other order, or one of them twice, receives
another parameter's numbers, without a mismatch of sizes or counts. So every visit that communicates is noted in the
:class:`FrameLog` by the names of its parameters, and ``step()`` compares a digest of the log over the ranks.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from compile_muon.agreement.compare import by_rank, differing
from compile_muon.agreement.heartbeat import Entry, Heartbeat, backend_of
from compile_muon.errors import PeerError
from compile_muon.passes.torch_private import collective_failed, store_of

#: purposes of gathering weights: forward and backward of training, or a forward without a backward
TRAINING, EVALUATION = "training", "evaluation"

#: latest visits kept by name; the digest covers all
_REMEMBERED = 4096
_log = logging.getLogger("compile_muon")


class RankStatus:
    """This rank's status; a context manager around code that may wait for other ranks.

    ``with status.at("forward", frame, names): ...``

    ``group`` is the optimizer's, None for one process; ``device`` is that of its collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.step = 1  # the current step
        self.collectives = 0  # started so far
        self.phase = TRAINING  # purpose of the latest gather, see :meth:`change`
        self.changes = 0  # changes of phase
        self._at: tuple[int, str, str, Sequence[str]] = (1, "", "", ())
        self._entered: float | None = None
        self._raised = ""
        self.heartbeat: Heartbeat | None = None  # None for one process, or without a store
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
        """Return a status without a group: a copied model has no optimizer."""
        return memo.setdefault(id(self), RankStatus())

    def at(self, half: str, frame: str = "", names: Sequence[str] = ()) -> RankStatus:
        """Set the place of this rank, with parameters of these ``names``; use as ``with status.at(...)``."""
        self._at = (self.step, half, frame, names)
        return self

    def __enter__(self) -> RankStatus:
        self._raised = ""
        self._entered = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the place; replace the error of a failed collective by a PeerError with everyone's places."""
        if error is None or self.heartbeat is None or isinstance(error, PeerError):
            self._entered = None
            return
        try:
            if not collective_failed(error):
                self._raised = f"{type(error).__name__}: {_first_line(error)}"[:200]
                self.heartbeat.publish(self.told())
                return
            # torch's own message comes first: users search for it.
            self._raised = PeerError.__name__
            text = _first_line(error)
            # torchrun sends SIGTERM at once where another rank died.
            with held_back(signal.SIGTERM, lambda: _log.error("%s", text)):
                text += f"\n{self.everyone()}"
            raise PeerError(text) from error
        finally:
            self._entered = None

    def change(self, phase: str) -> None:
        """Wait for all ranks if ``phase``, for which weights are about to be gathered, is a new one; PeerError if
        others differ.

        Otherwise a rank that evaluates alone would gather weights with ranks that train: it gets right numbers and they
        pair up with wrong collectives, until a size differs and the backend ends the process.
        """
        if phase == self.phase:
            return
        before, self.phase = self.phase, phase
        self.meet(
            f"this rank changes over from {before} to {phase}, and at stage 3 weights are gathered from all ranks for "
            "each: do it on every rank, as often, or use stage 2."
        )

    def agreed(self, key: str, value: str) -> str:
        """Return the value of the first rank that asks for ``key``; alone, ``value``."""
        return value if self.heartbeat is None else self.heartbeat.first(key, value)

    def meet(self, because: str) -> None:
        """Wait, without a collective, until all ranks call this; PeerError, which begins with ``because`` (a sentence
        about their common task), if some do not."""
        self.changes += 1
        if self.heartbeat is not None:
            try:
                self.heartbeat.meet_at(self.told())
            except PeerError as error:
                raise PeerError(f"{because}\n{error}") from None

    def everyone(self) -> str:
        """Return where all ranks are, empty for one process; takes a few beats."""
        return "" if self.heartbeat is None else self.heartbeat.ask(self.told())

    def told(self) -> Entry:
        """Return the status as other ranks read it."""
        step, half, name, names = self._at
        label = frame_label(name)
        frame = f" of {label}" if label else ""
        where = f"{half}{frame}{holder_of_all(names)}"
        inside = self._entered is not None
        return Entry(step, where, inside, self.collectives, self._raised, changes=self.changes)

    def waited(self) -> float:
        """Return the seconds since the place was entered; 0 outside."""
        entered = self._entered
        return 0.0 if entered is None else time.monotonic() - entered


def _keep_up(reference: weakref.ref[RankStatus], heartbeat: Heartbeat) -> None:
    """Publish the status as long as it lives, and log a wait where the backend would end the process; a thread."""
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
        del status  # else this thread would keep it alive


@contextmanager
def held_back(number: signal.Signals, ahead: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold back a signal until the end of this block; call ``ahead`` first if it came. A second Ctrl-C comes through.
    Elsewhere than on the main thread, and where other than Python handles the signal, nothing is held back."""
    came = list[int]()
    handler = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return

    def later(*_: object) -> None:
        came.append(number)
        if number == signal.SIGINT:
            signal.signal(number, handler)

    signal.signal(number, later)
    try:
        yield
    finally:
        signal.signal(number, handler)
        if came:
            ahead()
            signal.raise_signal(number)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def holder_of_all(names: Sequence[str]) -> str:
    """Return the innermost module that holds all these parameters, in parentheses.

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


# ------------------------------------------------------------------------------------------------------ frame log


def frame_label(frame: str) -> str:
    """Return a frame's name in errors; empty for eager code.

    >>> frame_label("frame0003"), frame_label("")
    ('frame 3', '')
    """
    return f"frame {int(frame[5:])}" if frame.startswith("frame") else ""


class Visit(NamedTuple):
    """One visit of a frame."""

    half: str  # "forward" or "backward"
    frame: str  # this rank's name, which recompilations may change; never compared
    names: Sequence[str]  # its parameters, in the frame's order
    details: Sequence[str]  # the purpose of each, and options that change the frame's collectives


@dataclass
class FrameLog:
    """The visits since the last step."""

    count: int = 0
    _last: deque[Visit] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _hash: Any = field(default_factory=hashlib.blake2b)

    def note(self, half: str, frame: str, names: Sequence[str], details: Sequence[str] = ()) -> None:
        """Note a visit of a frame with parameters of these ``names``."""
        self.count += 1
        self._last.append(Visit(half, frame, names, details))
        self._hash.update("\n".join((half, *details, *names, "\0")).encode())

    def digest(self) -> bytes:
        """Return a digest of all visits so far."""
        return self._hash.digest()

    def visits(self) -> dict[int, Visit]:
        """Return the latest visits, by number from 0."""
        return dict(enumerate(self._last, self.count - len(self._last)))

    def close(self) -> None:
        """End a step."""
        self.count = 0
        self._last.clear()
        self._hash = hashlib.blake2b()


def first_difference(everyone: Sequence[Mapping[int, Visit]]) -> str:
    """Describe the first visit at which the ranks' frame logs differ."""
    start = max(min(log, default=0) for log in everyone)
    known = [{i: visit._replace(frame="") for i, visit in log.items() if i >= start} for log in everyone]
    differences = differing(known)
    if not differences:
        return f"a visit more than {max(map(len, known))} visits ago"
    number = min(differences)
    return f"visit {number + 1} of a frame: {by_rank(_described([log.get(number) for log in everyone]))}"


def _described(visits: Sequence[Visit | None]) -> list[str]:
    """Describe each rank's visit, with the first parameter or detail in which they differ."""
    present = [visit for visit in visits if visit is not None]
    place = next(iter(differing([dict(enumerate(visit.names)) for visit in present])), None)
    detail = next(iter(differing([dict(enumerate(visit.details)) for visit in present])), None)
    texts = []
    for visit in visits:
        if visit is None:
            texts.append("none any more")
            continue
        frame = frame_label(visit.frame) or "eager code"
        if place is not None:
            what = f" at {visit.names[place]}" if place < len(visit.names) else f", without a parameter {place + 1}"
        elif detail is not None:
            what = f" at {visit.names[min(detail, len(visit.names) - 1)]} ({' '.join(visit.details[detail:][:1])})"
        else:
            what = f" of {visit.names[0]}"
        texts.append(f"{visit.half} of {frame}{what}")
    return texts
