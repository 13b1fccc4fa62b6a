"""The writes of a Muon step to a list of parameters, one pass over memory; the twin of ``muon_apply`` in plain aten.

    p ← (1 − lr · weight_decay) p − lr · scale · u
    m ← m + weight (g − m)                            where momenta are given

Per element it reads p and u and writes p, and m, g and m likewise. Arithmetic in float32, one rounding. Up to ``MOST``
tensors share a launch. Nothing is written where ``withheld`` is 1, which the host need not know.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..apply import Averages
from .launch import Launch, cut
from .model import ceildiv

__all__ = ["apply_kernel", "apply_updates", "launch", "takes"]

BLOCK, WARPS = 2048, 4
MOST = 8  # tensors per launch


@triton.jit
def apply_kernel(
    ps,  # not "params": Triton's generated launcher has a variable of that name
    us,
    ms,
    gs,
    elements,
    scales,
    lr,
    withheld,
    weight_decay: tl.float32,
    weight: tl.float32,
    COUNT: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    WITHHELD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if WITHHELD:
        if tl.load(withheld) == 1:
            return
    if LR_ON_DEVICE:
        rate = tl.load(lr).to(tl.float32)
    else:
        rate = lr
    if LR_ON_DEVICE == 3:
        weight_decay = tl.load(lr + 1).to(tl.float32)
        weight = tl.load(lr + 2).to(tl.float32)
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
            if MOMENTUM:
                m = tl.load(ms[tensor] + i, mask=inside)
                g = tl.load(gs[tensor] + i, mask=inside).to(tl.float32)
                wide = m.to(tl.float32)
                tl.store(ms[tensor] + i, (wide + weight * (g - wide)).to(m.dtype), mask=inside)
        first += programs


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(*tensors: Tensor) -> bool:
    """Whether the kernel covers what belongs to a parameter: one dense layout for all, on one device, no float64."""
    p, *others = tensors
    dense = torch.ops.aten.is_non_overlapping_and_dense(p)
    alike = all(x.stride() == p.stride() and x.device == p.device for x in others)
    return dense and alike and all(x.dtype in _DTYPES for x in tensors)


def apply_updates(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    scales: Sequence[float],
    averages: Averages | None = None,
    withheld: Tensor | None = None,
) -> None:
    """p ← (1 − lr · weight_decay) p − lr · scale · u, in place, and momenta moved where they are given.

    Args:
        params: tensors of one dtype on one device, changed.
        updates: one for each, of one dtype; :func:`takes` takes what belongs to each parameter.
        lr: a number or a one-element tensor.
        weight_decay: multiplies the unscaled lr. A one-element tensor of the dtype and device of lr and of the
            averages' weight, or a number.
        scales: one for each.
        averages: of the parameters, momenta of one dtype and gradients of one.
        withheld: one fp32 element on the device; 1 for nothing to be written.
    """
    if isinstance(lr, Tensor) and isinstance(weight_decay, Tensor):
        weight = weight_decay if averages is None else averages.weight
        lr = torch.stack([torch.as_tensor(x).reshape(()) for x in (lr, weight_decay, weight)])
    for chunk in cut(len(params), MOST):
        part = None if averages is None else averages.of(range(chunk.start, chunk.stop))
        launch(
            params[chunk],
            updates[chunk],
            lr=lr,
            weight_decay=weight_decay,
            scales=scales[chunk],
            averages=part,
            withheld=withheld,
        ).run()
    written = [*params, *(() if averages is None else averages.momenta)]
    torch.autograd.graph.increment_version(written)  # as every in-place operation does; a kernel does not


def launch(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    scales: Sequence[float],
    averages: Averages | None = None,
    withheld: Tensor | None = None,
) -> Launch:
    """At most ``MOST`` parameters at once; arguments as for :func:`apply_updates`.

    Args:
        lr: on the device alone, or with the decay and the averages' weight behind it, which then are not read.
    """
    on_device = lr.numel() if isinstance(lr, Tensor) and lr.device == params[0].device else 0
    elements = tuple(p.numel() for p in params)
    moved = averages or Averages(params, updates, 0.0)  # where there are none the kernel reads none
    return Launch(
        apply_kernel,
        sum(ceildiv(n, BLOCK) for n in elements),
        params[0],
        (
            tuple(params),
            tuple(updates),
            tuple(moved.momenta),
            tuple(moved.grads),
            elements,
            tuple(float(scale) for scale in scales),
            lr if on_device else float(lr),
            withheld,
            0.0 if on_device == 3 else weight_decay,
            0.0 if on_device == 3 else moved.weight,
        ),
        {
            "COUNT": len(params),
            "LR_ON_DEVICE": on_device,
            "WITHHELD": withheld is not None,
            "MOMENTUM": averages is not None,
            "BLOCK": BLOCK,
            "num_warps": WARPS,
        },
    )
