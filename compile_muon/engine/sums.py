"""Stage 1 of several ranks: gradients that stay on the rank, unreduced, until a step's last micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from compile_muon.engine.dtensors import edits_of
from compile_muon.errors import LedgerError

__all__ = ["UnreducedSums"]


@dataclass
class UnreducedSums:
    """This rank's share of one parameter's gradient, of the whole weight's shape, in master dtype.

    What a backward keeps counts once autograd has written ``.grad``, and what it reduces is gone only then: a backward
    that raises before has delivered nothing and taken nothing. All of it goes when ``.grad`` goes.

    Args:
        delivered: the sum that belongs to ``.grad``.
        kept: by backward call, what is not delivered yet.
        taken_by: the backward call whose graph reduced ``delivered``.
        current: the latest backward call.
        grad: ``.grad`` as it was delivered: its id and how often it had been edited.
    """

    delivered: Tensor | None = None
    kept: dict[int, Tensor] = field(default_factory=dict)
    taken_by: int | None = None
    current: int = -1
    grad: tuple[int, int] = (0, 0)

    def begin(self, call: int, grad: Tensor | None, name: str) -> None:
        """A gradient is on its way in backward call ``call``.

        Only the first visit of a call looks at ``grad``: autograd writes it after the last one.

        Raises:
            LedgerError: ``.grad``, which is zero between micro-batches, was edited.
        """
        if self.current == call:
            return
        self.current = call
        self.check(grad, name)

    def untouched(self, grad: Tensor | None) -> bool:
        """Whether ``.grad`` is what autograd wrote, as far as PyTorch counts edits."""
        return grad is not None and self.grad == (id(grad), edits_of(grad))

    def check(self, grad: Tensor | None, name: str) -> None:
        """Without ``.grad`` whoever dropped it dropped the sum; an edit of it says that somebody took it for the whole.

        Raises:
            LedgerError: ``.grad`` was edited.
        """
        if grad is None:
            self.delivered = self.taken_by = None
        elif self.delivered is not None and not self.untouched(grad):
            raise LedgerError(
                f"gradient of {name!r} was edited between the micro-batches of a step: at stage 1 it holds zeros until "
                "the last of them, and the sum is kept on each rank; clip and edit after the last one, call "
                "optimizer.zero_grad() to drop the sum, or use stage 2"
            )

    def keep(self, call: int, grad: Tensor) -> None:
        """Keep what a backward graph handed out."""
        self.kept[call] = self.kept[call].add_(grad) if call in self.kept else grad

    def available(self, call: int) -> bool:
        """Whether a graph of this backward call can take the sum in."""
        return self.delivered is not None and self.taken_by != call

    def take(self, call: int) -> Tensor:
        """The sum, for a graph that reduces it. Still here, should that or anything behind it raise."""
        assert self.delivered is not None
        self.taken_by = call
        return self.delivered

    def deliver(self, call: int, grad: Tensor | None) -> None:
        """Autograd has written ``.grad`` in backward call ``call``."""
        if self.taken_by == call:
            self.delivered = self.taken_by = None
        kept = self.kept.pop(call, None)
        self.kept.clear()  # of calls that raised
        if kept is not None:
            self.delivered = kept if self.delivered is None else self.delivered.add_(kept)
        self.grad = (0, 0) if grad is None else (id(grad), edits_of(grad))

    def close(self) -> None:
        """Forget everything."""
        self.delivered = self.taken_by = None
        self.kept.clear()
