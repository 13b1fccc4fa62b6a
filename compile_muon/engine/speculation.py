"""Speculations: Muon directions that a backward made beside the gradients it returned.

``.grad`` is always the gradient. A direction made from it in backward is right in ``step()`` exactly if gradient and
momentum are still, bit for bit, what it was made from. The gradient's fingerprint decides that, and for the momentum,
which only ``step()`` has reason to write, PyTorch's count of edits. A loop's clipping, hooks, further backwards or
penalties can therefore waste a direction, never spoil a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from compile_muon.engine.dtensors import edits_of, has_memory

#: steps in a row that throw a matrix's direction away before ``update="auto"`` stops making it
PATIENCE = 3


class Speculation(NamedTuple):
    """One direction, with everything it was made of."""

    direction: Tensor  # like the shard, in the dtype of Newton-Schulz
    fingerprint: Tensor  # int64, of the gradient (``compile_muon.passes.fingerprint``)
    edits: int  # :func:`.edits_of` the momentum
    rates: tuple[float, ...]  # :attr:`.ShardedParam.rates`
    fetches: int = 0  # number of the fetch, of an offloaded momentum
    gradient: tuple[int, int] | None = None  # :func:`memory_of` the gradient that the graph returned


def memory_of(gradient: Tensor) -> tuple[int, int]:
    """Return the address and edits of a plain tensor; autograd sums gradients at another address, or in place."""
    return gradient.data_ptr() if has_memory(gradient) else 0, edits_of(gradient)


@dataclass
class Speculations:
    """The direction of one matrix, and its record of used and discarded ones."""

    current: Speculation | None = None  # waits for ``step()``
    discarded_in_a_row: int = 0  # steps in a row that threw one away
    kept_in_a_row: int = 0  # steps in a row under the clipping limit
    stopped: str | None = None  # why ``update="auto"`` has stopped making directions

    def make(self, speculation: Speculation) -> None:
        """Take a direction from backward; it replaces an earlier one."""
        self.current = speculation

    def drop(self) -> None:
        """Drop the direction, whose gradient is gone or has changed."""
        self.current = None

    def used(self) -> None:
        """Note that a step used the direction."""
        self.current = None
        self.discarded_in_a_row = 0

    def discarded(self, reason: str) -> bool:
        """Note that a step threw the direction away; return True when that stops speculation."""
        self.current = None
        self.discarded_in_a_row += 1
        if self.discarded_in_a_row < PATIENCE or self.stopped:
            return False
        self.stopped, self.kept_in_a_row = reason, 0
        return True

    def note_norm(self, *, under_limit: bool) -> None:
        """Note whether a step's gradient norm was under the limit. Speculation that clipping has stopped resumes after
        ``PATIENCE`` of these steps in a row."""
        self.kept_in_a_row = self.kept_in_a_row + 1 if under_limit else 0
        if self.stopped == "clipped" and self.kept_in_a_row >= PATIENCE:
            self.stopped, self.discarded_in_a_row = None, 0
