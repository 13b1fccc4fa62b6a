"""States that owners keep for whole matrices: the owners, and the states as graphs and checkpoints see them.

The owner of a matrix is the rank that orthogonalizes it, assigned when the parameter is sharded: states never travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes.costs import Costs
from compile_muon.passes.exchange.owned import matrix_shapes, owned, parts_of_state
from compile_muon.passes.exchange.owner import assign_owners
from compile_muon.passes.exchange.shares import by_parameter
from compile_muon.passes.language.spec import ParamSpec
from compile_muon.passes.methods import MatrixMethod, State, matrix_method


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
        sharded.own(owners.get(sharded.name, ()))


def states_at_owner(sharded: ShardedParam, slots: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the states that this rank owns of a parameter, ``[count, a, b]``, part by part: views of ``slots``, its
    entry in the optimizer's state."""
    if not sharded.owners:
        return []
    method = matrix_method(sharded.spec.muon_settings.method)
    parts = owned(sharded.spec, sharded.owners)
    by_state = [parts_of_state(slots[state.name], state, parts) for state in method.owned]
    return [state for part_states in zip(*by_state, strict=True) for state in part_states]


def states_kept(sharded: ShardedParam) -> tuple[State, ...]:
    """Return the parameter's states that are at owners."""
    return matrix_method(sharded.spec.muon_settings.method).owned if sharded.owners else ()


def each_matrix(sharded: ShardedParam, state: State, held: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each matrix that this rank owns, and its part ``[a, b]`` of the state, a view."""
    parts = owned(sharded.spec, sharded.owners)
    for part, matrices in zip(parts, parts_of_state(held, state, parts), strict=True):
        yield from enumerate(matrices, part.first)


def matrices_here(sharded: ShardedParam) -> list[int]:
    """Return the numbers of the parameter's matrices that this rank owns."""
    return [part.first + place for part in owned(sharded.spec, sharded.owners) for place in range(part.count)]


def every_shape(sharded: ShardedParam, state: State) -> dict[int, tuple[int, int]]:
    """Return the shape of a state for each matrix of the whole parameter, by number."""
    return {number: state.shape(*shape) for number, shape in enumerate(matrix_shapes(sharded.spec))}
