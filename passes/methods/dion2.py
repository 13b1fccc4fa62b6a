"""Dion2: orthogonalizes the rows, or columns, with most momentum; the others stay in the momentum.

    M <- M + G,   I: the ``fraction`` of the shorter side with the largest L1 norms in M,
    D_I = NewtonSchulz(M_I), 0 elsewhere,   M_I <- momentum M_I

As in the authors' code (github.com/microsoft/dion), but chosen from whole matrices, so that steps do not depend on the
number of ranks. Newton-Schulz takes a ``fraction`` of Muon's time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .method import DECAY, LR, MOMENTUM, MatrixMethod, NewtonSchulz, Rate, WholeInputs


def _before(
    grad: Tensor, momentum: Tensor, beta: tuple[Tensor, Tensor], nesterov: bool, out_dtype: torch.dtype
) -> Tensor:
    dtype = torch.promote_types(momentum.dtype, torch.float32)
    return (momentum.to(dtype) + grad.to(dtype)).to(out_dtype)


def _whole(matrices: list[Tensor], newton_schulz: NewtonSchulz, inputs: list[WholeInputs]) -> list[Tensor]:
    # Transposed where tall, so that rows are chosen along the shorter side.
    wide = [x if x.shape[-2] <= x.shape[-1] else x.mT for x in matrices]
    rows = [_chosen(x, part.phase) for x, part in zip(wide, inputs, strict=True)]
    orthogonal = newton_schulz([x.take_along_dim(index, -2).contiguous() for x, index in zip(wide, rows, strict=True)])
    directions = [
        torch.zeros_like(x, dtype=part.dtype).scatter(-2, index.expand_as(part), part)
        for x, part, index in zip(wide, orthogonal, rows, strict=True)
    ]
    return [d if d.shape == x.shape else d.mT for d, x in zip(directions, matrices, strict=True)]


def _chosen(x: Tensor, fraction: float) -> Tensor:
    """Return the indices, [..., count, 1] in ascending order, of the rows with the largest L1 norms."""
    count = max(1, math.ceil(fraction * x.shape[-2]))
    return x.float().abs().sum(-1).topk(count, dim=-1).indices.sort(-1).values.unsqueeze(-1)


def _advance(
    momenta: Sequence[Tensor], grads: Sequence[Tensor], directions: Sequence[Tensor], rates: Mapping[str, Any]
) -> None:
    torch._foreach_add_(list(momenta), [grad.to(m.dtype) for grad, m in zip(grads, momenta, strict=True)])
    for momentum, direction in zip(momenta, directions, strict=True):
        # A direction is zero outside the chosen rows, and within them only where the momentum is zero, too.
        wide = momentum.to(torch.promote_types(momentum.dtype, torch.float32))
        momentum.copy_(torch.where(direction != 0, wide * rates["momentum"], wide))


DION2 = MatrixMethod(
    "dion2",
    "arXiv 2512.16928",
    (
        LR,
        MOMENTUM,
        *DECAY,
        Rate("fraction", 0.25, meaning="share of the shorter side that a step updates", most=1.0, positive=True),
    ),
    adjust_lr="spectral",
    before=_before,
    nesterov=False,
    advance=_advance,
    whole=_whole,
    phase=lambda rates: float(rates["fraction"]),
)
