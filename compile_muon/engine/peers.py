"""Other optimizers that decide over a step together with this one, such as those of other pipeline stages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from compile_muon.engine.decision import Facts


class NormGroup:
    """The peers of an optimizer; here none. A subclass overrides the methods, whose results are equal on all peers."""

    alone = True  # no peers: ``confer`` need not be called

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return the context of step ``number`` (from 1). If the step raises, waiting peers learn of it."""
        return nullcontext()

    def confer(self, facts: Facts) -> Facts:
        """Meet ahead of a decision; return ``facts`` with the gradient norm over all peers.

        Raises:
            LedgerError: a peer refuses the step, or is in another one.
            PeerError: a peer does not come.
        """
        return facts

    def confirm(self, *, wrong: bool) -> None:
        """Meet ahead of the first write, after directions were made; ``wrong``: some of this optimizer's are not
        finite. Raises as :meth:`confer`."""

    def here(self) -> str:
        """Return this optimizer's place among the peers, for an error; with a leading space."""
        return ""

    def elsewhere(self) -> str:
        """Return the peers that found a non-finite number, for an error; empty if there are none."""
        return ""
