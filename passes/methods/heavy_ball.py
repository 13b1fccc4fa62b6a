"""Heavy ball: Muon over a decayed sum of gradients, ``M <- beta M + G``, as in Moonlight and Kimi, not their average.

Newton-Schulz divides by the norm, so with a constant ``beta``, from a momentum of zeros, steps are Muon's. Where a
schedule changes ``beta``, the sum weighs old gradients differently from the average.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .method import DECAY, LR, MOMENTUM, MatrixMethod, multiply


def _before(
    grad: Tensor, momentum: Tensor, beta: tuple[Tensor, Tensor], nesterov: bool, out_dtype: torch.dtype
) -> Tensor:
    dtype = torch.promote_types(momentum.dtype, torch.float32)
    factor = beta[1].reshape(()).to(dtype)
    grad = grad.to(dtype)
    new = momentum.to(dtype) * factor + grad
    return (grad + factor * new if nesterov else new).to(out_dtype)


def _advance(
    momenta: Sequence[Tensor], grads: Sequence[Tensor], directions: Sequence[Tensor], rates: Mapping[str, Any]
) -> None:
    multiply(momenta, rates["momentum"])
    torch._foreach_add_(list(momenta), [grad.to(m.dtype) for grad, m in zip(grads, momenta, strict=True)])


HEAVY_BALL = MatrixMethod("heavy_ball", "arXiv 2502.16982", (LR, MOMENTUM, *DECAY), before=_before, advance=_advance)
