"""What a step asks of other optimizers that decide with it, as those of a model's other parts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from compile_muon.engine.decision import Facts

__all__ = ["Peers"]


class Peers:
    """There are none. A subclass says what all of them find, the same on every one.

    Attributes:
        alone: whether there are none, so that nobody is asked.
    """

    alone = True

    def step(self, number: int) -> AbstractContextManager[None]:
        """Around a step: if it raises, the others learn of it where they wait for this one.

        Args:
            number: of the step, from 1.
        """
        return nullcontext()

    def confer(self, facts: Facts) -> Facts:
        """Meet ahead of a decision.

        Args:
            facts: of this optimizer.
        Returns:
            The same, with the norm of the gradients of all.
        Raises:
            LedgerError: another one refuses the step, or is in another one.
            PeerError: another one does not come.
        """
        return facts

    def confirm(self, *, wrong: bool) -> None:
        """Meet once more where one of them has made directions, ahead of the first write.

        Args:
            wrong: whether this one has made some that are not finite.
        Raises:
            LedgerError, PeerError: as :meth:`confer`.
        """

    def here(self) -> str:
        """Which one this is, for an error; with a space in front."""
        return ""

    def elsewhere(self) -> str:
        """Those others that have found something that is not finite, for an error; empty if there are none."""
        return ""
