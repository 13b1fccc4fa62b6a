"""A model whose weights parallelize_module cuts, trained beside data parallelism."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from support.odd import STEPS, loss
from support.reference import DEVICE, Report, hidden_matrices, train

__all__ = ["PLAN", "Sliced", "data", "train_sliced"]


def data(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, 16, (3, 8), generator=generator)


class Sliced(nn.Module):
    """What parallelize_module cuts: by columns, by rows, unevenly, not at all; and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 13)
        self.down = nn.Linear(13, 8)
        self.narrow = nn.Linear(8, 3, bias=False)  # fewer rows than ranks
        self.widen = nn.Linear(3, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.calibrate = nn.Linear(16, 16)  # no DTensor: a copy on every rank

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = h + self.down(torch.relu(self.up(self.norm(h))))
        h = h + self.widen(self.narrow(h).tanh())
        logits = self.head(h)
        return logits + self.calibrate(logits)


PLAN: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "narrow": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    "widen": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def sliced(mesh: DeviceMesh, *, tied: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Sliced()
    if tied:
        model.head.weight = model.embedding.weight
    whole = copy.deepcopy(model)
    parallelize_module(model, mesh["tensor"], PLAN)
    if tied:  # which parallelize_module undoes
        model.head.weight = model.embedding.weight
    return model, whole


def train_sliced(sizes: tuple[int, ...], names: tuple[str, ...], tied: bool = False, **settings: Any) -> Report:
    mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)
    model, whole = sliced(mesh, tied=tied)
    matrices = hidden_matrices(whole, exclude=("embedding", "head"))
    return train(model, matrices, loss, data, steps=STEPS, unsharded=whole, sharing=sizes[-1], mesh=mesh, **settings)
