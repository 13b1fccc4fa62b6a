"""The writes of a Muon step to a list of parameters, one pass over memory; the twin of ``muon_apply`` in plain aten.

    p ← (1 − lr · weight_decay) p − lr · scale · u
    m ← m + weight (g − m)                            with momenta

of parameter p, update u, momentum m, gradient g. Per element the kernel reads p and u and writes p, and reads m and g
and writes m. Arithmetic in float32, one rounding. A launch writes up to ``MOST`` parameters, all of them aligned or
none. The device reads ``found_inf``, and writes nothing where it is 1; the host never waits for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..momentum import Averages
from .launch import Launch, decoded_at, element_type, encoded, first_programs, tensor_of_program
from .model import ceildiv

BLOCK, WARPS = tl.constexpr(2048), 4
MOST = 8  # tensors per launch


@triton.jit
def apply_kernel(
    ps,  # not "params": Triton's generated launcher has a variable of that name
    us,
    ms,
    gs,
    starts,
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
    LR_ON_DEVICE: tl.constexpr,
    FOUND_INF: tl.constexpr,
    MOMENTUM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write BLOCK elements of one of the parameters. ``ps``, ``us``, ``ms`` and ``gs`` are addresses of elements of
    the types P, U, M and G, ``elements`` the numbers of elements: :func:`launch.encoded` integers, as are
    ``starts``, :func:`launch.first_programs`."""
    if FOUND_INF:
        if tl.load(found_inf) == 1:
            return
    # LR_ON_DEVICE: how many numbers ``lr`` points to, 0 for a number; 3 are lr, weight_decay and weight.
    if LR_ON_DEVICE:
        rate = tl.load(lr).to(tl.float32)
    else:
        rate = lr
    if LR_ON_DEVICE == 3:
        weight_decay = tl.load(lr + 1).to(tl.float32)
        weight = tl.load(lr + 2).to(tl.float32)
    index, block = tensor_of_program(starts)
    numel = decoded_at(elements, index).to(tl.int64)
    scale = decoded_at(scales, index)
    p_ptr = decoded_at(ps, index).to(tl.pointer_type(P))
    u_ptr = decoded_at(us, index).to(tl.pointer_type(U))
    m_ptr = decoded_at(ms, index).to(tl.pointer_type(M))
    g_ptr = decoded_at(gs, index).to(tl.pointer_type(G))
    if WIDE:
        p_ptr = tl.multiple_of(p_ptr, 16)
        u_ptr = tl.multiple_of(u_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        numel = tl.multiple_of(numel, 16)
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    p = tl.load(p_ptr + offsets, mask=mask)
    u = tl.load(u_ptr + offsets, mask=mask).to(tl.float32)
    p_new = p.to(tl.float32) * (1.0 - rate * weight_decay) - rate * scale * u
    tl.store(p_ptr + offsets, p_new.to(p.dtype), mask=mask)
    if MOMENTUM:
        m = tl.load(m_ptr + offsets, mask=mask)
        g = tl.load(g_ptr + offsets, mask=mask).to(tl.float32)
        m_fp32 = m.to(tl.float32)
        tl.store(m_ptr + offsets, (m_fp32 + weight * (g - m_fp32)).to(m.dtype), mask=mask)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supports(*tensors: Tensor) -> bool:
    """Tell whether the kernel takes a parameter and its update, momentum and gradient: one dense layout for all, on one
    device, no float64."""
    p, *others = tensors
    dense = torch.ops.aten.is_non_overlapping_and_dense(p)
    same_layout = all(x.stride() == p.stride() and x.device == p.device for x in others)
    return dense and same_layout and all(x.dtype in _DTYPES for x in tensors)


def is_wide(*tensors: Tensor) -> bool:
    """Tell whether tensors of one shape may be read 16 bytes at a time to their ends."""
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

    Return the indices of the parameters that :func:`supports` refuses; these are unchanged. Parameters of one device
    and dtypes share launches.
    """
    moved = averages or Averages(params, updates, 0.0)  # stand-ins that the kernel does not read
    lists = [params, updates, moved.momenta, moved.grads]
    groups: dict[object, list[int]] = {}
    unchanged = []
    for i, tensors in enumerate(zip(*lists, strict=True)):
        if supports(*tensors):
            kernel_key = (tensors[0].device, *(x.dtype for x in tensors), is_wide(*tensors))
            groups.setdefault(kernel_key, []).append(i)
        else:
            unchanged.append(i)
    rates = weight_decay, moved.weight
    if groups and isinstance(lr, Tensor) and isinstance(weight_decay, Tensor):
        weight = weight_decay if averages is None else averages.weight
        lr = torch.stack([torch.as_tensor(x).reshape(()) for x in (lr, weight_decay, weight)])
        rates = 0.0, 0.0
    for group in groups.values():
        examples = [xs[group[0]] for xs in lists]
        lr_numbers = lr.numel() if isinstance(lr, Tensor) and lr.device == examples[0].device else 0
        constants: dict[str, Any] = {name: element_type(x) for name, x in zip("PUMG", examples, strict=True)}
        constants |= {"num_warps": WARPS, "LR_ON_DEVICE": lr_numbers}
        constants |= {"FOUND_INF": found_inf is not None, "MOMENTUM": averages is not None, "WIDE": is_wide(*examples)}
        for start in range(0, len(group), MOST):
            chunk = group[start : start + MOST]
            elements = [params[i].numel() for i in chunk]
            programs = [ceildiv(n, BLOCK.value) for n in elements]
            pointers = [encoded([xs[i] for i in chunk], MOST) for xs in lists]
            numbers = encoded(elements, MOST), encoded([float(scales[i]) for i in chunk], MOST)
            rate = lr if lr_numbers else float(lr)
            arguments = (*pointers, first_programs(programs, MOST), *numbers, rate, found_inf, *rates)
            Launch(apply_kernel, sum(programs), examples[0], arguments, constants).run()
    launched = [i for group in groups.values() for i in group]
    written = [params[i] for i in launched] + ([] if averages is None else [averages.momenta[i] for i in launched])
    # In-place operations of aten do this by themselves: autograd then refuses a backward that needs the old values.
    torch.autograd.graph.increment_version(written)
    return unchanged
