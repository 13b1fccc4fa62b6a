"""Experts on several ranks beside Transformers' own forward of the whole model, in the same process."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from reference import world_and_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from compile_muon.errors import ConfigError

SMALL = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    max_position_embeddings=32, experts_implementation="eager", use_cache=False,
)  # fmt: skip
MODELS = ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss", "NemotronH", "MuseSparkExperts")


def tiny(kind: str, **settings: Any) -> Any:
    import transformers

    own: dict[str, dict[str, Any]] = {
        "Mixtral": dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=2),
        "Qwen3Moe": dict(
            moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, head_dim=16,
        ),
        "DeepseekV3": dict(
            moe_intermediate_size=16, intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
            topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, num_key_value_heads=2,
        ),
        "GptOss": dict(
            intermediate_size=16, num_local_experts=8, num_experts_per_tok=2, head_dim=16, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"], attn_implementation="eager",
        ),
    }  # fmt: skip
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **own[kind], **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "gate.weight", "router.weight")):
                value.normal_(std=0.3)  # gates that choose, biases that count
    return model


def tokens_of(rank: int, length: int = 6) -> Tensor:
    dice = torch.Generator().manual_seed(rank)
    return torch.randint(1, 61, (2, length), generator=dice)


def loss_of(model: Any, rank: int, length: int = 6) -> Tensor:
    tokens = tokens_of(rank, length)
    return model(input_ids=tokens, labels=tokens).loss


def expert_mesh(size: int) -> DeviceMesh:
    world, _ = world_and_rank()
    return init_device_mesh("cpu", (world // size, size), mesh_dim_names=("replicate", "expert"))["expert"]


def shared(model: nn.Module, size: int, capacity_factor: float | None = None) -> Any:
    from compile_muon.integrations.moe import plan_experts

    plan_experts(model, size, capacity_factor=capacity_factor).apply(expert_mesh(size))
    return model


def close(found: Tensor, expected: Tensor, what: str = "", limit: float = 1e-6) -> None:
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    difference = float((found - expected).abs().max()) if expected.numel() else 0.0
    assert found.shape == expected.shape and difference <= limit * scale, f"{what}: differs by {difference}"


def summed_gradients(model: nn.Module, size: int) -> dict[str, Tensor]:
    """As a data-parallel engine would sum them: experts over the groups that hold the same, the rest over all."""
    world, rank = world_and_rank()
    found = {}
    for name, param in model.named_parameters():
        expert = isinstance(param, DTensor)
        grad = param.grad
        assert grad is not None, name
        local = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
        if not expert:
            dist.all_reduce(local)
        elif size < world:
            parts = [torch.empty_like(local) for _ in range(world)]
            dist.all_gather(parts, local)
            local = sum(part for other, part in enumerate(parts) if other % size == rank % size)
        found[name] = local
    return found


def compare_gradients(found: dict[str, Tensor], whole: nn.Module, size: int) -> None:
    _, rank = world_and_rank()
    for name, param in whole.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        if found[name].shape != expected.shape:
            count = expected.shape[0] // size
            expected = expected[rank % size * count : (rank % size + 1) * count]
        close(found[name], expected, name)


def reference(kind: str, world: int, **settings: Any) -> tuple[Any, list[Tensor]]:
    whole = tiny(kind, **settings)
    losses = [loss_of(whole, other) for other in range(world)]
    sum(losses).backward()
    return whole, [loss.detach() for loss in losses]


# ----------------------------------------------------------------------------------------------------- whole models


def train_whole_models(kinds: tuple[str, ...], size: int) -> None:
    world, rank = world_and_rank()
    for kind in kinds:
        whole, losses = reference(kind, world)
        model = shared(tiny(kind), size)
        logits = model(input_ids=tokens_of(rank)).logits
        close(logits, whole(input_ids=tokens_of(rank)).logits, kind)
        loss = loss_of(model, rank)
        loss.backward()
        close(loss, losses[rank], kind)
        compare_gradients(summed_gradients(model, size), whole, size)


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 4), (4, 2)])
def test_whole_models_compute_what_they_do_unsharded(ranks: Callable[[int], Ranks], world: int, size: int) -> None:
    kinds = ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss") if world == 2 else ("DeepseekV3", "GptOss")
    ranks(world).run(train_whole_models, kinds=kinds, size=size)
