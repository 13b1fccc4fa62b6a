"""Muown: trains a gain of each row by Adam, and the rows' directions by Muon.

    W = g V / |V|,   u = W / g,   dg = <G, u>,   dV = (g / |V|) (G - dg u)      by rows
    M <- b M + (1 - b) dV,   V <- V - lr scale NewtonSchulz(M)
    g <- (1 - lr weight_decay) (g - lr Adam(dg)),   W <- g V / |V|

As in NVIDIA's Emerging-Optimizers, without Nesterov's look ahead. V is not stored: it is ``u`` times the stored norm.
The size of a gain is always the norm of its row of W, so it follows other writes to weights (MuonClip, a load); of the
stored gain only the sign is read, which is positive at first. In code ``gw_NR1`` is <G, W> by rows, and so on.
"""

import torch
from torch import Tensor

from .method import DECAY, LR, MOMENTUM, STEP, After, MatrixMethod, Piece, Rate, State

#: smallest norm that is divided by
_LEAST = 1e-12


def _gain(squares_NR1: Tensor, piece: Piece) -> Tensor:
    """Return the gains of rows of W that have these sums of squares."""
    magnitude_NR1 = squares_NR1.sqrt().clamp(min=_LEAST)
    return torch.where(piece.states["gain"] < 0, -magnitude_NR1, magnitude_NR1)


def _norm(gain_NR1: Tensor, piece: Piece) -> Tensor:
    """Return the norms of the rows of V, which begin as the rows of W."""
    stored_NR1 = piece.states["direction_norm"].to(gain_NR1.dtype)
    return torch.where(stored_NR1 == 0, gain_NR1, stored_NR1)


def _project_sums(grad_NRC: Tensor, weight_NRC: Tensor) -> Tensor:
    return torch.stack([(grad_NRC * weight_NRC).sum(-1), weight_NRC.square().sum(-1)], dim=-1)


def _project(piece: Piece) -> Tensor:
    assert piece.sums is not None
    gw_NR1, ww_NR1 = piece.sums.split(1, dim=-1)
    gain_NR1 = _gain(ww_NR1, piece)
    return gain_NR1 / _norm(gain_NR1, piece) * (piece.grad - piece.weight * (gw_NR1 / gain_NR1.square()))


def _row_sums(direction_NRC: Tensor, weight_NRC: Tensor) -> Tensor:
    ww_NR, wd_NR = weight_NRC.square().sum(-1), (weight_NRC * direction_NRC).sum(-1)
    return torch.stack([ww_NR, wd_NR, direction_NRC.square().sum(-1)], dim=-1)


def _after(piece: Piece) -> After:
    assert piece.sums is not None and piece.projected is not None
    ww_NR1, wd_NR1, dd_NR1 = piece.sums.split(1, dim=-1)
    gw_NR1, ww_projected_NR1 = piece.projected.to(piece.direction.dtype).split(1, dim=-1)
    rates, states, gain_NR1 = piece.rates, piece.states, _gain(ww_NR1, piece)
    lr, beta1, beta2 = rates["lr"], rates["beta1"], rates["beta2"]
    grad_NR1 = gw_NR1 / _gain(ww_projected_NR1, piece)
    mean_NR1 = states["gain_first_moment"].to(grad_NR1.dtype).lerp(grad_NR1, 1 - beta1)
    square_NR1 = states["gain_second_moment"].to(grad_NR1.dtype).lerp(grad_NR1.square(), 1 - beta2)
    unbiased_NR1 = mean_NR1 / (1 - beta1 ** rates["step"])
    step_NR1 = unbiased_NR1 / ((square_NR1 / (1 - beta2 ** rates["step"])).sqrt() + rates["eps"])
    new_gain_NR1 = (1 - lr * rates["weight_decay"]) * (gain_NR1 - lr * step_NR1)
    # V = ratio W, and V moves by ``move`` D.
    ratio_NR1, move = _norm(gain_NR1, piece) / gain_NR1, -(lr * piece.scale)
    new_square_NR1 = ww_NR1 * ratio_NR1.square() + 2 * ratio_NR1 * move * wd_NR1 + dd_NR1 * (move * move)
    new_norm_NR1 = new_square_NR1.clamp(min=_LEAST**2).sqrt()
    new_states = {
        "gain": new_gain_NR1,
        "direction_norm": new_norm_NR1,
        "gain_first_moment": mean_NR1,
        "gain_second_moment": square_NR1,
    }
    new_direction_NRC = piece.direction * (new_gain_NR1 / new_norm_NR1)
    return After(new_direction_NRC, new_states, keep=ratio_NR1 * new_gain_NR1 / new_norm_NR1)


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
