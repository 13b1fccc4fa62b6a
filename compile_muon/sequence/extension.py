"""Sequence parallelism as an extension of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compile_muon.engine import Extension
from compile_muon.passes.dynamo.attend import ATTEND, LOOK_UP_OWN
from compile_muon.sequence.batch import check_shapes
from compile_muon.sequence.check import check_first
from compile_muon.sequence.plan import SequencePlan


class SharedSequences(Extension):
    """Passes for attention in graphs of ranks that share sequences, and checks that these ranks have equal batches.

    `compares`: whether the other ranks exist and can compare batches (not in a plan).
    """

    dynamo_passes = (ATTEND, LOOK_UP_OWN)

    def __init__(self, plan: SequencePlan, *, compares: bool) -> None:
        self.plan, self._compares = plan, compares

    def before_forward(self, groups: frozenset[str], integers: Sequence[Tensor]) -> None:
        """Check that a graph with collectives of the group gets batches of one shape on all its ranks."""
        place = self.plan.place
        if self._compares and integers and place is not None and place.group in groups:
            check_shapes(self.plan.batch, place, integers)

    def before_step(self) -> None:
        """In the first step, check that the model computes the same from cut positions."""
        if self._compares:
            check_first(self.plan)

    def why_not_finite(self) -> tuple[str, str] | None:
        """Return problem and remedy if ranks of a group have different batches, which makes all values NaN."""
        differing = self.plan.differing_batches() if self._compares else ""
        remedy = "optimizer.data_place says which data a rank is to load"
        return (f"{differing}, which makes them NaN", remedy) if differing else None
