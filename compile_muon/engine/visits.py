"""Visits of one parameter: backwards that are owed, and backwards since the last step."""

from __future__ import annotations

from dataclasses import dataclass


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

    def arrive(self, delivers: bool) -> None:
        """Note :attr:`delivers` at the beginning of a backward visit."""
        self.delivers = delivers

    def drop(self) -> None:
        """Note that the gradients so far were dropped; owed visits stay, since ``zero_grad()`` may follow forward."""
        self.backwards = 0

    def close(self) -> None:
        """End a step: forget forwards whose backward never came."""
        self.owed = self.backwards = 0
