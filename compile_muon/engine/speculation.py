"""Speculations: Muon directions that a backward made beside the gradients it returned.

``.grad`` is always the gradient. A direction made from it in backward is right in ``step()`` exactly if gradient and
momentum are still, bit for bit, what it was made from: the gradient's fingerprint tells, and of the momentum, which
nobody but ``step()`` has reason to write, PyTorch's count of edits. Whatever a loop does in between
(clipping, hooks, another backward, a penalty outside the model) can therefore waste a direction, never spoil a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from compile_muon.engine.dtensors import edits_of, has_memory

__all__ = ["Speculation", "Speculations", "memory_of"]

#: steps in a row that threw a matrix's direction away until ``update="auto"`` makes none for it any more
PATIENCE = 3


class Speculation(NamedTuple):
    """One direction.

    Args:
        direction: of the shard, in the dtype of Newton-Schulz.
        fingerprint: int64, of the gradient it was made from (``compile_muon.passes.fingerprint``).
        edits: of the momentum until then.
        rates: momentum and all else that it was made with (:attr:`.ShardedParam.rates`).
        fetches: of the momentum until then, where it is not resident.
        gradient: :func:`memory_of` the gradient that the graph returned.
    """

    direction: Tensor
    fingerprint: Tensor
    edits: int
    rates: tuple[float, ...]
    fetches: int = 0
    gradient: tuple[int, int] | None = None


def memory_of(gradient: Tensor) -> tuple[int, int]:
    """Where a plain tensor is, and how often it has been edited: autograd adds gradients up elsewhere, or in place."""
    return gradient.data_ptr() if has_memory(gradient) else 0, edits_of(gradient)


@dataclass
class Speculations:
    """What has become of one matrix's directions.

    Args:
        current: the direction that waits for ``step()``.
        discarded_in_a_row: steps in a row that threw one away.
        kept_in_a_row: steps in a row that would have used one, counted while there is none.
        stopped: why ``update="auto"`` has stopped making them, if it has.
    """

    current: Speculation | None = None
    discarded_in_a_row: int = 0
    kept_in_a_row: int = 0
    stopped: str | None = None

    def make(self, speculation: Speculation) -> None:
        """A backward made a direction; an earlier one is of no use any more."""
        self.current = speculation

    def drop(self) -> None:
        """The gradient is gone, or not what it was."""
        self.current = None

    def used(self) -> None:
        """A step used the direction."""
        self.current = None
        self.discarded_in_a_row = 0

    def discarded(self, reason: str) -> bool:
        """A step threw the direction away; returns whether that was once too often."""
        self.current = None
        self.discarded_in_a_row += 1
        if self.discarded_in_a_row < PATIENCE or self.stopped:
            return False
        self.stopped, self.kept_in_a_row = reason, 0
        return True

    def note_norm(self, *, under_limit: bool) -> None:
        """A step's gradient norm is known. Where clipping was why directions stopped, they resume once it is over."""
        self.kept_in_a_row = self.kept_in_a_row + 1 if under_limit else 0
        if self.stopped == "clipped" and self.kept_in_a_row >= PATIENCE:
            self.stopped, self.discarded_in_a_row = None, 0
