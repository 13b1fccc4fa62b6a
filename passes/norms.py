"""Norms of lists of tensors in few launches, and what they tell; nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["norms", "not_finite", "squares"]

_HALF = (torch.float16, torch.bfloat16)


def norms(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Norm of each tensor, ``[len(tensors)]`` fp32."""
    found: dict[int, Tensor] = {}
    for kind in {tensor.dtype for tensor in tensors}:
        chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype == kind]
        if order == math.inf:  # of nothing there is no largest entry
            found |= {i: tensors[i].new_zeros(()) for i in chosen if not tensors[i].numel()}
            chosen = [i for i in chosen if tensors[i].numel()]
        # A norm that is returned in half precision would overflow where no entry does.
        dtype = torch.float32 if kind in _HALF else None
        own = torch._foreach_norm([tensors[i] for i in chosen], order, dtype=dtype) if chosen else ()
        found.update(zip(chosen, own, strict=True))
    return torch.stack([found[i].float() for i in range(len(tensors))])


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Squared norm of each tensor, ``[len(tensors)]`` fp32."""
    return norms(tensors).square()


def not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """1.0 for each tensor with an inf or NaN, else 0.0; ``[len(tensors)]`` fp32."""
    # The largest entry: a 2-norm overflows where no entry does.
    return (~torch.isfinite(norms(tensors, math.inf))).float()
