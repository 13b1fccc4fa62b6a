"""The model and the data of the benchmark: a byte-level GPT over this Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True)
class Shape:
    """The size of the model and of one rank's batch; a rank takes `context * batch` tokens a step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int = VOCABULARY
    tied: bool = False  # the head is the token embedding, as in GPT-2


PRESETS = {
    "1b": Shape(layers=20, width=2048, heads=16, context=1024, batch=8),  # for one GPU: 1.01 G parameters
    "1b-65k": Shape(layers=20, width=2048, heads=16, context=1024, batch=64),  # a usual number of tokens a step
    "full": Shape(layers=12, width=256, heads=8, context=512, batch=16),
    "medium": Shape(layers=6, width=384, heads=6, context=256, batch=2),
    "small": Shape(layers=4, width=256, heads=8, context=256, batch=4),
    "mini": Shape(layers=2, width=128, heads=4, context=128, batch=4),
    "tiny": Shape(layers=2, width=64, heads=4, context=64, batch=4),
}


def shape_of(preset: str, layers: int | None = None) -> Shape:
    """Return the shape of a preset, with another number of layers if given."""
    shape = PRESETS[preset]
    return shape if layers is None else replace(shape, layers=layers)


class Block(nn.Module):
    """A block: pre-norm attention and MLP, without biases in the linear layers."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """A GPT: `model(tokens, targets)` is the mean cross entropy; both are int64 of shape [batch, context]."""

    def __init__(self, shape: Shape):
        super().__init__()
        # DeepSpeed assigns AdamW by the substrings "embed" and "lm_head" of names: with these names every contender
        # gives Muon the same matrices.
        self.token_embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embed = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.token_embed.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, context, vocabulary] in the dtype of the weights."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embed(tokens) + self.position_embed(positions)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def fresh(shape: Shape, device: torch.device) -> GPT:
    """Build the model on the device that trains it."""
    with device:  # one core would draw a billion weights for longer than they are trained
        return GPT(shape)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def muon_names(model: nn.Module) -> list[str]:
    """List the hidden matrices: exactly those that every Muon contender must give to Muon."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and "embed" not in name and "lm_head" not in name
    ]


def read_corpus(limit: int = 4 << 20, files: Iterable[Path] | None = None) -> Tensor:
    """Read the first `limit` bytes of files as uint8; by default the standard library's sources in name order."""
    text = bytearray()
    for path in sorted(STANDARD_LIBRARY.glob("*.py")) if files is None else files:
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def sample_batch(corpus: Tensor, shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random windows: tokens and the targets one byte ahead, both [batch, context] int64."""
    starts = torch.randint(len(corpus) - shape.context - 1, (shape.batch,), generator=generator)
    windows = torch.stack([corpus[start : start + shape.context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def training(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Iterator[Tensor]:
    """Train a step on each batch, and yield its loss, detached, on the model's device."""
    for tokens, targets in batches:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        yield loss.detach()


def losses_of(
    model: nn.Module,
    shape: Shape,
    optimizer: torch.optim.Optimizer,
    steps: int,
    seed: int,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """Train on the corpus, with `seed` for the batches; return the loss of every step, in nats a byte."""
    corpus, generator = read_corpus(), torch.Generator().manual_seed(seed)
    batches = (sample_batch(corpus, shape, generator) for _ in range(steps))
    return [loss.item() for loss in training(model, batches, optimizer, schedule)]
