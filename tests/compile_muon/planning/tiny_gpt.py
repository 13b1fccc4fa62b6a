"""What the tests of the planner plan, and on what: models by name. As a plan's MODEL: ``tiny_gpt:GPT``."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_muon.config import Config, FrameOptions, config_from_kwargs
from compile_muon.passes.costs import Link
from compile_muon.simulate.machine import load_machine

WIDTH = 48
TOKENS = torch.arange(16).reshape(2, 8)
#: where sending takes about as long as computing
SLOW = replace(load_machine("cpu"), cores=0, host_seconds={}, links=(Link(None, 1e9, 1e-6),))
OPTIONS = FrameOptions(codegen="eager", bucket_bytes=2**16)


def configured(stage: int, **settings: Any) -> Config:
    return config_from_kwargs(**{"stage": stage, "gradient_accumulation_steps": 1, "ns_method": "standard", **settings})


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """Returns its loss. Two layers are as few as have collectives of one under way while another is computed."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def one_layer() -> nn.Module:
    """For what depends on no second one: what takes time is tracing."""
    return GPT(1)


def on_meta() -> nn.Module:
    """Built as models for :func:`compile_muon.initialize` are."""
    with torch.device("meta"):
        return GPT()


def huge() -> nn.Module:
    """Does not fit into any machine that this runs on: 2.2 TB."""
    model = GPT(1)
    model.huge = nn.Parameter(torch.zeros(2**20, 2**19))
    return model


def no_module() -> int:
    """Forgot to return it."""
    return 3


def reads_values() -> nn.Module:
    """What no fake tensor can do."""
    model = GPT(1)
    if model.head.weight.sum() > 0:
        raise AssertionError("not reached")
    return model


class Broken(GPT):
    """Cannot run."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(tokens)
