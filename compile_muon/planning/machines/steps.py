"""Training steps that compute next to nothing, so that what the host does in one is all that takes time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.optimizer import MuonZero

__all__ = ["training"]

_WIDTH = 32


def training(layers: int, group: dist.ProcessGroup) -> tuple[Callable[[], None], int, int]:
    """A step of ``layers`` linear layers with biases, compiled; their parameters, and the collectives of a step.

    Args:
        group: the ranks that train together, at stage 3; one has stage 0.
    """
    several = group.size() > 1
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer = MuonZero(model, stage=3 if several else 0, gradient_accumulation_steps=1, mesh=mesh)
    compiled = torch.compile(model, backend="muon_zero")
    batch = torch.randn(4, _WIDTH)

    def step() -> None:
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = _collectives(optimizer)
    step()
    # The survey of a step is one more, which is not among them.
    return step, len(list(model.parameters())), _collectives(optimizer) - before + several


def _collectives(optimizer: MuonZero) -> int:
    return sum(count for _, count in optimizer.traffic.collectives)
