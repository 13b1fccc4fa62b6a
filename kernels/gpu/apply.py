"""The writes of a Muon step to a list of parameters, one pass over memory; the twin of ``muon_apply`` in plain aten.

    p ← (1 − lr · weight_decay) p − lr · scale · u
    m ← m + weight (g − m)                            with momenta

Per element the kernel reads p and u and writes p, and reads m and g and writes m. Arithmetic in float32, one rounding.
Up to ``MOST`` tensors share a launch; there is one compiled kernel for tensors whose memory is aligned and one for the
others. The device reads ``found_inf``, and writes nothing where it is 1; the host never waits for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..momentum import Averages
from .launch import Launch, addresses, coded, decoded, element_type, filled
from .model import ceildiv

__all__ = ["apply_kernel", "apply_updates", "launch", "supports"]

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
    found_inf,
    weight_decay: tl.float32,
    weight: tl.float32,
    P: tl.constexpr,
    U: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    COUNT: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    FOUND_INF: tl.constexpr,
    MOMENTUM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one block of one of COUNT tensors: ``ps`` to ``gs`` are addresses of elements of the types ``P`` to ``G``.

    Addresses, and ``elements``, each tensor's size, are :func:`launch.coded`.
    """
    if FOUND_INF:
        if tl.load(found_inf) == 1:
            return
    # LR_ON_DEVICE: how many numbers lr points to; 3 are the rate, the decay and the momenta's weight.
    if LR_ON_DEVICE:
        rate = tl.load(lr).to(tl.float32)
    else:
        rate = lr
    if LR_ON_DEVICE == 3:
        weight_decay = tl.load(lr + 1).to(tl.float32)
        weight = tl.load(lr + 2).to(tl.float32)
    program = tl.program_id(0).to(tl.int64)
    # Find the tensor that this program writes: only this is repeated COUNT times. Slots filled up have no elements.
    first = program * 0
    count = first
    scale = scales[0]
    p_at = first
    u_at = first
    m_at = first
    g_at = first
    begin = program * 0
    for tensor in tl.static_range(COUNT):
        here = (program * 0 + elements[tensor] - 3) // 2
        programs = tl.cdiv(here, BLOCK)
        mine = (program >= begin) & (program < begin + programs)
        first = tl.where(mine, begin, first)
        count = tl.where(mine, here, count)
        scale = tl.where(mine, scales[tensor], scale)
        p_at = tl.where(mine, ps[tensor], p_at)
        u_at = tl.where(mine, us[tensor], u_at)
        m_at = tl.where(mine, ms[tensor], m_at)
        g_at = tl.where(mine, gs[tensor], g_at)
        begin += programs
    p_at = decoded(p_at).to(tl.pointer_type(P))
    u_at = decoded(u_at).to(tl.pointer_type(U))
    m_at = decoded(m_at).to(tl.pointer_type(M))
    g_at = decoded(g_at).to(tl.pointer_type(G))
    if WIDE:
        p_at = tl.multiple_of(p_at, 16)
        u_at = tl.multiple_of(u_at, 16)
        m_at = tl.multiple_of(m_at, 16)
        g_at = tl.multiple_of(g_at, 16)
        count = tl.multiple_of(count, 16)
    i = (program - first) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    p = tl.load(p_at + i, mask=inside)
    u = tl.load(u_at + i, mask=inside).to(tl.float32)
    moved = p.to(tl.float32) * (1.0 - rate * weight_decay) - rate * scale * u
    tl.store(p_at + i, moved.to(p.dtype), mask=inside)
    if MOMENTUM:
        m = tl.load(m_at + i, mask=inside)
        g = tl.load(g_at + i, mask=inside).to(tl.float32)
        wide = m.to(tl.float32)
        tl.store(m_at + i, (wide + weight * (g - wide)).to(m.dtype), mask=inside)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supports(*tensors: Tensor) -> bool:
    """Tell whether the kernel covers a parameter's tensors: one dense layout for all, on one device, no float64."""
    p, *others = tensors
    dense = torch.ops.aten.is_non_overlapping_and_dense(p)
    same_layout = all(x.stride() == p.stride() and x.device == p.device for x in others)
    return dense and same_layout and all(x.dtype in _DTYPES for x in tensors)


