"""Models nobody here wrote train like their unsharded selves: GPT-2, Llama and Mixtral of Hugging Face, a conv net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Ranks
from reference import Matrices, Report, hidden_matrices, train
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 3
VOCABULARY = 64


def tokens(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, 12), generator=generator)


def causal_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def images(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, attn_implementation="sdpa",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=16, use_cache=False,
        attn_implementation="eager", experts_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 9, 3, stride=2, groups=3),
        nn.ReLU(),
        nn.ConvTranspose2d(9, 4, 2, bias=False),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "convnet": convnet}


def _matrices(name: str, model: nn.Module) -> Matrices:
    if name == "convnet":
        return hidden_matrices(model, exclude=("7.",))
    return hidden_matrices(model, exclude=("wte", "wpe", "embed", "lm_head"), stacks=("experts.",))


def train_model(name: str, **settings: Any) -> Report:
    torch.manual_seed(0)
    model = MODELS[name]()
    loss, data = (classification_loss, images) if name == "convnet" else (causal_loss, tokens)
    # A router's gradient has rank experts - 1 (softmax ignores a shift of all logits): its smallest singular value is
    # rounding noise, which Newton-Schulz magnifies nearly 500 times. So its tolerance is measured.
    noisy = name == "mixtral"
    return train(model, _matrices(name, model), loss, data, steps=STEPS, measure_noise=noisy, **settings)


def check(group: Ranks, name: str, **settings: Any) -> None:
    for rank, report in enumerate(group.run(train_model, name=name, **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


@pytest.mark.parametrize(
    ("name", "stage", "update", "micro"),
    [
        ("gpt2", 0, "auto", 1),
        ("gpt2", 2, "step", 2),
        ("llama", 3, "auto", 1),
        ("mixtral", 1, "step", 1),
        ("mixtral", 3, "auto", 2),
        ("convnet", 1, "auto", 2),
        ("convnet", 2, "step", 1),
    ],
)
def test_two_ranks(ranks: Callable[[int], Ranks], name: str, stage: int, update: str, micro: int) -> None:
    check(ranks(2), name, stage=stage, update=update, gradient_accumulation_steps=micro)


@pytest.mark.parametrize(("name", "stage"), [("gpt2", 3), ("llama", 1)])
def test_two_ranks_inductor(ranks: Callable[[int], Ranks], name: str, stage: int) -> None:
    check(ranks(2), name, stage=stage, codegen="inductor")


def test_uneven_world(ranks: Callable[[int], Ranks]) -> None:
    check(ranks(3), "convnet", stage=3, gradient_accumulation_steps=2)
