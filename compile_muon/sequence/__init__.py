"""Sequence parallelism: blocks compute a part of the positions, attention all positions of a part of the heads."""

from __future__ import annotations

from compile_muon.sequence.check import SharedSequences, check_sequence
from compile_muon.sequence.plan import SequencePlan, plan_sequence

__all__ = ["SequencePlan", "SharedSequences", "check_sequence", "plan_sequence"]
