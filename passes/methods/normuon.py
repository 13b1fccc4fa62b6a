"""NorMuon: divides each row of the direction by a running root of its mean square, and restores the direction's norm.

    v_i <- mean_j O_ij^2,  V <- b V + (1 - b) v,  P = O / (sqrt(V) + eps),  D = P |O| / (|P| + eps)

The facts are |O|^2 and |P|^2. This is the form of the paper and its code: rows, and no bias correction, which the last
division would cancel. dion takes the Frobenius norm of a rank's own rows, so its steps depend on the number of ranks,
as these do not; nanogpt, nanochat and Megatron take columns where a matrix is wide.
"""

from typing import Any

import torch
from torch import Tensor

from .method import DECAY, LR, MOMENTUM, After, MatrixMethod, Piece, Rate, State, summed


def _row_sums(direction_NRC: Tensor, weight_NRC: Tensor) -> Tensor:
    return direction_NRC.square().sum(-1, keepdim=True)


def _after(piece: Piece) -> After:
    assert piece.sums is not None
    moment_NR1, beta = piece.states["row_second_moment"], piece.rates["beta2"]
    new_moment_NR1 = moment_NR1.lerp((piece.sums / piece.cols).to(moment_NR1.dtype), 1 - beta)
    divided_NRC = piece.direction / (new_moment_NR1.to(piece.direction.dtype).sqrt() + piece.rates["eps"])
    facts_NF = torch.stack([summed(x_NRC.square()) for x_NRC in (piece.direction, divided_NRC)], dim=-1)
    return After(divided_NRC, {"row_second_moment": new_moment_NR1}, facts_NF)


def _finish(facts_NF: Tensor, keep: Any, move: Any, piece: Piece) -> tuple[Any, Tensor]:
    norm_N, divided_norm_N = facts_NF.sqrt().unbind(-1)
    return keep, move * norm_N / (divided_norm_N + piece.rates["eps"])


NORMUON = MatrixMethod(
    "normuon",
    "arXiv 2510.05491",
    (
        LR,
        MOMENTUM,
        *DECAY,
        Rate("beta2", 0.95, meaning="factor of the average of squares", below=1.0),
        Rate("eps", 1e-10, meaning="added to its root", positive=True),
    ),
    (State("row_second_moment", "second moment of rows", each="row"),),
    row_sums=_row_sums,
    after=_after,
    facts=2,
    finish=_finish,
)
