"""Hybrid sharding: training on a mesh of replicas of shards equals training of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Ranks
from reference import Report, train
from test_training import MATRICES, STEPS, Odd, cases, data, loss
from torch.distributed.device_mesh import init_device_mesh

NAMES = ("replicate", "shard")


def train_on(shape: tuple[int, int], **settings: Any) -> Report:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    return train(Odd(), MATRICES, loss, data, steps=STEPS, mesh=mesh, **settings)


def check(group: Ranks, shape: tuple[int, int], **settings: Any) -> None:
    for rank, report in enumerate(group.run(train_on, shape=shape, **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


@cases(
    (
        (0, "backward", "owner", 1),
        (1, "backward", "owner", 2),
        (1, "step", "replicate", 1),
        (2, "backward", "replicate", 2),
        (2, "step", "owner", 1),
        (3, "backward", "owner", 2),
        (3, "backward", "owner", 1),
        (3, "step", "replicate", 2),
    )
)
def test_replicas_of_shards(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    check(ranks(4), (2, 2), **settings)
