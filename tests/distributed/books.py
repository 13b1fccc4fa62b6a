"""Methods by the book: what papers say of one whole matrix, in torch alone; nothing of compile_muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AUXILIARIES", "BETA2", "BOOKS"]

BETA2 = 0.9

#: (update, matrices, states, lr, decay) -> matrices; all ``[batch, rows, cols]``
Write = Callable[[Tensor, Tensor, dict[str, Any], float, float], Tensor]
NewtonSchulz = Callable[[Tensor], Tensor]


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1), keepdim=True).sqrt()


def _original(x: Tensor) -> float:
    return math.sqrt(max(1, x.shape[-2] / x.shape[-1]))


def muon(ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float) -> Tensor:
    return (1 - lr * decay) * w - lr * _original(w) * ns(u)


def cautious(ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float) -> Tensor:
    """arXiv 2510.12402."""
    d = ns(u)
    return w - lr * decay * w * (d * w >= 0) - lr * _original(w) * d


def normuon(ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float) -> Tensor:
    """arXiv 2510.05491, algorithm 1."""
    o = ns(u)
    v = state.setdefault("v", torch.zeros_like(o[..., :1]))
    v.mul_(BETA2).add_((1 - BETA2) * o.square().mean(-1, keepdim=True))
    p = o / (v.sqrt() + 1e-10)
    return (1 - lr * decay) * w - lr * _original(w) * p * _norm(o) / (_norm(p) + 1e-10)


def adamuon(ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float) -> Tensor:
    """arXiv 2507.11005, third version."""
    o = ns(u.sign())
    v = state.setdefault("v", torch.zeros_like(o))
    v.mul_(BETA2).add_((1 - BETA2) * o.square())
    p = o / (v.sqrt() + 1e-8)
    return (1 - lr * decay) * w - lr * 0.2 * math.sqrt(w.shape[-2] * w.shape[-1]) * p / (_norm(p) + 1e-8)


def muonh(ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float) -> Tensor:
    """Marin's ``scale_invariant_hyperball_updates``."""
    d, radius = ns(u), _norm(w)
    moved = w - lr * d * radius / _norm(d).clamp(min=1e-10)
    return moved * radius / _norm(moved).clamp(min=1e-10)


#: by method; heavy ball has another momentum (:class:`reference.Reference`)
BOOKS: dict[str, Callable[..., Tensor]] = {
    "muon": muon,
    "normuon": normuon,
    "adamuon": adamuon,
    "muonh": muonh,
    "heavy_ball": muon,
    "cautious": cautious,
}


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, algorithm 2."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    near, far = group["betas"]
                    update = (near * m + (1 - near) * p.grad).sign() + group["weight_decay"] * p
                    p.sub_(group["lr"] * update)
                    m.mul_(far).add_((1 - far) * p.grad)


class CautiousAdamW(torch.optim.Optimizer):
    """AdamW whose decay is masked, arXiv 2510.12402."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            near, far = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    m, v = (state.setdefault(name, torch.zeros_like(p)) for name in "mv")
                    state["t"] = state.get("t", 0) + 1
                    m.mul_(near).add_((1 - near) * p.grad)
                    v.mul_(far).add_((1 - far) * p.grad.square())
                    update = m / (1 - near ** state["t"]) / ((v / (1 - far ** state["t"])).sqrt() + group["eps"])
                    decay = group["weight_decay"] * p * (update * p >= 0)
                    p.sub_(group["lr"] * (update + decay))


AUXILIARIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "cautious": CautiousAdamW,
}