def is_wide(*tensors: Tensor) -> bool:
    """Tell whether all of each tensor, all of one shape, may be read 16 bytes at a time."""
    return tensors[0].numel() % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in tensors)


def apply_updates(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    scales: Sequence[float],
    averages: Averages | None = None,
    found_inf: Tensor | None = None,
) -> list[int]:
    """Write the parameters, and momenta if there are ``averages``; arguments as for ``kernels.muon_apply``.

    Return the indices of the parameters with a tensor that :func:`supports` refuses; these parameters are unchanged.
    Parameters of one device and dtypes share launches.
    """
    lists = [params, updates, *([] if averages is None else [averages.momenta, averages.grads])]
    groups: dict[object, list[int]] = {}
    unchanged = []
    for i, tensors in enumerate(zip(*lists, strict=True)):
        if supports(*tensors):
            kernel_key = (tensors[0].device, *(x.dtype for x in tensors), is_wide(*tensors))
            groups.setdefault(kernel_key, []).append(i)
        else:
            unchanged.append(i)
    if groups and isinstance(lr, Tensor) and isinstance(weight_decay, Tensor):
        weight = weight_decay if averages is None else averages.weight
        lr = torch.stack([torch.as_tensor(x).reshape(()) for x in (lr, weight_decay, weight)])
    for group in groups.values():
        for start in range(0, len(group), MOST):
            chunk = group[start : start + MOST]
            launch(
                [params[i] for i in chunk],
                [updates[i] for i in chunk],
                lr=lr,
                weight_decay=weight_decay,
                scales=[scales[i] for i in chunk],
                averages=None if averages is None else averages.of(chunk),
                found_inf=found_inf,
            ).run()
    launched = [i for group in groups.values() for i in group]
    written = [params[i] for i in launched] + ([] if averages is None else [averages.momenta[i] for i in launched])
    # In-place operations of aten do this by themselves: autograd then refuses a backward that needs the old values.
    torch.autograd.graph.increment_version(written)
    return unchanged


def launch(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    scales: Sequence[float],
    averages: Averages | None = None,
    found_inf: Tensor | None = None,
) -> Launch:
    """Make the launch for at most ``MOST`` parameters; one compiled kernel serves any number.

    ``lr`` may be a tensor of three, with the decay and the averages' weight, whose own arguments are not read then.
    """
    on_device = lr.numel() if isinstance(lr, Tensor) and lr.device == params[0].device else 0
    elements = [p.numel() for p in params]
    moved = averages or Averages(params, updates, 0.0)  # stand-ins that the kernel does not read
    tensors = (params, updates, moved.momenta, moved.grads)
    pointers = [addresses(each, MOST) for each in tensors]
    numbers = filled([coded(n) for n in elements], MOST), filled([float(scale) for scale in scales], MOST)
    rates = (0.0, 0.0) if on_device == 3 else (weight_decay, moved.weight)
    arguments = (*pointers, *numbers, lr if on_device else float(lr), found_inf, *rates)
    settings: dict[str, Any] = {name: element_type(each[0]) for name, each in zip("PUMG", tensors, strict=True)}
    settings |= {"COUNT": MOST, "BLOCK": BLOCK, "num_warps": WARPS, "LR_ON_DEVICE": on_device}
    settings |= {"FOUND_INF": found_inf is not None, "MOMENTUM": averages is not None}
    settings["WIDE"] = all(is_wide(*each) for each in zip(*tensors, strict=True))
    return Launch(apply_kernel, sum(ceildiv(n, BLOCK) for n in elements), params[0], arguments, settings)
