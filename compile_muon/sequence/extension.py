"""What sequence parallelism adds to an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compile_muon.engine import Extension
from compile_muon.passes.dynamo.attend import ATTEND, LOOK_UP_OWN
from compile_muon.sequence.batch import check_shapes
from compile_muon.sequence.check import check_first
from compile_muon.sequence.plan import SequencePlan

__all__ = ["SharedSequences"]


class SharedSequences(Extension):
    """Ranks that share sequences: attention in their graphs meets, and they are given the same batches.

    Args:
        plan: of what is cut.
        compares: whether the other ranks are there, to be asked for their batches.
    """

    dynamo_passes = (ATTEND, LOOK_UP_OWN)

    def __init__(self, plan: SequencePlan, *, compares: bool) -> None:
        self.plan, self._compares = plan, compares

    def before_forward(self, groups: frozenset[str], integers: Sequence[Tensor]) -> None:
        """See to it that a graph in which the ranks meet is given batches of one shape."""
        place = self.plan.place
        if self._compares and integers and place is not None and place.group in groups:
            check_shapes(self.plan.batch, place, integers)

    def before_step(self) -> None:
        """In the first step, see to it that the model computes the same of a part."""
        if self._compares:
            check_first(self.plan)

    def why_not_finite(self) -> tuple[str, str] | None:
        """Different batches make all that is computed NaN."""
        found = self.plan.differing_batches() if self._compares else ""
        remedy = "optimizer.data_place says which data a rank is to load"
        return (f"{found}, which makes them NaN", remedy) if found else None
