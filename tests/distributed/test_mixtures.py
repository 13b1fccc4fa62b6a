"""Transformers' mixtures of experts under ``"expert_parallel"``: training equals training of the whole model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import RanksOf, on_ranks
from support.launched import launched
from support.mixtures import tiny, tokens_of
from support.reference import Report, hidden_matrices, train, world_and_rank
from support.zoo import ZOO
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from compile_muon.config import ExpertParallelConfig

STEPS = 2


def data(step: int, micro: int, rank: int) -> Tensor:
    return tokens_of(10_000 * step + 100 * micro + rank)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def train_mixture(
    kind: str, size: int, *, compiled: bool = False, fullgraph: bool = False, codegen: str = "eager",
    capacity_factor: float | None = None, **settings: Any,
) -> Report:  # fmt: skip
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


CASES = (
    pytest.param("Mixtral", 2, {"stage": 3}, marks=pytest.mark.full),
    pytest.param("DeepseekV3", 2, {"stage": 2, "compiled": True}, marks=pytest.mark.full),
    pytest.param("Qwen3Moe", 4, {"stage": 1, "gradient_accumulation_steps": 2}, marks=pytest.mark.campaign),
    pytest.param(
        "Mixtral", 4, {"stage": 3, "compiled": True, "fullgraph": True, "capacity_factor": 8.0, "codegen": "inductor"},
        marks=pytest.mark.campaign,
    ),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "size", "settings"), CASES, ids=str)
@on_ranks(4)
def test_training_is_that_of_the_whole_model(kind: str, size: int, settings: dict[str, Any]) -> None:
    train_mixture(kind, size, **settings).check()


LLAMA = ZOO["llama"]


def train_dense(folder: str, **settings: Any) -> None:
    """Cut by Transformers as it loads."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    whole = LlamaForCausalLM.from_pretrained(folder)
    mesh = init_device_mesh("cpu", (world_and_rank()[0] // 2, 2), mesh_dim_names=("shard", "tensor"))
    with launched():
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    train(
        model, LLAMA.matrices(whole), LLAMA.loss, LLAMA.data, steps=STEPS, unsharded=whole, sharing=2, mesh=mesh,
        compiled=lambda inner: inner, **settings,
    ).check()  # fmt: skip


def test_tensor_parallel_llama(ranks: RanksOf, tmp_path: Path) -> None:
    torch.manual_seed(1)
    LLAMA.build().save_pretrained(tmp_path)
    ranks(2).run(train_dense, folder=str(tmp_path), stage=3)
