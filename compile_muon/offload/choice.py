"""Which states of a model are not resident."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor

from compile_muon.config import Config
from compile_muon.engine.dtensors import local_tensor
from compile_muon.errors import config_error
from compile_muon.model.assignment import Assignment
from compile_muon.model.groups import Group
from compile_muon.offload.state import OffloadedStates
from compile_muon.passes.methods import ElementMethod, MatrixMethod, matrix_method

__all__ = ["offloaded_states", "with_fetches"]


def offloaded_states(
    config: Config,
    groups: Sequence[Group],
    assignments: Mapping[str, Assignment],
    model: nn.Module,
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    compares: bool,
) -> OffloadedStates | None:
    """What keeps states that are offloaded, or in another dtype; None where none is.

    Args:
        group: all ranks; ``compares`` whether they are there.
    Raises:
        ConfigError: AdamW's step is to be on the host, and none of its moments is there.
    """
    if config.zero.offload is None and config.muon.momentum_dtype is None:
        return None
    fake = next((p.fake_mode for p in map(local_tensor, model.parameters()) if isinstance(p, FakeTensor)), None)
    # Neither a disk nor another rank is in a plan.
    real = compares if group is not None else fake is None
    offloaded = _offloaded_states(config, groups, assignments, model)
    return OffloadedStates(groups, config, offloaded, group, device, real=real, fake=fake)


def _offloaded_states(
    config: Config, groups: Sequence[Group], assignments: Mapping[str, Assignment], model: nn.Module
) -> frozenset[str]:
    """Parameters whose states are offloaded, the same on every rank.

    Where ``ratio`` keeps a part resident: a moment travels in and out once a step, a momentum in once
    more, so moments save more bytes for each that travels; of equals the largest go.
    """
    offload = config.zero.offload
    if offload is None:
        return frozenset()
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    candidates = []
    for group in groups:
        matrices = isinstance(group.method, MatrixMethod)
        momentum = isinstance(group.method, MatrixMethod) and group.method.keeps_momentum and offload.momentum
        slots = sum(state.each == "element" for state in group.method.states) + momentum
        slots += offload.masters
        for name in group.members:
            batch, *shape = assignments[name].matrix or (0, 0, 0)
            at_owners = batch * sum(math.prod(state.shape(*shape)) for state in group.method.states if state.at_owner)
            if size := slots * sizes[name] + at_owners:
                candidates.append((matrices, -size, name))
    left = offload.ratio * sum(-size for _, size, _ in candidates)
    chosen = []
    for _, size, name in sorted(candidates):
        if left <= 0:
            break
        chosen.append(name)
        left += size
    elements = {
        name: each.method.on_host for each in groups if isinstance(each.method, ElementMethod) for name in each.members
    }
    if offload.adamw_on == "cpu" and elements and not any(elements.get(name) for name in chosen):
        problem = "finds no moments of AdamW that are offloaded"
        raise config_error("OffloadConfig.adamw_on", "cpu", problem, "raise ratio, or leave adamw_on out")
    return frozenset(chosen)


def with_fetches(
    config: Config, assignments: Mapping[str, Assignment], offloaded: frozenset[str]
) -> dict[str, Assignment]:
    """The assignments, with those noted whose momentum graphs must fetch, or whose master weight is offloaded."""
    compressed, offload = config.muon.momentum_dtype is not None, config.zero.offload
    moved, masters = (False, False) if offload is None else (offload.momentum, offload.masters)
    return {
        name: replace(
            row,
            fetched=row.matrix is not None
            and matrix_method(row.algorithm).keeps_momentum
            and (compressed or (moved and name in offloaded)),
            master_offloaded=masters and name in offloaded,
        )
        for name, row in assignments.items()
    }
