"""Which states are away from their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from compile_muon.config import Config
from compile_muon.model.assignment import Assignment
from compile_muon.model.groups import Group
from compile_muon.passes.methods import MatrixMethod

__all__ = ["states_away", "with_fetches"]


def states_away(config: Config, groups: Sequence[Group], model: nn.Module) -> frozenset[str]:
    """Parameters whose states are offloaded, the same on every rank.

    Where ``ratio`` keeps a part beside its parameters: a moment travels in and out once a step, a momentum in once
    more, so moments save more bytes for each that travels; of equals the largest go.
    """
    offload = config.zero.offload
    if offload is None:
        return frozenset()
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    candidates = []
    for group in groups:
        matrices = isinstance(group.method, MatrixMethod)
        slots = sum(state.each == "element" for state in group.method.states) + (matrices and offload.momentum)
        candidates += [(matrices, -slots * sizes[name], name) for name in group.members if slots]
    left = offload.ratio * sum(-size for _, size, _ in candidates)
    chosen = []
    for _, size, name in sorted(candidates):
        if left <= 0:
            break
        chosen.append(name)
        left += size
    return frozenset(chosen)


def with_fetches(config: Config, assignments: Mapping[str, Assignment], away: frozenset[str]) -> dict[str, Assignment]:
    """The assignments, with those noted whose momentum graphs must fetch."""
    compressed = config.muon.momentum_dtype is not None
    moved = config.zero.offload is not None and config.zero.offload.momentum
    return {
        name: replace(row, fetched=row.matrix is not None and (compressed or (moved and name in away)))
        for name, row in assignments.items()
    }
