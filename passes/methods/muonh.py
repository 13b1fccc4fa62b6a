"""MuonH, or Hyperball: each matrix keeps its norm, and a step moves it by the share ``lr`` of that norm.

    W' = W - lr D |W| / max(|D|, eps),   W <- W' |W| / max(|W'|, eps)

No weight decay; the scale by shape cancels. A weight of zeros never moves. Each matrix of a stack has its own norm.
``|W'|^2 = |W|^2 - 2 a <W, D> + a^2 |D|^2`` with ``a = lr |W| / |D|``, so three facts of a matrix are enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .method import LR, MOMENTUM, After, MatrixMethod, Piece, Rate, summed

__all__ = ["MUONH"]


def _after(piece: Piece) -> After:
    weight, direction = piece.weight, piece.direction
    facts = [summed(x) for x in (weight.square(), direction.square(), weight * direction)]
    return After(direction, facts=torch.stack(facts, dim=-1))


def _finish(facts: Tensor, keep: Any, move: Any, piece: Piece) -> tuple[Tensor, Tensor]:
    eps = piece.rates["eps"]
    weight, direction, both = facts.unbind(-1)
    radius = weight.sqrt()
    share = piece.rates["lr"] * radius / direction.sqrt().clamp(min=eps)
    # Clamped, because rounding may make a square that is nearly zero negative.
    moved = (weight - 2 * share * both + share.square() * direction).clamp(min=0).sqrt()
    factor = radius / moved.clamp(min=eps)
    return factor, -share * factor


MUONH = MatrixMethod(
    "muonh",
    "github.com/KellerJordan/modded-nanogpt (track 3), github.com/marin-community/marin",
    (LR, MOMENTUM, Rate("eps", 1e-10, meaning="least norm that is divided by", positive=True)),
    after=_after,
    facts=3,
    finish=_finish,
)
