"""The frame log: which frames ran since the last step, in order, where running them meant meeting the other ranks.

Collectives pair up by their order alone. A rank that runs two equal blocks in the other order, or one of them twice,
exchanges one parameter's numbers for another's, and no size or count betrays it. So every visit that communicates is
noted by the names of its parameters; ``step()`` compares a digest of the log with every other rank's.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["FrameLog", "Visit", "frame_label"]

#: visits that can still be named; the digest knows of all
_REMEMBERED = 4096


def frame_label(frame: str) -> str:
    """A frame as errors call it; empty for what is none.

    >>> frame_label("frame0003"), frame_label("")
    ('frame 3', '')
    """
    return f"frame {int(frame[5:])}" if frame.startswith("frame") else ""


class Visit(NamedTuple):
    """One visit of a frame.

    Args:
        half: "forward" or "backward".
        frame: this rank's name of it, which recompilations may make another than the other ranks'; not compared.
        names: its parameters, in the order in which the frame has them.
        details: what becomes of each, and what else decides how the frame communicates.
    """

    half: str
    frame: str
    names: Sequence[str]
    details: Sequence[str]


@dataclass
class FrameLog:
    """Visits since the last step.

    Args:
        count: of all of them.
    """

    count: int = 0
    _last: deque[Visit] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _hash: Any = field(default_factory=hashlib.blake2b)

    def note(self, half: str, frame: str, names: Sequence[str], details: Sequence[str] = ()) -> None:
        """A frame with parameters of these ``names`` has run."""
        self.count += 1
        self._last.append(Visit(half, frame, names, details))
        self._hash.update("\n".join((half, *details, *names, "\0")).encode())

    def digest(self) -> bytes:
        """Of all visits so far."""
        return self._hash.digest()

    def visits(self) -> dict[int, Visit]:
        """The last ones, by number from 0."""
        return dict(enumerate(self._last, self.count - len(self._last)))

    def close(self) -> None:
        """End of a step."""
        self.count = 0
        self._last.clear()
        self._hash = hashlib.blake2b()
