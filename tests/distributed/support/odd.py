"""A model of every shape that sharding stumbles over, and the settings that it is trained with."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from support.reference import DEVICE, Report, train

STEPS = 3
AXES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "update": ("backward", "step"),
    "gradient_accumulation_steps": (1, 2),
}


class Odd(nn.Module):
    """Every kind of parameter that sharding along dim 0 can stumble over, in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.uneven = nn.Linear(8, 13)
        self.norm = nn.LayerNorm(13)
        self.even = nn.Linear(13, 8, bias=False)
        self.narrow = nn.Linear(8, 2)  # fewer rows than ranks in a world of 3
        self.widen = nn.Linear(2, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(2, 5, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(3, 8, 10) / 4)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.even(torch.relu(self.norm(self.uneven(self.embedding(tokens)))))
        h = h + self.widen(self.narrow(h)) * self.scale
        image = self.conv(torch.stack([h, h.flip(1)], dim=1))
        # each channel is used in its own way: with a plain mean its gradient would have rank 1, and the rest be noise
        h = h + sum(image[:, channel].roll(channel, -1).tanh() for channel in range(5)) / 5
        h = h + torch.einsum("btc,ecd->btd", h, self.experts)[..., :8].tanh()
        return self.head(h)


MATRICES = {
    "uneven.weight": (1, 13, 8),
    "even.weight": (1, 8, 13),
    "narrow.weight": (1, 2, 8),
    "widen.weight": (1, 8, 2),
    "conv.weight": (1, 5, 18),
    "experts": (3, 8, 10),
}


def data(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, 16, (4, 5), generator=generator)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def cases(
    combinations: Iterable[tuple[Any, ...]],
    *,
    full: Iterable[tuple[Any, ...]] = (),
    campaign: Iterable[tuple[Any, ...]] = (),
) -> pytest.MarkDecorator:
    """Parametrize ``settings`` by combinations of the axes: of the default tier, of the full one, of campaigns."""
    marked = [(values, ()) for values in combinations]
    marked += [(values, (pytest.mark.full,)) for values in full]
    marked += [(values, (pytest.mark.campaign,)) for values in campaign]
    listed = [
        pytest.param(dict(zip(AXES, values, strict=True)), id="stage{}-{}-micro{}".format(*values), marks=marks)
        for values, marks in marked
    ]
    return pytest.mark.parametrize("settings", listed)


NAMES = ("replicate", "shard")


def train_odd(shape: tuple[int, int] | None = None, **settings: Any) -> Report:
    """Train the model beside its reference, on a mesh of replicas of shards where there is a ``shape``."""
    torch.manual_seed(0)
    mesh = shape and init_device_mesh(DEVICE.type, shape, mesh_dim_names=NAMES)
    return train(Odd(), MATRICES, loss, data, steps=STEPS, mesh=mesh, **settings)
