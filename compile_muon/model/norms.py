"""Norms of all parameters, or of all gradients, for a logger; and clipping for parameters on several meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.model.readers import sharded_params_of
from compile_muon.passes.norms import norms


@torch.no_grad()
def parameter_norms(model: nn.Module, *, gradients: bool = False) -> dict[str, float]:
    """Return the 2-norm of each whole parameter of a sharded model, or of its gradient, at every stage.

    Every element counts once, however many ranks hold it. Collective over all ranks of the model's optimizer, in one
    all-reduce of one number a parameter (gradients that eager code left in another placement take one each, which the
    step then need not); waits for the device once.

    Args:
        gradients: norms of ``.grad`` in place of the weights; at stage 1 that is zero between micro-batches.
    Returns:
        Norms by the names of ``model.named_parameters()``; parameters without a gradient on this rank are left out.
    """
    sharded_params: dict[ShardedParam, str] = {}
    for path, module in model.named_modules():
        for name, sharded in sharded_params_of(module).items():
            sharded_params.setdefault(sharded, f"{path}.{name}" if path else name)
    if not sharded_params:
        return {}
    if gradients:
        for sharded in sharded_params:
            sharded.place_gradient()  # as the step would: eager code may have left it in another placement
    local_tensors = {
        a: a.local_grad if gradients else a.local.detach()
        for a in sharded_params
        if not gradients or a.grad is not None
    }
    device = next(iter(sharded_params)).local.device
    squares = torch.zeros(len(sharded_params), dtype=torch.float64, device=device)
    if local_tensors:
        places = [i for i, sharded in enumerate(sharded_params) if sharded in local_tensors]
        # The all-reduce adds an element once for each rank that holds a copy.
        weights = squares.new_tensor([1 / sharded.spec.layout.copies for sharded in local_tensors])
        squares[places] = norms(list(local_tensors.values())).double().square() * weights
    for group in {id(sharded.group): sharded.group for sharded in sharded_params if sharded.group is not None}.values():
        indices = torch.tensor([i for i, sharded in enumerate(sharded_params) if sharded.group is group], device=device)
        summed = squares[indices]
        dist.all_reduce(summed, group=group)
        squares[indices] = summed
    norm_of = dict(zip(sharded_params, squares.sqrt().tolist(), strict=True))
    return {name: norm_of[sharded] for sharded, name in sharded_params.items() if sharded in local_tensors}


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
