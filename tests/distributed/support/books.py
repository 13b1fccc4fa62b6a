"""Methods by the book: what papers say of one whole matrix, in torch alone; nothing of compile_muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AUXILIARIES", "BETA2", "BOOKS", "dion2", "muonbp", "soap"]

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


# ------------------------------------------------------------------------------- of gradients, step after step


def soap(weight: Tensor, gradients: list[Tensor], *, lr: float, decay: float, every: int, most: int = 10_000) -> Tensor:
    """arXiv 2409.11321, algorithm 3, and its authors' ``soap.py``: bias is corrected, columns of a basis are sorted,
    the first gradient only begins the bases. Decay is AdamW's."""
    b1 = b2 = torch.tensor(0.95)  # rates are fp32, and eigenvectors of a null space hang on the last bit
    sides = [n if n <= most else 0 for n in weight.shape]
    grams = [torch.zeros(n, n, dtype=weight.dtype) for n in sides]
    bases: list[Tensor] = []
    m, v, t = torch.zeros_like(weight), torch.zeros_like(weight), 0

    def project(x: Tensor, back: bool = False) -> Tensor:
        if sides[0]:
            x = (bases[0] if back else bases[0].T) @ x
        return x @ (bases[1].T if back else bases[1]) if sides[1] else x

    for g in gradients:
        weight = weight * (1 - lr * decay)
        if bases:
            t += 1
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * project(g) ** 2
            step = project(m) / (v.sqrt() + 1e-8)
            weight = weight - lr * math.sqrt(1 - b2**t) / (1 - b1**t) * project(step, back=True)
        for gram, outer in zip(grams, (g @ g.T, g.T @ g), strict=True):
            if gram.numel():
                gram.mul_(b2).add_((1 - b2) * outer)
        if not bases:
            bases = [torch.linalg.eigh(gram)[1].flip(1) if gram.numel() else gram for gram in grams]
        elif t % every == 0:
            for side, (gram, q) in enumerate(zip(grams, bases, strict=True)):
                if gram.numel():
                    order = (q.T @ gram @ q).diagonal().argsort(descending=True)
                    v = v.index_select(side, order)
                    bases[side] = torch.linalg.qr(gram @ q[:, order])[0]
    return weight


def muonbp(
    ns: NewtonSchulz, weight: Tensor, gradients: list[Tensor], *, lr: float, decay: float, momentum: float,
    period: int, factor: float, blocks: int,
) -> Tensor:  # fmt: skip
    """arXiv 2510.16981: every ``period`` steps the whole matrix, else its blocks of rows with a rate of their own."""
    m = torch.zeros_like(weight)
    for t, g in enumerate(gradients):
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g
        whole = t % period == 0
        parts = u[None] if whole else u.view(blocks, -1, u.shape[1])
        scale = 0.2 * math.sqrt(max(parts.shape[1:]))
        moved = ns(parts).reshape(u.shape) * scale * (1 if whole else factor)
        weight = weight * (1 - lr * decay) - lr * moved
    return weight


def dion2(
    ns: NewtonSchulz, weight: Tensor, gradients: list[Tensor], *, lr: float, decay: float, keep: float, fraction: float
) -> Tensor:
    """dion's ``dion2.py``, chosen from the whole matrix."""
    rows, cols = weight.shape
    m = torch.zeros_like(weight)
    for g in gradients:
        m = m + g
        side = 0 if rows <= cols else 1
        count = max(1, math.ceil(fraction * weight.shape[side]))
        chosen = m.abs().sum(1 - side).topk(count).indices
        o = ns(m.index_select(side, chosen)[None])[0]
        weight = weight * (1 - lr * decay)
        weight.index_add_(side, chosen, o, alpha=-lr * math.sqrt(rows / cols))
        m.index_copy_(side, chosen, keep * m.index_select(side, chosen))
    return weight


def muown(
    ns: NewtonSchulz, weight: Tensor, gradients: list[Tensor], *, lr: float, decay: float, momentum: float
) -> Tensor:
    """arXiv 2605.10797, and ``muown.py`` of Emerging-Optimizers."""
    b1, b2 = 0.9, 0.95
    gain = length = weight.norm(dim=1, keepdim=True).clamp(min=1e-12)
    momenta, m, v = torch.zeros_like(weight), torch.zeros_like(gain), torch.zeros_like(gain)
    for t, g in enumerate(gradients, 1):
        unit = weight / gain
        along = (g * unit).sum(1, keepdim=True)
        momenta = momentum * momenta + (1 - momentum) * gain / length * (g - unit * along)
        direction = unit * length - lr * 0.2 * math.sqrt(max(weight.shape)) * ns(momenta[None])[0]
        m, v = b1 * m + (1 - b1) * along, b2 * v + (1 - b2) * along**2
        gain = gain - lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)
        gain = gain * (1 - lr * decay)
        length = direction.norm(dim=1, keepdim=True)
        weight = gain * direction / length
    return weight


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
