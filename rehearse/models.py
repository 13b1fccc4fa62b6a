"""The models that are rehearsed, by name: the example's small GPT, and transformers that fill a GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = "small"


@dataclass(frozen=True)
class Shape:
    """A transformer and its micro-batch on a rank."""

    layers: int
    width: int
    hidden: int  # width inside an MLP
    heads: int
    kv_heads: int
    vocabulary: int
    gated: bool  # MLPs as in Llama, or else with a GELU as in GPT
    batch: int
    context: int


SHAPES = {
    "GPT 1 B": Shape(20, 2048, 8192, 16, 16, 50304, False, 8, 2048),
    "Llama 1 B": Shape(16, 2048, 8192, 32, 8, 128256, True, 2, 4096),
    "Llama 8 B": Shape(32, 4096, 14336, 32, 8, 128256, True, 1, 8192),
}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, head = shape, shape.width // shape.heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * head, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, (1 + shape.gated) * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (shape.heads + 2 * shape.kv_heads, -1)).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = self.up(self.norm_mlp(x))
        if shape.gated:
            gate, value = hidden.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * value)
        return x + self.down(F.gelu(hidden))


class Transformer(nn.Module):
    """A transformer of four parts, between which its graph breaks if it has four ``frames``."""

    def __init__(self, shape: Shape, frames: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.parts = nn.ModuleList(nn.Sequential(*(Block(shape) for _ in range(shape.layers // 4))) for _ in range(4))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.breaks, self.upcasts = frames == 4, shape.gated  # Transformers' loss is float32

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.parts[0](self.embed(tokens))  # Dynamo compiles no frame that breaks inside a loop
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.parts[1](x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.parts[2](x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.parts[3](x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float() if self.upcasts else logits, targets.flatten())


def model_of(name: str, frames: int = 1) -> nn.Module:
    """Return the model of this name with its weights on the GPU."""
    with torch.device("cuda"):  # never written to, so its pages take no host memory
        if name in SHAPES:
            return Transformer(SHAPES[name], frames)
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
        from train_gpt import GPT

        return GPT(layers=4, width=512, context=256)


def batch_of(name: str) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a micro-batch."""
    shape = SHAPES.get(name)
    vocabulary, *size = (256, 4, 256) if shape is None else (shape.vocabulary, shape.batch, shape.context)
    return tuple(torch.randint(vocabulary, size, device="cuda") for _ in range(2))  # type: ignore[return-value]
