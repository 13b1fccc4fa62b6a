"""The frame log: the frames that met other ranks since the last step, in order.

Collectives pair up by order alone. A rank that runs two equal blocks in the other order, or one of them twice, receives
another parameter's numbers, without a mismatch of sizes or counts. So every visit that communicates is noted by the
names of its parameters, and ``step()`` compares a digest of the log over the ranks.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compile_muon.agreement.compare import by_rank, differing

#: latest visits kept by name; the digest covers all
_REMEMBERED = 4096


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
