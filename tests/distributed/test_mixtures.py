"""Transformers' mixtures of experts under ``"expert_parallel"``: training equals training of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Ranks
from reference import Report, hidden_matrices, train
from test_moe import tiny, tokens_of
from torch import Tensor, nn

from compile_muon.config import ExpertParallelConfig

STEPS = 4


def data(step: int, micro: int, rank: int) -> Tensor:
    return tokens_of(10_000 * step + 100 * micro + rank)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def train_mixture(
    kind: str,
    size: int,
    *,
    compiled: bool = False,
    fullgraph: bool = False,
    codegen: str = "eager",
    capacity_factor: float | None = None,
    **settings: Any,
) -> Report:
    model = tiny(kind)
    whole = copy.deepcopy(model)
    stacks = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    matrices = hidden_matrices(whole, exclude=("embed", "lm_head", "norm", "bias"), stacks=stacks)

    def run(inner: nn.Module) -> Any:
        if not compiled:
            return inner
        return torch.compile(inner, backend="muon_zero", options={"codegen": codegen}, fullgraph=fullgraph)

    experts = ExpertParallelConfig(size, capacity_factor)
    return train(model, matrices, loss, data, steps=STEPS, unsharded=whole, compiled=run, experts=experts, **settings)


CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("Mixtral", 2, {"stage": 3}),
    ("Qwen3Moe", 4, {"stage": 1, "gradient_accumulation_steps": 2}),
    ("DeepseekV3", 2, {"stage": 2, "compiled": True}),
    ("DeepseekV3", 2, {"stage": 3, "compiled": True, "fullgraph": True}),
    ("GptOss", 2, {"stage": 0, "exchange": "owner"}),
    ("Mixtral", 4, {"stage": 3, "compiled": True, "fullgraph": True, "capacity_factor": 8.0, "codegen": "inductor"}),
)


@pytest.mark.parametrize(("kind", "size", "settings"), CASES, ids=str)
def test_training_is_that_of_the_whole_model(
    ranks: Callable[[int], Ranks], kind: str, size: int, settings: dict[str, Any]
) -> None:
    for rank, report in enumerate(ranks(4).run(train_mixture, kind=kind, size=size, **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"
