"""Momentum, look-ahead and cast in one pass over memory; the twin of ``muon_momentum`` in plain aten.

    new = momentum + (1 − β)(grad − momentum);  update = grad + β (new − grad) with nesterov, else new

Per element it reads grad and momentum and writes both results. Arithmetic in float32, with aten's two forms of lerp;
``new`` is rounded to momentum's dtype before ``update`` is made of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .model import ceildiv

__all__ = ["launch", "momentum_kernel", "momentum_update", "takes"]

BLOCK, WARPS = 2048, 4


@triton.jit
def _lerp(start, end, weight):
    """aten's: exact at both ends."""
    difference = end - start
    return tl.where(tl.abs(weight) < 0.5, start + weight * difference, end - difference * (1.0 - weight))


@triton.jit
def momentum_kernel(
    grad,
    momentum,
    update,
    new,
    elements,
    toward_grad,
    toward_new,
    NESTEROV: tl.constexpr,
    WEIGHTS_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if WEIGHTS_ON_DEVICE:
        to_grad = tl.load(toward_grad).to(tl.float32)
        to_new = tl.load(toward_new).to(tl.float32)
    else:
        to_grad = toward_grad
        to_new = toward_new
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    kept = momentum.dtype.element_ty
    m = tl.load(momentum + i, mask=inside).to(tl.float32)
    g = tl.load(grad + i, mask=inside).to(kept).to(tl.float32)
    stored = _lerp(m, g, to_grad).to(kept)
    tl.store(new + i, stored, mask=inside)
    ahead = stored.to(tl.float32)
    if NESTEROV:
        ahead = _lerp(g, ahead, to_new).to(kept).to(tl.float32)
    tl.store(update + i, ahead.to(update.dtype.element_ty), mask=inside)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(grad: Tensor, momentum: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the kernel covers these: one dense layout for both, no float64, no dtype that is not floating."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(grad) and grad.stride() == momentum.stride()
    return dense and grad.device == momentum.device and {grad.dtype, momentum.dtype, out_dtype} <= set(_DTYPES)


def momentum_update(
    grad: Tensor,
    momentum: Tensor,
    *,
    weights: tuple[float | Tensor, float | Tensor],
    nesterov: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """new = momentum + (1 − β)(grad − momentum), update = grad + β (new − grad) with nesterov, else new.

    Args:
        grad, momentum: tensors that :func:`takes` takes, unmodified.
        weights: (1 − β, β), numbers or one-element tensors.
        nesterov: whether the update looks ahead.
        out_dtype: of the update.
    Returns:
        ``(update, new)``, new tensors in the inputs' layout.
    """
    update = torch.empty_like(grad, dtype=out_dtype)
    new = torch.empty_like(momentum)
    launch(grad, momentum, update, new, weights=weights, nesterov=nesterov).run()
    return update, new


def launch(
    grad: Tensor,
    momentum: Tensor,
    update: Tensor,
    new: Tensor,
    *,
    weights: tuple[float | Tensor, float | Tensor],
    nesterov: bool,
) -> Launch:
    """update, new ← theirs; all four in one dense layout."""
    on_device = all(isinstance(weight, Tensor) and weight.device == grad.device for weight in weights)
    first, second = weights if on_device else (float(weight) for weight in weights)
    elements = grad.numel()
    return Launch(
        momentum_kernel,
        ceildiv(elements, BLOCK),
        grad,
        (grad, momentum, update, new, elements, first, second),
        {"NESTEROV": nesterov, "WEIGHTS_ON_DEVICE": on_device, "BLOCK": BLOCK, "num_warps": WARPS},
    )
