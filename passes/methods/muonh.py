"""MuonH, or Hyperball: each matrix keeps its norm, and a step moves it by the share ``lr`` of that norm.

    W' = W - lr D |W| / max(|D|, eps),   W <- W' |W| / max(|W'|, eps)

No weight decay; the scale by shape cancels. A weight of zeros never moves. Each matrix of a stack has its own norm.
``|W'|^2 = |W|^2 - 2 a <W, D> + a^2 |D|^2`` with ``a = lr |W| / |D|``, so three facts are enough: <W, W>, <D, D>,
<W, D>, in code ``ww_N``, ``dd_N``, ``wd_N``.
"""

from typing import Any

import torch
from torch import Tensor

from .method import LR, MOMENTUM, After, MatrixMethod, Piece, Rate, summed


def _after(piece: Piece) -> After:
    w_NRC, d_NRC = piece.weight, piece.direction
    facts_NF = torch.stack([summed(x_NRC) for x_NRC in (w_NRC.square(), d_NRC.square(), w_NRC * d_NRC)], dim=-1)
    return After(d_NRC, facts=facts_NF)


def _finish(facts_NF: Tensor, keep: Any, move: Any, piece: Piece) -> tuple[Tensor, Tensor]:
    eps = piece.rates["eps"]
    ww_N, dd_N, wd_N = facts_NF.unbind(-1)
    radius_N = ww_N.sqrt()
    a_N = piece.rates["lr"] * radius_N / dd_N.sqrt().clamp(min=eps)
    # Clamped, because rounding may make a square that is nearly zero negative.
    moved_N = (ww_N - 2 * a_N * wd_N + a_N.square() * dd_N).clamp(min=0).sqrt()
    factor_N = radius_N / moved_N.clamp(min=eps)
    return factor_N, -a_N * factor_N


MUONH = MatrixMethod(
    "muonh",
    "github.com/KellerJordan/modded-nanogpt (track 3), github.com/marin-community/marin",
    (LR, MOMENTUM, Rate("eps", 1e-10, meaning="least norm that is divided by", positive=True)),
    after=_after,
    facts=3,
    finish=_finish,
)
