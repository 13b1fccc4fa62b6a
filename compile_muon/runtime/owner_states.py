"""States that are whole at the owners of matrices: who owns which, and what graphs and checkpoints see of them.

The owners of a parameter are dealt once, when it is sharded, and stay: nothing of these states travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from compile_muon.passes.costs import Costs
from compile_muon.passes.exchange.owned import matrix_shapes, owned, parts_of_state
from compile_muon.passes.exchange.owner import assign_owners
from compile_muon.passes.exchange.shares import by_parameter
from compile_muon.passes.methods import MatrixMethod, State, matrix_method
from compile_muon.passes.spec import ParamSpec
from compile_muon.runtime.account import Account

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


def method_of_matrix(account: Account) -> MatrixMethod | None:
    """The method of a matrix; None of all else."""
    return None if account.spec.muon is None else matrix_method(account.spec.muon.algorithm)


def owners_of(specs: Mapping[str, ParamSpec], costs: Costs) -> dict[str, tuple[int, ...]]:
    """Who owns the matrices of those whose methods keep states at owners, by name; the same on every rank."""
    keeping = {n: s for n, s in specs.items() if s.muon is not None and matrix_method(s.muon.algorithm).owned}
    dealt = by_parameter(list(keeping.values()), assign_owners(list(keeping.values()), costs))
    return {name: tuple(own) for name, own in zip(keeping, dealt, strict=True)}


def deal_owners(accounts: Sequence[Account]) -> None:
    """Tell the accounts of what is trained from now on."""
    dealt = owners_of({account.name: account.spec for account in accounts}, accounts[0].ledger.costs)
    for account in accounts:
        account.own(dealt.get(account.name, ()))


def states_at_owner(account: Account, slots: Mapping[str, Tensor]) -> list[Tensor]:
    """What this rank owns of a parameter's, ``[count, a, b]``, part by part: the same memory.

    Args:
        slots: of the optimizer's state.
    """
    if not account.owners:
        return []
    method = matrix_method(account.spec.muon_settings.algorithm)
    parts = owned(account.spec, account.owners)
    columns = [parts_of_state(slots[state.name], state, parts) for state in method.owned]
    return [state for of_part in zip(*columns, strict=True) for state in of_part]


def states_kept(account: Account) -> tuple[State, ...]:
    """The states of a parameter that are at owners."""
    return matrix_method(account.spec.muon_settings.algorithm).owned if account.owners else ()


def each_matrix(account: Account, state: State, held: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Number and state of each matrix that this rank owns, ``[a, b]``: the same memory."""
    parts = owned(account.spec, account.owners)
    for part, own in zip(parts, parts_of_state(held, state, parts), strict=True):
        yield from enumerate(own, part.first)


def matrices_here(account: Account) -> list[int]:
    """Numbers of the matrices of a parameter that this rank owns."""
    return [part.first + place for part in owned(account.spec, account.owners) for place in range(part.count)]


def every_shape(account: Account, state: State) -> dict[int, tuple[int, int]]:
    """The shape of a state of each matrix of a whole parameter, by number."""
    return {number: state.shape(*shape) for number, shape in enumerate(matrix_shapes(account.spec))}
