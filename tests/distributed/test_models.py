"""Models nobody here wrote train like their unsharded selves: GPT-2, Llama and Mixtral of Hugging Face, a conv net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Ranks
from reference import Report, train
from zoo import ZOO

STEPS = 3


def train_model(name: str, **settings: Any) -> Report:
    torch.manual_seed(0)
    entry = ZOO[name]
    model = entry.build()
    matrices = entry.matrices(model)
    return train(model, matrices, entry.loss, entry.data, steps=STEPS, measure_noise=entry.noisy, **settings)


def check(group: Ranks, name: str, **settings: Any) -> None:
    for rank, report in enumerate(group.run(train_model, name=name, **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


@pytest.mark.parametrize(
    ("name", "stage", "update", "micro"),
    [
        pytest.param("gpt2", 0, "auto", 1, marks=pytest.mark.campaign),
        pytest.param("gpt2", 2, "step", 2, marks=pytest.mark.full),
        pytest.param("llama", 3, "auto", 1, marks=pytest.mark.campaign),
        pytest.param("mixtral", 1, "step", 1, marks=pytest.mark.campaign),
        ("mixtral", 3, "auto", 2),
        ("convnet", 1, "backward", 2),
        pytest.param("convnet", 2, "step", 1, marks=pytest.mark.campaign),
    ],
)
def test_two_ranks(ranks: Callable[[int], Ranks], name: str, stage: int, update: str, micro: int) -> None:
    check(ranks(2), name, stage=stage, update=update, gradient_accumulation_steps=micro)


@pytest.mark.parametrize(
    ("name", "stage"),
    [pytest.param("gpt2", 3, marks=pytest.mark.campaign), pytest.param("llama", 1, marks=pytest.mark.campaign)],
)
def test_two_ranks_inductor(ranks: Callable[[int], Ranks], name: str, stage: int) -> None:
    check(ranks(2), name, stage=stage, codegen="inductor")


@pytest.mark.full
def test_uneven_world(ranks: Callable[[int], Ranks]) -> None:
    check(ranks(3), "convnet", stage=3, gradient_accumulation_steps=2)
