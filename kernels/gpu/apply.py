"""Decay and scaled update of a list of parameters, one pass over memory; the twin of ``muon_apply`` in plain aten.

    p ← (1 − lr · weight_decay) p − lr · scale · u

Per element it reads p and u and writes p. Arithmetic in float32, one rounding. Up to ``MOST`` tensors share a launch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .model import ceildiv

__all__ = ["apply_kernel", "apply_updates", "launch", "takes"]

BLOCK, WARPS = 2048, 4
MOST = 8  # tensors per launch; a list is cut into 8s and one each of 4, 2, 1, so that four variants serve all lengths


@triton.jit
def apply_kernel(
    ps,  # not "params": Triton's generated launcher has a variable of that name
    us,
    elements,
    scales,
    lr,
    weight_decay: tl.float32,
    COUNT: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if LR_ON_DEVICE:
        rate = tl.load(lr).to(tl.float32)
    else:
        rate = lr
    program = tl.program_id(0).to(tl.int64)
    first = program * 0
    for tensor in tl.static_range(COUNT):
        programs = tl.cdiv(elements[tensor], BLOCK)
        if (program >= first) & (program < first + programs):
            i = (program - first) * BLOCK + tl.arange(0, BLOCK)
            inside = i < elements[tensor]
            p = tl.load(ps[tensor] + i, mask=inside)
            u = tl.load(us[tensor] + i, mask=inside).to(tl.float32)
            moved = p.to(tl.float32) * (1.0 - rate * weight_decay) - rate * scales[tensor] * u
            tl.store(ps[tensor] + i, moved.to(p.dtype), mask=inside)
        first += programs


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(p: Tensor, u: Tensor) -> bool:
    """Whether the kernel covers this pair: one dense layout for both, on one device, no float64."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(p) and p.stride() == u.stride()
    return dense and p.device == u.device and p.dtype in _DTYPES and u.dtype in _DTYPES


def apply_updates(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    scales: Sequence[float],
) -> None:
    """p ← (1 − lr · weight_decay) p − lr · scale · u, in place.

    Args:
        params: tensors of one dtype on one device, changed.
        updates: one for each, of one dtype; every pair is one that :func:`takes` takes.
        lr: a number or a one-element tensor.
        weight_decay: multiplies the unscaled lr.
        scales: one for each.
    """
    start = 0
    while start < len(params):
        chunk = slice(start, start + next(size for size in (MOST, 4, 2, 1) if size <= len(params) - start))
        launch(params[chunk], updates[chunk], lr=lr, weight_decay=weight_decay, scales=scales[chunk]).run()
        start = chunk.stop
    torch.autograd.graph.increment_version(list(params))  # as every in-place operation does; a kernel does not


def launch(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    scales: Sequence[float],
) -> Launch:
    """At most ``MOST`` pairs at once."""
    on_device = isinstance(lr, Tensor) and lr.device == params[0].device
    elements = tuple(p.numel() for p in params)
    return Launch(
        apply_kernel,
        sum(ceildiv(n, BLOCK) for n in elements),
        params[0],
        (
            tuple(params),
            tuple(updates),
            elements,
            tuple(float(scale) for scale in scales),
            lr if on_device else float(lr),
            weight_decay,
        ),
        {"COUNT": len(params), "LR_ON_DEVICE": on_device, "BLOCK": BLOCK, "num_warps": WARPS},
    )
