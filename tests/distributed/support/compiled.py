"""What tests of one process train compiled, and beside it: a small net, and Muon by its formulas."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.config import Config
from compile_muon.kernels import newton_schulz
from support.reference import decayed_apart

EAGER = {"codegen": "eager"}
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two hidden matrices and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Pair(nn.Module):
    """Two models in one frame, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(), Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) - self.right(2 * x)


class Words(nn.Module):
    """Three hidden matrices between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.q, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + self.q(h)
        return self.head(self.norm(h + self.down(self.up(h).relu())))


def loss_of_words(run: Callable[[Tensor], Tensor]) -> Tensor:
    tokens = torch.arange(24).view(4, 6) % 12
    return nn.functional.cross_entropy(run(tokens).flatten(0, 1), (tokens * 5 % 12).flatten())


class Plain:
    """Unsharded and eager, ``model`` in place: formulas of Muon in float32 for ``muon``, torch's AdamW for others."""

    def __init__(self, model: nn.Module, config: Config, muon: Collection[str] = ("a.weight", "b.weight")) -> None:
        self.model = self.run = model
        self.config = config.muon
        named = dict(model.named_parameters())
        self.matrices = [named[name] for name in muon]
        self.buffers = [torch.zeros_like(p) for p in self.matrices]
        rest = [p for name, p in named.items() if name not in muon and p.requires_grad]
        adamw: Any = config.adamw
        self.adamw = torch.optim.AdamW(
            decayed_apart(rest), lr=adamw.lr, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        lr, momentum, decay = self.config.lr, self.config.momentum, self.config.weight_decay
        for p, buffer in zip(self.matrices, self.buffers, strict=True):
            if p.grad is None:
                continue
            buffer.lerp_(p.grad, 1 - momentum)
            update = newton_schulz(p.grad.lerp(buffer, momentum), dtype="float32", method="standard")
            p.mul_(1 - lr * decay).add_(update, alpha=-lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
        self.adamw.step()
        return loss

    def set_momentum(self, value: float) -> None:
        self.config = dataclasses.replace(self.config, momentum=value)
