"""States of a method beside the momentum: shapes and placements, and states that owners keep for whole matrices.

The owner of a matrix is the rank that orthogonalizes it, assigned when the parameter is sharded: its states never
travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_muon.engine.dtensor_parameter import part_of
from compile_muon.engine.dtensors import contiguous_stride
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes.costs import Costs
from compile_muon.passes.exchange.owned import matrix_shapes, owned, parts_of_state, state_shape
from compile_muon.passes.exchange.owner import assign_owners
from compile_muon.passes.exchange.shares import by_parameter
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.methods import MatrixMethod, Method, State, matrix_method


def row_state_shape(spec: ParamSpec, shape: Sequence[int], width: int) -> torch.Size:
    """Return the shape of ``width`` numbers for each row of the matrices in a parameter or shard of this ``shape``."""
    return torch.Size([*shape[: 2 if spec.stacked else 1], width])


def as_state(sharded: ShardedParam, local: Tensor, granularity: str, mesh: DeviceMesh | None = None) -> Tensor:
    """Return this rank's part ``local`` of a state as the parameter's kind of tensor. ``granularity``: see
    :class:`~compile_muon.passes.methods.State`. ``mesh``: of the device of ``local``, by default the parameter's."""
    param = sharded.param
    if not isinstance(param, DTensor):
        return local
    shared_dims, shape = param.ndim, param.shape
    if granularity == "row":
        shape = row_state_shape(sharded.spec, shape, local.shape[-1])
        shared_dims = len(shape) - 1
    # Ranks that hold other columns of the same rows hold the same row states.
    placements = [Replicate() if isinstance(p, Shard) and p.dim >= shared_dims else p for p in param.placements]
    return DTensor.from_local(
        local,
        mesh or param.device_mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=contiguous_stride(tuple(shape)),
    )


def new_graph_scalars(method: Method, device: torch.device) -> Tensor:
    """Return an empty tensor of graph scalars: fp32 ``(1 - momentum, momentum)`` and rates that the graphs read."""
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


# ----------------------------------------------------------------------------------------------------- at owners


def method_of_matrix(sharded: ShardedParam) -> MatrixMethod | None:
    """Return the method of a matrix, or None for other parameters."""
    return None if sharded.spec.muon is None else matrix_method(sharded.spec.muon.method)


def owners_of(specs: Mapping[str, ParamSpec], costs: Costs) -> dict[str, tuple[int, ...]]:
    """Return by name :func:`.assign_owners` of matrices whose methods keep states at owners; equal on all ranks."""
    specs_at_owners = {n: s for n, s in specs.items() if s.muon is not None and matrix_method(s.muon.method).owned}
    owners = by_parameter(list(specs_at_owners.values()), assign_owners(list(specs_at_owners.values()), costs))
    return {name: tuple(param_owners) for name, param_owners in zip(specs_at_owners, owners, strict=True)}


def deal_owners(sharded_params: Sequence[ShardedParam]) -> None:
    """Assign the owners of parameters that are trained from now on."""
    owners = owners_of({sharded.name: sharded.spec for sharded in sharded_params}, sharded_params[0].ledger.costs)
    for sharded in sharded_params:
        sharded.owners = owners.get(sharded.name, ())


def states_at_owner(sharded: ShardedParam, slots: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the states that this rank owns of a parameter, ``[count, a, b]``, part by part: views of ``slots``, its
    entry in the optimizer's state."""
    if not sharded.owners:
        return []
    method = matrix_method(sharded.spec.muon_settings.method)
    parts = owned(sharded.spec, sharded.owners)
    by_state = [parts_of_state(slots[state.name], state, parts) for state in method.owned]
    return [state for part_states in zip(*by_state, strict=True) for state in part_states]


def states_of_owners(sharded: ShardedParam) -> tuple[State, ...]:
    """Return the parameter's states that are at owners."""
    return matrix_method(sharded.spec.muon_settings.method).owned if sharded.owners else ()


def each_matrix(sharded: ShardedParam, state: State, held: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each matrix that this rank owns, and its part ``[a, b]`` of the state, a view."""
    parts = owned(sharded.spec, sharded.owners)
    for part, matrices in zip(parts, parts_of_state(held, state, parts), strict=True):
        yield from enumerate(matrices, part.first)


def every_shape(sharded: ShardedParam, state: State) -> dict[int, tuple[int, int]]:
    """Return the shape of a state for each matrix of the whole parameter, by number."""
    return {number: state.shape(*shape) for number, shape in enumerate(matrix_shapes(sharded.spec))}
