"""States that are whole at the owners of matrices: who owns which, and what graphs and checkpoints see of them.

The owners of a parameter are dealt once, when it is sharded, and stay: nothing of these states travels.
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

__all__ = [
    "deal_owners",
    "each_matrix",
    "every_shape",
    "matrices_here",
    "method_of_matrix",
    "owners_of",
    "states_at_owner",
    "states_kept",
]


def method_of_matrix(sharded: ShardedParam) -> MatrixMethod | None:
    """The method of a matrix; None of all else."""
    return None if sharded.spec.muon is None else matrix_method(sharded.spec.muon.method)


def owners_of(specs: Mapping[str, ParamSpec], costs: Costs) -> dict[str, tuple[int, ...]]:
    """Who owns the matrices of those whose methods keep states at owners, by name; the same on every rank."""
    keeping = {n: s for n, s in specs.items() if s.muon is not None and matrix_method(s.muon.method).owned}
    dealt = by_parameter(list(keeping.values()), assign_owners(list(keeping.values()), costs))
    return {name: tuple(own) for name, own in zip(keeping, dealt, strict=True)}


def deal_owners(sharded_params: Sequence[ShardedParam]) -> None:
    """Tell the parameters of what is trained from now on."""
    dealt = owners_of({sharded.name: sharded.spec for sharded in sharded_params}, sharded_params[0].ledger.costs)
    for sharded in sharded_params:
        sharded.own(dealt.get(sharded.name, ()))


def states_at_owner(sharded: ShardedParam, slots: Mapping[str, Tensor]) -> list[Tensor]:
    """What this rank owns of a parameter's, ``[count, a, b]``, part by part: the same memory.

    Args:
        slots: of the optimizer's state.
    """
    if not sharded.owners:
        return []
    method = matrix_method(sharded.spec.muon_settings.method)
    parts = owned(sharded.spec, sharded.owners)
    columns = [parts_of_state(slots[state.name], state, parts) for state in method.owned]
    return [state for of_part in zip(*columns, strict=True) for state in of_part]


def states_kept(sharded: ShardedParam) -> tuple[State, ...]:
    """The states of a parameter that are at owners."""
    return matrix_method(sharded.spec.muon_settings.method).owned if sharded.owners else ()


def each_matrix(sharded: ShardedParam, state: State, held: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Number and state of each matrix that this rank owns, ``[a, b]``: the same memory."""
    parts = owned(sharded.spec, sharded.owners)
    for part, own in zip(parts, parts_of_state(held, state, parts), strict=True):
        yield from enumerate(own, part.first)


def matrices_here(sharded: ShardedParam) -> list[int]:
    """Numbers of the matrices of a parameter that this rank owns."""
    return [part.first + place for part in owned(sharded.spec, sharded.owners) for place in range(part.count)]


def every_shape(sharded: ShardedParam, state: State) -> dict[int, tuple[int, int]]:
    """The shape of a state of each matrix of a whole parameter, by number."""
    return {number: state.shape(*shape) for number, shape in enumerate(matrix_shapes(sharded.spec))}
