"""Models that distributed tests train, each with what its training needs to be compared with a reference.

GPT-2, Llama and Mixtral of Hugging Face, a conv net, and a small GPT with fused attention and, if asked for, dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.reference import Matrices, hidden_matrices

VOCABULARY = 64


class Uneven(nn.Module):
    """Uneven shards (9 rows), empty ones (1 row), a scalar, a tie and buffers."""

    def __init__(self, rows: int = 9) -> None:
        super().__init__()
        self.up = nn.Linear(6, rows)
        self.norm = nn.BatchNorm1d(rows)
        self.thin = nn.Linear(rows, 1)
        self.down = nn.Linear(1, 6, bias=False)
        self.head = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(torch.tanh(self.norm(self.up(x))))
        return self.tied(torch.tanh(self.head(self.down(self.thin(h)) * self.scale)))

    def hidden(self, h: Tensor) -> Tensor:
        """What a test puts behind the first layer."""
        return h


def _generator(step: int, micro: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)


def _tokens(step: int, micro: int, rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 12), generator=_generator(step, micro, rank))


def _images(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = _generator(step, micro, rank)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def _hugging_face_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def _causal_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def _seeded_causal_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The random numbers a model draws follow from its batch: any two models draw the same."""
    torch.manual_seed(int(batch.sum()))
    return _causal_loss(model, batch)


def _classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo. ``build``: makes it; weights come from the global generator. ``blocks``: modules one would
    checkpoint. ``exclude``, ``stacks``: parameters that Muon does not train, and stacks of matrices. ``loss``,
    ``data``: as :func:`reference.train` takes them. ``noisy``: rounding noise exceeds the usual tolerance: measure
    it."""

    build: Callable[[], nn.Module]
    blocks: Callable[[Any], list[nn.Module]]
    exclude: tuple[str, ...] = ("wte", "wpe", "embed", "lm_head")
    stacks: tuple[str, ...] = ()
    loss: Callable[[nn.Module, Any], Tensor] = _hugging_face_loss
    data: Callable[[int, int, int], Any] = _tokens
    noisy: bool = False

    def matrices(self, model: nn.Module) -> Matrices:
        """Who gets Muon in ``model``."""
        return hidden_matrices(model, exclude=self.exclude, stacks=self.stacks)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, attn_implementation="sdpa",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=16, use_cache=False,
        attn_implementation="eager", experts_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 9, 3, stride=2, groups=3), nn.ReLU(),
        nn.ConvTranspose2d(9, 4, 2, bias=False), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class _GPT(nn.Module):
    """Tied embedding and head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(12, 32)
        self.blocks = nn.ModuleList(_Block(32, 2, dropout) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


_gpt = ZooModel(_GPT, lambda model: list(model.blocks), ("embed", "positions", "lm_head"), loss=_causal_loss)

ZOO: dict[str, ZooModel] = {
    "gpt2": ZooModel(_gpt2, lambda model: list(model.transformer.h)),
    "llama": ZooModel(_llama, lambda model: list(model.model.layers)),
    # A router's gradient has rank experts - 1 (softmax ignores a shift of all logits): its smallest singular value is
    # rounding noise, which Newton-Schulz magnifies nearly 500 times.
    "mixtral": ZooModel(_mixtral, lambda model: list(model.model.layers), stacks=("experts.",), noisy=True),
    "convnet": ZooModel(
        _convnet, lambda model: [model[0], model[3], model[5]], ("7.",), loss=_classification_loss, data=_images
    ),
    "gpt": _gpt,
    "gpt-dropout": replace(_gpt, build=lambda: _GPT(dropout=0.2), loss=_seeded_causal_loss),
}
