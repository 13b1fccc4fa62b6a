"""States of a method beside the momentum: their shapes, and how they are cut as the parameter is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_muon.engine.dtensor_parameter import part_of
from compile_muon.engine.dtensors import contiguous_stride
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes.exchange.owned import owned, state_shape
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.methods import MatrixMethod, Method, State

__all__ = ["as_state", "new_hyper", "new_state", "row_state_shape"]


def row_state_shape(spec: ParamSpec, shape: Sequence[int], width: int) -> torch.Size:
    """Of ``width`` numbers for each row of the matrices in ``shape``, the parameter's or its shard's."""
    return torch.Size([*shape[: 2 if spec.stacked else 1], width])


def as_state(sharded: ShardedParam, own: Tensor, each: str, mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's part of a state as the kind of tensor that the parameter is.

    Args:
        each: of :class:`~compile_muon.passes.methods.State`, "element" or "row".
        mesh: of the same ranks, on the device of ``own``; None for that of the parameter.
    """
    param = sharded.param
    if not isinstance(param, DTensor):
        return own
    last, shape = param.ndim, param.shape
    if each == "row":
        shape = row_state_shape(sharded.spec, shape, own.shape[-1])
        last = len(shape) - 1
    # Ranks that have other columns of the same rows have the same number of each row.
    whole = [Replicate() if isinstance(p, Shard) and p.dim >= last else p for p in param.placements]
    return DTensor.from_local(
        own, mesh or param.device_mesh, whole, run_check=False, shape=shape, stride=contiguous_stride(tuple(shape))
    )


def new_hyper(method: Method, device: torch.device) -> Tensor:
    """What graphs read of the rates of a method: fp32 ``(1 - momentum, momentum)``, and those that it is given."""
    width = 2 + (len(method.given) if isinstance(method, MatrixMethod) else 0)
    return torch.empty(width, dtype=torch.float32, device=device)


def new_state(sharded: ShardedParam, state: State) -> Tensor:
    """Zeros: as the kind of tensor that the parameter is, plain where it is not cut as that."""
    local = sharded.local.detach()
    wide = torch.promote_types(decode_dtype(sharded.spec.state_dtype), torch.float32)
    if state.at_owner:
        shape = state_shape(sharded.spec, state, owned(sharded.spec, sharded.owners))
        return local.new_zeros(shape, dtype=wide)
    if state.each == "parameter":
        # Where torch's fused AdamW counts: on the GPU itself.
        return torch.zeros((), device=local.device if local.is_cuda else "cpu")
    own = local.shape
    if state.each == "row":
        view = sharded.spec.muon_settings.view
        own = row_state_shape(sharded.spec, own, view.count if view is not None and view.dim == 1 else 1)
    zeros = local.new_zeros(own, dtype=decode_dtype(sharded.spec.state_dtype))  # in plans, fake
    return part_of(sharded.param, state.name, as_state(sharded, zeros, state.each))
