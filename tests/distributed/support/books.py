"""Methods by the book: what papers say of one whole matrix, in torch alone; nothing of compile_muon.

A book is ``(newton_schulz, weight, steps, decay) -> weight``; a step has its gradient, lr and momentum.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """The gradient of a whole matrix, and rates."""

    gradient: Tensor
    lr: float
    momentum: float


NewtonSchulz = Callable[[Tensor], Tensor]
Book = Callable[[NewtonSchulz, Tensor, Sequence[Step], float], Tensor]
#: (newton_schulz, update, weight, states, lr, decay) -> weight
Write = Callable[[NewtonSchulz, Tensor, Tensor, dict[str, Any], float, float], Tensor]


def by_updates(write: Write, heavy: bool = False) -> Book:
    """Momenta are a moving average, or a heavy ball's sum, with Nesterov's look ahead."""

    def book(ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float) -> Tensor:
        m, states = torch.zeros_like(weight), dict[str, Any]()
        for g, lr, momentum in steps:
            g = g if heavy else (1 - momentum) * g
            m = momentum * m + g
            weight = write(ns, momentum * m + g, weight, states, lr, decay)
        return weight

    return book


def _original(x: Tensor) -> float:
    return math.sqrt(max(1, x.shape[-2] / x.shape[-1]))


def muon(ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float) -> Tensor:
    return (1 - lr * decay) * w - lr * _original(w) * ns(u)


def cautious(ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float) -> Tensor:
    """arXiv 2510.12402."""
    d = ns(u)
    return w - lr * decay * w * (d * w >= 0) - lr * _original(w) * d


def normuon(
    ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float, *, beta2: float
) -> Tensor:
    """arXiv 2510.05491, algorithm 1."""
    o = ns(u)
    v = state.setdefault("v", torch.zeros_like(o[:, :1]))
    v.mul_(beta2).add_((1 - beta2) * o.square().mean(-1, keepdim=True))
    p = o / (v.sqrt() + 1e-10)
    return (1 - lr * decay) * w - lr * _original(w) * p * o.norm() / (p.norm() + 1e-10)


def adamuon(
    ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float, *, beta2: float
) -> Tensor:
    """arXiv 2507.11005, third version."""
    o = ns(u.sign())
    v = state.setdefault("v", torch.zeros_like(o))
    v.mul_(beta2).add_((1 - beta2) * o.square())
    p = o / (v.sqrt() + 1e-8)
    return (1 - lr * decay) * w - lr * 0.2 * math.sqrt(w.numel()) * p / (p.norm() + 1e-8)


def muonh(ns: NewtonSchulz, u: Tensor, w: Tensor, state: dict[str, Any], lr: float, decay: float) -> Tensor:
    """Marin's ``scale_invariant_hyperball_updates``."""
    d, radius = ns(u), w.norm()
    moved = w - lr * d * radius / d.norm().clamp(min=1e-10)
    return moved * radius / moved.norm().clamp(min=1e-10)


def soap(
    ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float, *, every: int, most: int = 10_000
) -> Tensor:
    """arXiv 2409.11321, algorithm 3, and its authors' ``soap.py``: bias is corrected, columns of a basis are sorted,
    the first gradient only begins the bases. Decay is AdamW's; what has no energy completes a basis."""
    b1 = b2 = 0.95
    sides = [n if n <= most else 0 for n in weight.shape]
    grams = [torch.zeros(n, n, dtype=weight.dtype) for n in sides]
    bases: list[Tensor] = []
    m, v, t = torch.zeros_like(weight), torch.zeros_like(weight), 0

    def project(x: Tensor, back: bool = False) -> Tensor:
        if sides[0]:
            x = (bases[0] if back else bases[0].T) @ x
        return x @ (bases[1].T if back else bases[1]) if sides[1] else x

    def basis(vectors: Tensor, energy: Tensor) -> Tensor:
        vectors = vectors * (energy > energy.max() * len(energy) * torch.finfo(energy.dtype).eps)
        return torch.linalg.qr(vectors)[0]

    for g, lr, _ in steps:
        if bases:
            t += 1
            weight = weight * (1 - lr * decay)
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * project(g) ** 2
            step = project(m) / (v.sqrt() + 1e-8)
            weight = weight - lr * math.sqrt(1 - b2**t) / (1 - b1**t) * project(step, back=True)
        for gram, outer in zip(grams, (g @ g.T, g.T @ g), strict=True):
            if gram.numel():
                gram.mul_(b2).add_((1 - b2) * outer)
        if not bases:
            pairs = [torch.linalg.eigh(gram) for gram in grams]
            bases = [basis(q.flip(1), e.flip(0)) if e.numel() else q for e, q in pairs]
        elif t % every == 0:
            for side, (gram, q) in enumerate(zip(grams, bases, strict=True)):
                if gram.numel():
                    energy, order = (q.T @ gram @ q).diagonal().sort(descending=True)
                    v = v.index_select(side, order)
                    bases[side] = basis(gram @ q[:, order], energy)
    return weight


