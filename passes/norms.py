"""Norms of many tensors in few launches, without waiting for the device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def norms(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Return the norm of each tensor, ``[len(tensors)]`` fp32."""
    norm_of: dict[int, Tensor] = {}
    for kind in {tensor.dtype for tensor in tensors}:
        indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == kind]
        if order == math.inf:  # _foreach_norm raises for the largest entry of an empty tensor
            norm_of |= {i: tensors[i].new_zeros(()) for i in indices if not tensors[i].numel()}
            indices = [i for i in indices if tensors[i].numel()]
        # A norm in half precision may overflow although no entry does.
        dtype = torch.float32 if kind in _HALF else None
        group_norms = torch._foreach_norm([tensors[i] for i in indices], order, dtype=dtype) if indices else ()
        norm_of.update(zip(indices, group_norms, strict=True))
    return torch.stack([norm_of[i].float() for i in range(len(tensors))])


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of each tensor, ``[len(tensors)]`` fp32."""
    return norms(tensors).square()


def not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1.0 for each tensor with an inf or NaN, else 0.0: ``[len(tensors)]`` fp32."""
    # By the largest entry, since a 2-norm may overflow although no entry is infinite.
    return (~torch.isfinite(norms(tensors, math.inf))).float()
