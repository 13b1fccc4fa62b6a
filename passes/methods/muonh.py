"""MuonH, or Hyperball: each matrix keeps its norm, and a step moves it by the share ``lr`` of that norm.

    W' = W - lr D |W| / max(|D|, eps),   W <- W' |W| / max(|W'|, eps)

No weight decay; the scale by shape cancels. A weight of zeros never moves. Each matrix of a stack has its own norm.
``|W'|^2 = |W|^2 - 2 a <W, D> + a^2 |D|^2`` with ``a = lr |W| / |D|``, so three facts are enough: <W, W>, <D, D>,
<W, D>, in code ``ww``, ``dd``, ``wd``.
"""

from typing import Any

import torch
from torch import Tensor

from .method import LR, MOMENTUM, After, MatrixMethod, Piece, Rate, summed


def _after(piece: Piece) -> After:
    w, d = piece.weight, piece.direction
    facts = [summed(x) for x in (w.square(), d.square(), w * d)]
    return After(d, facts=torch.stack(facts, dim=-1))


def _finish(facts: Tensor, keep: Any, move: Any, piece: Piece) -> tuple[Tensor, Tensor]:
    eps = piece.rates["eps"]
    ww, dd, wd = facts.unbind(-1)
    radius = ww.sqrt()
    a = piece.rates["lr"] * radius / dd.sqrt().clamp(min=eps)
    # Clamped, because rounding may make a square that is nearly zero negative.
    moved = (ww - 2 * a * wd + a.square() * dd).clamp(min=0).sqrt()
    factor = radius / moved.clamp(min=eps)
    return factor, -a * factor


MUONH = MatrixMethod(
    "muonh",
    "github.com/KellerJordan/modded-nanogpt (track 3), github.com/marin-community/marin",
    (LR, MOMENTUM, Rate("eps", 1e-10, meaning="least norm that is divided by", positive=True)),
    after=_after,
    facts=3,
    finish=_finish,
)
