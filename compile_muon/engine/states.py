"""States of a method beside the momentum: their shapes and placements."""

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


def row_state_shape(spec: ParamSpec, shape: Sequence[int], width: int) -> torch.Size:
    """Return the shape of ``width`` numbers for each row of the matrices in ``shape``, of the parameter or its
    shard."""
    return torch.Size([*shape[: 2 if spec.stacked else 1], width])


def as_state(sharded: ShardedParam, own: Tensor, each: str, mesh: DeviceMesh | None = None) -> Tensor:
    """Return this rank's part ``own`` of a state as the kind of tensor that the parameter is. ``each``: see
    :class:`~compile_muon.passes.methods.State`. ``mesh``: the same ranks on the device of ``own``, by default the
    parameter's mesh."""
    param = sharded.param
    if not isinstance(param, DTensor):
        return own
    shared_dims, shape = param.ndim, param.shape
    if each == "row":
        shape = row_state_shape(sharded.spec, shape, own.shape[-1])
        shared_dims = len(shape) - 1
    # Ranks that hold other columns of the same rows hold the same row states.
    placements = [Replicate() if isinstance(p, Shard) and p.dim >= shared_dims else p for p in param.placements]
    return DTensor.from_local(
        own, mesh or param.device_mesh, placements, run_check=False, shape=shape, stride=contiguous_stride(tuple(shape))
    )


def new_graph_scalars(method: Method, device: torch.device) -> Tensor:
    """Return an empty tensor of graph scalars for a method: fp32 ``(1 - momentum, momentum)`` and the rates its graphs
    read."""
    width = 2 + (len(method.graph_rates) if isinstance(method, MatrixMethod) else 0)
    return torch.empty(width, dtype=torch.float32, device=device)


def new_state(sharded: ShardedParam, state: State) -> Tensor:
    """Return zeros for a state: a DTensor where it is sharded as the parameter is, else a plain tensor."""
    local = sharded.local.detach()
    owner_dtype = torch.promote_types(decode_dtype(sharded.spec.state_dtype), torch.float32)
    if state.at_owner:
        shape = state_shape(sharded.spec, state, owned(sharded.spec, sharded.owners))
        return local.new_zeros(shape, dtype=owner_dtype)
    if state.each == "parameter":
        # torch's fused AdamW counts steps on the GPU.
        return torch.zeros((), device=local.device if local.is_cuda else "cpu")
    size = local.shape
    if state.each == "row":
        view = sharded.spec.muon_settings.view
        size = row_state_shape(sharded.spec, size, view.count if view is not None and view.dim == 1 else 1)
    zeros = local.new_zeros(size, dtype=decode_dtype(sharded.spec.state_dtype))  # in plans, fake
    return part_of(sharded.param, state.name, as_state(sharded, zeros, state.each))
