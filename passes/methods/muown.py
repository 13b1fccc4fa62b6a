"""Muown: trains a gain of each row by Adam, and the rows' directions by Muon.

    W = g V / |V|,   u = W / g,   dg = <G, u>,   dV = (g / |V|) (G - dg u)      by rows
    M <- b M + (1 - b) dV,   V <- V - lr scale NewtonSchulz(M)
    g <- (1 - lr weight_decay) (g - lr Adam(dg)),   W <- g V / |V|

As in NVIDIA's Emerging-Optimizers, without Nesterov's look ahead. V is not stored: it is ``u`` times the stored norm.
The size of a gain is always the norm of its row of W, so it follows other writes to weights (MuonClip, a load); of the
stored gain only the sign is read, which is positive at first. In code ``gw`` is <G, W> by rows, and so on.
"""

import torch
from torch import Tensor

from .method import DECAY, LR, MOMENTUM, STEP, After, MatrixMethod, Piece, Rate, State

#: smallest norm that is divided by
_LEAST = 1e-12


def _gain(squares: Tensor, piece: Piece) -> Tensor:
    """Return the gains of rows of W that have these sums of squares."""
    magnitude = squares.sqrt().clamp(min=_LEAST)
    return torch.where(piece.states["gain"] < 0, -magnitude, magnitude)


def _norm(gain: Tensor, piece: Piece) -> Tensor:
    """Return the norms of the rows of V, which begin as the rows of W."""
    stored = piece.states["direction_norm"].to(gain.dtype)
    return torch.where(stored == 0, gain, stored)


def _project_sums(grad: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([(grad * weight).sum(-1), weight.square().sum(-1)], dim=-1)


def _project(piece: Piece) -> Tensor:
    assert piece.sums is not None
    gw, ww = piece.sums.split(1, dim=-1)
    gain = _gain(ww, piece)
    return gain / _norm(gain, piece) * (piece.grad - piece.weight * (gw / gain.square()))


def _row_sums(direction: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([weight.square().sum(-1), (weight * direction).sum(-1), direction.square().sum(-1)], dim=-1)


def _after(piece: Piece) -> After:
    assert piece.sums is not None and piece.projected is not None
    ww, wd, dd = piece.sums.split(1, dim=-1)
    gw, ww_projected = piece.projected.to(piece.direction.dtype).split(1, dim=-1)
    rates, states, gain = piece.rates, piece.states, _gain(ww, piece)
    lr, beta1, beta2 = rates["lr"], rates["beta1"], rates["beta2"]
    gain_grad = gw / _gain(ww_projected, piece)
    mean = states["gain_first_moment"].to(gain_grad.dtype).lerp(gain_grad, 1 - beta1)
    square = states["gain_second_moment"].to(gain_grad.dtype).lerp(gain_grad.square(), 1 - beta2)
    unbiased = mean / (1 - beta1 ** rates["step"])
    step = unbiased / ((square / (1 - beta2 ** rates["step"])).sqrt() + rates["eps"])
    new_gain = (1 - lr * rates["weight_decay"]) * (gain - lr * step)
    ratio, move = _norm(gain, piece) / gain, -(lr * piece.scale)  # V = ratio W, and V moves by ``move`` D
    new_norm = (ww * ratio.square() + 2 * ratio * move * wd + dd * (move * move)).clamp(min=_LEAST**2).sqrt()
    new_states = {"gain": new_gain, "direction_norm": new_norm, "gain_first_moment": mean, "gain_second_moment": square}
    return After(piece.direction * (new_gain / new_norm), new_states, keep=ratio * new_gain / new_norm)


MUOWN = MatrixMethod(
    "muown",
    "arXiv 2605.10797, github.com/NVIDIA-NeMo/Emerging-Optimizers",
    (
        LR,
        MOMENTUM,
        DECAY[0],
        STEP,
        Rate("beta1", 0.9, meaning="factor of the average of gradients of gains", below=1.0),
        Rate("beta2", 0.95, meaning="factor of the average of their squares", below=1.0),
        Rate("eps", 1e-8, meaning="added to its root", positive=True),
    ),
    (
        State("gain", "gain of rows", each="row"),
        State("direction_norm", "norm of rows of directions", each="row"),
        State("gain_first_moment", "first moment of gains", each="row"),
        State("gain_second_moment", "second moment of gains", each="row"),
    ),
    adjust_lr="match_rms_adamw",
    nesterov=False,
    project=_project,
    project_sums=_project_sums,
    row_sums=_row_sums,
    after=_after,
)
