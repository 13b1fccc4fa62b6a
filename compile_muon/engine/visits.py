"""Visits of one parameter: which backwards are owed to it, and how many have come since the last step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Visits"]


@dataclass
class Visits:
    """Forward and backward visits of the frames that read one parameter.

    A frame has a backward exactly if AOTAutograd partitioned its joint graph; each of its forward visits is owed one
    backward visit. Only policy hangs on the counts (when a speculation pays), never a number.

    Args:
        owed: backward visits still owed.
        backwards: backward calls that delivered a gradient since the last step, those of ``accumulate()`` left out.
        current: number of the backward call of the latest visit.
        in_call: visits of that call so far.
        usual: visits of the call before it; 0 before there was one.
        compiled: whether any was that of a graph, since the start.
        eager: whether anything else has reduced a gradient, since the start.
        delivers: whether the latest visit is of a backward that adds to ``.grad``.
    """

    owed: int = 0
    backwards: int = 0
    current: int = -1
    in_call: int = 0
    usual: int = 0
    compiled: bool = False
    eager: bool = False
    delivers: bool = False

    def forward(self) -> None:
        """A partitioned frame that trains the parameter ran forward."""
        self.owed += 1

    def backward(self, call: int, *, counts: bool, compiled: bool = True) -> bool:
        """A partitioned frame is about to run backward, or eager code.

        Args:
            call: number of the backward call under way.
            counts: whether this call delivers a gradient and is one of the step's micro-batches.
        Returns:
            Whether this visit is likely to be the only one of its backward call, going by the call before. Autograd
            sums the contributions of several visits before it writes ``.grad``.
        """
        if call != self.current:
            self.current, self.usual, self.in_call = call, self.in_call, 0
            self.backwards += counts
        self.in_call += 1
        self.compiled |= compiled
        self.owed = max(0, self.owed - compiled)
        # Not by what is owed: a forward of one rank alone, to count operations, say, must not set it apart.
        return self.in_call == 1 and self.usual <= 1

    def arrive(self, delivers: bool) -> None:
        """A backward visit begins; whether its backward adds to ``.grad``."""
        self.delivers = delivers

    def drop(self) -> None:
        """The gradients so far were dropped; what is owed stays owed (``zero_grad()`` may come between the two)."""
        self.backwards = 0

    def close(self) -> None:
        """End of a step: forwards whose backward never came are forgotten."""
        self.owed = self.backwards = 0
