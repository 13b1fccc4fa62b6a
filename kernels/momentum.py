"""Muon's momentum: an exponential moving average of gradients, with Nesterov's look one step ahead."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Averages:
    """Momenta to move toward gradients: ``momentum.lerp_(grad, weight)`` for each parameter."""

    momenta: Sequence[Tensor]  # one a parameter, changed
    grads: Sequence[Tensor]  # one a parameter, of its momentum's shape
    weight: float | Tensor  # 1 − momentum factor; a tensor under the conditions of weight_decay in muon_apply

    def of(self, chosen: Sequence[int]) -> "Averages":
        """Return the momenta and gradients of the parameters with the indices ``chosen``."""
        return Averages([self.momenta[i] for i in chosen], [self.grads[i] for i in chosen], self.weight)


def muon_momentum(
    grad: Tensor, momentum: Tensor, *, beta: float | tuple[Tensor, Tensor], nesterov: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return update and new = momentum + (1 − beta)(grad − momentum); update = grad + beta (new − grad), or ``new``.

    Plain aten, which compilers fuse; bitwise torch.optim.Muon's ``buf.lerp_(grad, 1 - momentum)`` and
    ``grad.lerp(buf, momentum)``. lerp takes a tensor weight with the same arithmetic as a number, if the weight has the
    dtype that lerp computes in. That is float32 for half-precision momentum, which is therefore widened here (a
    half-precision weight would round beta). For float64 momentum the pair must be float64 to be exact.

    Args:
        grad: any shape and strides; cast to momentum's dtype first.
        momentum: the average so far, of grad's shape.
        beta: a number; or the pair (1 − beta, beta) of 0-dim (or one-element) float tensors on the CPU or on grad's
            device, which keeps beta out of a traced graph.
        nesterov: whether the update looks ahead.
        out_dtype: dtype of the update.
    Returns:
        ``(update, new)`` of grad's shape; ``new`` has momentum's dtype. Neither input is modified. Without ``nesterov``
        and without a cast, both are one tensor.
    Raises:
        ValueError: grad and momentum differ in shape.
    """
    if grad.shape != momentum.shape:
        raise ValueError(f"grad has shape {tuple(grad.shape)}, momentum {tuple(momentum.shape)}: expected the same")
    weights = (1 - beta, beta) if isinstance(beta, int | float) else beta
    grad = grad.to(momentum.dtype)
    toward_grad, toward_new = weights
    new = _lerp(momentum, grad, toward_grad)
    update = _lerp(grad, new, toward_new) if nesterov else new
    return update.to(out_dtype), new


def _lerp(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    if not isinstance(weight, Tensor):
        return start.lerp(end, weight)
    dtype = torch.promote_types(start.dtype, torch.float32)
    scalar = weight if weight.ndim == 0 else weight.reshape(())
    return start.to(dtype).lerp(end.to(dtype), scalar.to(dtype)).to(start.dtype)
