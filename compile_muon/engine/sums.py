"""Unreduced sums: gradients that stage 1 on several ranks keeps on the rank until a step's last micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from compile_muon.engine.dtensors import edits_of
from compile_muon.errors import LedgerError


@dataclass
class UnreducedSums:
    """This rank's summand of one parameter's gradient, of the whole weight's shape, in master dtype.

    The sum changes only after autograd has written ``.grad`` (zeros between micro-batches): then the gradients kept in
    that backward call join it, or it is dropped if the call reduced it. A backward that raises therefore changes no
    sum. Everything is dropped with ``.grad``.
    """

    delivered: Tensor | None = None  # the sum that belongs to ``.grad``
    kept: dict[int, Tensor] = field(default_factory=dict)  # gradients not delivered yet, by backward call
    taken_by: int | None = None  # the backward call whose graph reduces ``delivered``
    current: int = -1  # the latest backward call
    grad: tuple[int, int] = (0, 0)  # id and edits of ``.grad`` when autograd wrote it

    def begin(self, call: int, grad: Tensor | None, name: str) -> None:
        """Note that a gradient arrives in backward call ``call``; LedgerError if ``.grad`` was edited before."""
        if self.current == call:  # autograd writes .grad after the last visit of a call, so look at the first only
            return
        self.current = call
        self.check(grad, name)

    def untouched(self, grad: Tensor | None) -> bool:
        """Return whether ``.grad`` is as autograd wrote it, as far as PyTorch counts edits."""
        return grad is not None and self.grad == (id(grad), edits_of(grad))

    def check(self, grad: Tensor | None, name: str) -> None:
        """Drop the sum if ``.grad`` was dropped; LedgerError if it was edited, as a loop does that takes it for the
        gradient."""
        if grad is None:
            self.delivered = self.taken_by = None
        elif self.delivered is not None and not self.untouched(grad):
            raise LedgerError(
                f"gradient of {name!r} was edited between the micro-batches of a step: at stage 1 it holds zeros until "
                "the last of them, and the sum is kept on each rank; clip and edit after the last one, call "
                "optimizer.zero_grad() to drop the sum, or use stage 2"
            )

    def keep(self, call: int, grad: Tensor) -> None:
        """Keep a gradient that a backward graph returned unreduced."""
        self.kept[call] = self.kept[call].add_(grad) if call in self.kept else grad

    def available(self, call: int) -> bool:
        """Return whether a graph of this backward call can reduce the sum."""
        return self.delivered is not None and self.taken_by != call

    def take(self, call: int) -> Tensor:
        """Return the sum for a graph that reduces it. The sum stays until :meth:`deliver`, in case the backward
        raises."""
        assert self.delivered is not None
        self.taken_by = call
        return self.delivered

    def deliver(self, call: int, grad: Tensor | None) -> None:
        """Note that autograd has written ``.grad`` in backward call ``call``."""
        if self.taken_by == call:
            self.delivered = self.taken_by = None
        kept = self.kept.pop(call, None)
        self.kept.clear()  # of calls that raised
        if kept is not None:
            self.delivered = kept if self.delivered is None else self.delivered.add_(kept)
        self.grad = (0, 0) if grad is None else (id(grad), edits_of(grad))

    def close(self) -> None:
        """Drop everything."""
        self.delivered = self.taken_by = None
        self.kept.clear()