def muonbp(
    ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float, *, period: int, factor: float, blocks: int
) -> Tensor:
    """arXiv 2510.16981: every ``period`` steps the whole matrix, else its blocks of rows with a rate of their own."""
    m = torch.zeros_like(weight)
    for t, (g, lr, momentum) in enumerate(steps):
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g
        whole = t % period == 0
        parts = u[None] if whole else u.view(blocks, -1, u.shape[1])
        scale = 0.2 * math.sqrt(max(parts.shape[1:]))
        moved = ns(parts).reshape(u.shape) * scale * (1 if whole else factor)
        weight = weight * (1 - lr * decay) - lr * moved
    return weight


def dion2(ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float, *, fraction: float) -> Tensor:
    """dion's ``dion2.py``, chosen from the whole matrix."""
    rows, cols = weight.shape
    m = torch.zeros_like(weight)
    for g, lr, keep in steps:
        m = m + g
        side = 0 if rows <= cols else 1
        count = max(1, math.ceil(fraction * weight.shape[side]))
        chosen = m.abs().sum(1 - side).topk(count).indices
        o = ns(m.index_select(side, chosen))
        weight = weight * (1 - lr * decay)
        weight.index_add_(side, chosen, o, alpha=-lr * math.sqrt(rows / cols))
        m.index_copy_(side, chosen, keep * m.index_select(side, chosen))
    return weight


def muown(ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float) -> Tensor:
    """arXiv 2605.10797, and ``muown.py`` of Emerging-Optimizers."""
    b1, b2 = 0.9, 0.95
    gain = length = weight.norm(dim=1, keepdim=True).clamp(min=1e-12)
    momenta, m, v = torch.zeros_like(weight), torch.zeros_like(gain), torch.zeros_like(gain)
    for t, (g, lr, momentum) in enumerate(steps, 1):
        unit = weight / gain
        along = (g * unit).sum(1, keepdim=True)
        momenta = momentum * momenta + (1 - momentum) * gain / length * (g - unit * along)
        direction = unit * length - lr * 0.2 * math.sqrt(max(weight.shape)) * ns(momenta)
        m, v = b1 * m + (1 - b1) * along, b2 * v + (1 - b2) * along**2
        gain = gain - lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)
        gain = gain * (1 - lr * decay)
        length = direction.norm(dim=1, keepdim=True)
        weight = gain * direction / length
    return weight


def adamw(
    ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float, *, eps: float, careful: bool = False
) -> Tensor:
    """``careful``: decay is masked, arXiv 2510.12402."""
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, (g, lr, _) in enumerate(steps, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        update = m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + eps)
        keep = (update * weight >= 0) if careful else 1
        weight = weight - lr * (update + decay * weight * keep)
    return weight


def lion(ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float) -> Tensor:
    """arXiv 2302.06675, algorithm 2."""
    m = torch.zeros_like(weight)
    for g, lr, _ in steps:
        weight = weight - lr * ((0.9 * m + 0.1 * g).sign() + decay * weight)
        m = 0.99 * m + 0.01 * g
    return weight
