"""``clip_grad_norm_`` for parameters on several meshes: experts are on another mesh than the rest of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients as ``torch.nn.utils.clip_grad_norm_`` does, also of DTensors on several meshes.

    Every element counts once, however many ranks hold it. Collective over all ranks of the parameters' meshes.
    ``"gradient_clipping"`` of a config does the same in ``step()``, without a collective of its own.

    Args:
        parameters: whose ``.grad`` is scaled in place.
        max_norm, norm_type, error_if_nonfinite, foreach: as in torch.
    Returns:
        The norm of all gradients before clipping, a plain 0-dim tensor.
    Raises:
        RuntimeError: with ``error_if_nonfinite``, the norm is inf or NaN.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)
    # One norm a mesh, then the norm of these: torch stacks the norms it is given, which DTensors of two meshes refuse.
    norms: list[Tensor] = []
    for members in by_mesh.values():
        norm = get_total_norm([p.grad for p in members if p.grad is not None], norm_type, False, foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = get_total_norm(norms, norm_type, error_if_nonfinite, foreach)
    for members in by_mesh.values():
        clip_grads_with_norm_(members, max_norm, total, foreach)
    return total
