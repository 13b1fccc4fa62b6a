"""The writes of a Muon step: decay the parameters, move them along their directions, and momenta toward gradients.

Traced code gets plain aten, which compilers fuse with its neighbours; eager code on CUDA gets a Triton kernel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# torch 2.11 to 2.13; private: no public function tells whether a dispatch mode (fake tensors, make_fx) is active.
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .dispatch import triton_kernels
from .momentum import Averages

# On the CPU (torch 2.13) _foreach_mul_ rounds a number to these dtypes first, which mul_ does not: 0.998 becomes 1.
_HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def muon_apply(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    scale: float | Sequence[float],
    averages: Averages | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Write p ← (1 − lr · weight_decay) p − lr · scale · u, in place, for each parameter p and update u.

    Bitwise torch.optim.Muon's ``param.mul_(1 - lr * weight_decay)`` and ``param.add_(update, alpha=-lr * scale)``,
    except for half-precision parameters with a tensor lr, where one rounding from float32 replaces several. In eager
    code on CUDA a Triton kernel writes several parameters a launch, in one pass over memory and with one rounding, and
    moves the momenta in the same pass.

    Args:
        params: tensors of any floating dtype, changed.
        updates: one tensor a parameter, of its shape, any strides and any floating dtype.
        lr: a number; or a one-element tensor on the CPU or on the parameters' device, which the host never waits for
            and no traced graph bakes in.
        weight_decay: multiplies the unscaled lr. A number; or a one-element tensor on the parameters' device, if lr and
            the weight of ``averages`` are such tensors of the same dtype. In float64 they give the bits of numbers.
        scale: one number for all parameters, or one a parameter.
        averages: one momentum and one gradient a parameter, to move momenta toward gradients; or None.
        found_inf: one fp32 element on the parameters' device, which the host never waits for: where it is 1 nothing is
            written. None always writes.
    Raises:
        ValueError: the lists differ in length, or an update has another shape than its parameter; nothing is changed
            then.
    """
    scales = [scale] * len(params) if isinstance(scale, int | float) else scale
    if not len(params) == len(updates) == len(scales):
        raise ValueError(f"{len(params)} params, {len(updates)} updates, {len(scales)} scales: expected one of each")
    for i, (p, u) in enumerate(zip(params, updates, strict=True)):
        if p.shape != u.shape:
            raise ValueError(f"update {i} has shape {tuple(u.shape)}, its parameter {tuple(p.shape)}")
    on_aten = list(range(len(params)))
    if may_launch([*params, *updates]):
        from .gpu.apply import apply_updates

        on_aten = apply_updates(
            params, updates, lr=lr, weight_decay=weight_decay, scales=scales, averages=averages, found_inf=found_inf
        )
    if not on_aten:
        return
    params, updates = [params[i] for i in on_aten], [updates[i] for i in on_aten]
    scales = [scales[i] for i in on_aten]
    averages = None if averages is None else averages.of(on_aten)
    targets = [*params, *(() if averages is None else averages.momenta)]
    # The host may not read found_inf: write in any case, then restore the copies where it is 1.
    copies = None if found_inf is None else [x.clone() for x in targets]
    if averages is not None:
        average(averages)
    if isinstance(lr, Tensor):
        _apply_tensor_lr(params, updates, lr.reshape(()), weight_decay, scales)
    else:
        _apply_number_lr(params, updates, lr, float(weight_decay), scales)
    if found_inf is not None and copies is not None:
        for x, old in zip(targets, copies, strict=True):
            x.copy_(torch.where(found_inf == 1, old, x))


def may_launch(tensors: list[Tensor]) -> bool:
    """Tell whether nothing traces these tensors, and Triton's kernels cover the devices of all."""
    if not not_traced(tensors):  # first, so that tracing never imports Triton's kernels
        return False
    gpu = triton_kernels()
    return gpu is not None and all(gpu.products_on(x.device) is not None for x in tensors)


def not_traced(tensors: list[Tensor]) -> bool:
    """Tell whether operations on these tensors run unobserved: no torch.compile, no dispatch mode, no subclass."""
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    return plain and not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None


def average(averages: Averages) -> None:
    """Move momenta toward gradients, in place; a weight that is a tensor gives the bits of the same number."""
    if not isinstance(averages.weight, Tensor):
        torch._foreach_lerp_(list(averages.momenta), list(averages.grads), averages.weight)
        return
    for momentum, grad in zip(averages.momenta, averages.grads, strict=True):
        dtype = torch.promote_types(momentum.dtype, torch.float32)  # half precision would round the weight
        momentum.copy_(torch.lerp(momentum.to(dtype), grad.to(dtype), averages.weight.to(dtype)))


def _apply_number_lr(
    params: Sequence[Tensor], updates: Sequence[Tensor], lr: float, weight_decay: float, scales: Sequence[float]
) -> None:
    groups: dict[tuple[float, torch.dtype], list[int]] = {}
    for i, (p, scale) in enumerate(zip(params, scales, strict=True)):
        groups.setdefault((scale, p.dtype), []).append(i)
    decay = 1 - lr * weight_decay
    for (scale, dtype), indices in groups.items():
        group = [params[i] for i in indices]
        if dtype in _HALF:
            for p in group:
                p.mul_(decay)
        else:
            torch._foreach_mul_(group, decay)
        torch._foreach_add_(group, [updates[i] for i in indices], alpha=-(lr * scale))


def _apply_tensor_lr(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    lr: Tensor,
    weight_decay: float | Tensor,
    scales: Sequence[float],
) -> None:
    # add_ takes its alpha from the host only; addcmul_ with a 0-dim factor is the same sum, alpha on the device.
    decay = 1 - lr * weight_decay
    for p, u, scale in zip(params, updates, scales, strict=True):
        step = -(lr * scale)
        p.mul_(decay)
        if p.dtype in _HALF:
            p.copy_(torch.addcmul(p.float(), u.float(), step))
        else:
            p.addcmul_(u, step)
