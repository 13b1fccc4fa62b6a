"""AdaMuon: the direction divided by a running root of its square, element by element, then scaled to a constant RMS.

    O = NewtonSchulz(sign(M)),  V <- b V + (1 - b) O^2,  P = O / (sqrt(V) + eps),  D = P sqrt(min(m, n)) / (|P| + eps)

of an m x n matrix; the one fact is |P|^2.

This is the paper's third version. With its scale by shape, ``match_rms_adamw``, an update has the RMS ``0.2 lr``. The
first version, which is the authors' code, takes no sign, and divides V by ``1 - b^t``, which cancels in D. Megatron's
optimizer of this name lacks the last formula, and is another method.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .method import DECAY, LR, MOMENTUM, After, MatrixMethod, Piece, Rate, State, averaged, summed


def _before(
    grad: Tensor, momentum: Tensor, beta: tuple[Tensor, Tensor], nesterov: bool, out_dtype: torch.dtype
) -> Tensor:
    update = averaged(grad, momentum, beta, nesterov, out_dtype)
    # sign(NaN) is 0 and sign(inf) is 1, but the checks must find a gradient that is not finite in the direction.
    return torch.where(update.isfinite(), update.sign(), math.nan)


def _after(piece: Piece) -> After:
    moment_NRC, beta = piece.states["second_moment"], piece.rates["beta2"]
    new_moment_NRC = moment_NRC.lerp(piece.direction.square().to(moment_NRC.dtype), 1 - beta)
    normalized_NRC = piece.direction / (new_moment_NRC.to(piece.direction.dtype).sqrt() + piece.rates["eps"])
    return After(normalized_NRC, {"second_moment": new_moment_NRC}, summed(normalized_NRC.square())[:, None])


def _finish(facts_NF: Tensor, keep: Any, move: Any, piece: Piece) -> tuple[Any, Tensor]:
    return keep, move * (math.sqrt(min(piece.rows, piece.cols)) / (facts_NF[:, 0].sqrt() + piece.rates["eps"]))


ADAMUON = MatrixMethod(
    "adamuon",
    "arXiv 2507.11005",
    (
        LR,
        MOMENTUM,
        *DECAY,
        Rate("beta2", 0.95, meaning="factor of the average of squares", below=1.0),
        Rate("eps", 1e-8, meaning="added to its root", positive=True),
    ),
    (State("second_moment", "second moment"),),
    adjust_lr="match_rms_adamw",
    before=_before,
    after=_after,
    facts=1,
    finish=_finish,
)
