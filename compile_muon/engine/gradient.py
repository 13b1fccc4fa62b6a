"""The record of one parameter's gradient, from backward to ``step()``: visits, unreduced sums, speculations.

A *speculation* is a Muon direction that a backward made beside the gradient it returned. ``.grad`` is always the
gradient: a direction made from it is right in ``step()`` exactly if gradient and momentum are still, bit for bit, what
it was made from. The gradient's fingerprint decides that, and for the momentum, which only ``step()`` has reason to
write, PyTorch's count of edits. A loop's clipping, hooks, further backwards or penalties can therefore waste a
direction, never spoil a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from compile_muon.engine.dtensors import edits_of, has_memory
from compile_muon.errors import LedgerError

#: steps in a row that throw a matrix's direction away before ``update="auto"`` stops making it
PATIENCE = 3


@dataclass
class Visits:
    """Counts of forward and backward visits of the frames that read one parameter.

    A frame has a backward exactly if AOTAutograd partitioned its joint graph; each of its forwards then owes a
    backward. The counts decide whether a backward speculates, which changes the time of a step and no result.
    """

    owed: int = 0  # backward visits owed
    # Backward calls that delivered a gradient since the last step, without those in ``accumulate()``.
    backwards: int = 0
    current: int = -1  # backward call of the latest visit
    in_call: int = 0  # visits of that call so far
    usual: int = 0  # visits of the call before; 0 at first
    compiled: bool = False  # whether a graph has ever reduced a gradient
    eager: bool = False  # whether eager code has ever reduced one
    delivers: bool = False  # whether autograd adds the gradient of the latest visit to ``.grad``

    def forward(self) -> None:
        """Note that a partitioned frame that trains the parameter ran forward."""
        self.owed += 1

    def backward(self, call: int, *, counts: bool, compiled: bool = True) -> bool:
        """Note a backward visit of a graph (``compiled``) or of eager code, in backward call ``call``.

        ``counts``: the call delivers a gradient as one of the step's micro-batches. Return whether this is the call's
        first visit and the call before had one at most: of several visits, autograd adds only the sum to ``.grad``.
        """
        if call != self.current:
            self.current, self.usual, self.in_call = call, self.in_call, 0
            self.backwards += counts
        self.in_call += 1
        self.compiled |= compiled
        self.owed = max(0, self.owed - compiled)
        # ``owed`` must not decide: one rank may run a forward alone (to count operations, say), and all must agree.
        return self.in_call == 1 and self.usual <= 1

    def drop(self) -> None:
        """Note that the gradients so far were dropped; owed visits stay, since ``zero_grad()`` may follow forward."""
        self.backwards = 0

    def close(self) -> None:
        """End a step: forget forwards whose backward never came."""
        self.owed = self.backwards = 0


@dataclass
class UnreducedSums:
    """This rank's summand of one parameter's gradient, of the whole weight's shape, in master dtype, which stage 1 on
    several ranks keeps until a step's last micro-batch.

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
        """Return the sum for a graph that reduces it; it stays until :meth:`deliver`, in case the backward raises."""
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
