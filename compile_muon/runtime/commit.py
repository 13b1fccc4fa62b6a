"""The writes of a step: momenta, states of methods, matrices and all else. What is read here has been checked before.

A method that needs sums over whole matrices gets them in one all-reduce for all its matrices, which the host does not
wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.kernels import Averages, muon_apply
from compile_muon.passes.methods import After, ElementMethod, MatrixMethod, Piece, matrix_method
from compile_muon.passes.spec import decode_dtype
from compile_muon.passes.torch_private import group_named
from compile_muon.passes.views import Part
from compile_muon.runtime.account import Account
from compile_muon.runtime.lender import GRADIENT, MASTER, WEIGHT, Lent
from compile_muon.runtime.qk_clip import clip_heads
from compile_muon.runtime.shards import local_tensor
from compile_muon.runtime.trained import Trained

__all__ = ["Lend", "Matrices", "Prepared", "advance", "commit", "commit_elements", "commit_states", "commit_weights"]


#: accounts, what of them -> some of them after the other, each with its states: what is written to these is kept. The
#: momentum is one of them, but where it was moved already.
Lend = Callable[[Sequence[Account], Lent], Iterator[tuple[Sequence[Account], Sequence[MutableMapping[str, Tensor]]]]]


def commit(
    trained: Trained,
    directions: dict[str, Tensor],
    fetches: Mapping[Account, int],
    found_inf: Tensor | None = None,
    rates: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Tensor | None:
    """Write momenta, moments and parameters.

    Args:
        directions: by name; each is let go once it is written.
        fetches: which fetch of the momentum each of them is made of, where they were fetched.
        found_inf: 1.0 on the device for nothing to be written; None if the host knows that all may be.
        rates: of a group; None for those that it holds.
    Returns:
        The largest logit that ``qk_clip`` has seen, on the device; None without it.
    """
    matrices, rest = [], []
    for group in trained.optimizer.param_groups:
        method, own = trained.method(group), trained.with_gradient(group)
        own_rates: Mapping[str, Any] = group if rates is None else rates(group)
        if isinstance(method, MatrixMethod):
            made = {account: directions.pop(account.name) for account in own}
            scale = partial(trained.scale, trained.config.muon.adjust_lr or method.adjust_lr)
            matrices.append(Matrices(method, own_rates, made, scale))
        elif isinstance(method, ElementMethod):
            rest.append((method, own_rates, own))
    home, ledger = trained.home, trained.ledger
    beside, lending = home is None, partial(lend, trained)
    # Where the device decides whether to write, no momentum has been moved for good.
    moved = home.moved(fetches) if home is not None and found_inf is None else frozenset[Account]()
    # What a disk keeps of weights is written with the states; else one that fails has moved nothing.
    masters = any(account.spec.master for account in trained.muon)
    with home.writing(found_inf) if home is not None else nullcontext():
        with ledger.range("step commit muon"):
            prepared = commit_states(matrices, partial(lending, moved=moved), found_inf, beside=beside)
            if home is not None and masters and trained.summed:
                home.confirm()
            if beside or masters:
                commit_weights(prepared, trained.summed, trained.group, found_inf, lending if masters else None)
        with ledger.range("step commit adamw"):
            for method, taken, own in rest:
                for chosen, states in lending(own, Lent.ALL):
                    commit_elements(method, taken, chosen, states, found_inf)
    if not (beside or masters):
        with ledger.range("step commit muon"):
            commit_weights(prepared, trained.summed, trained.group, found_inf)
    threshold = trained.config.muon.qk_clip
    return None if threshold is None else clip_heads(trained.muon, threshold, trained.group, found_inf)


def lend(
    trained: Trained, accounts: Sequence[Account], what: Lent, *, moved: Collection[Account] = ()
) -> Iterator[tuple[Sequence[Account], Sequence[MutableMapping[str, Tensor]]]]:
    """Their states, to be read and written; all at once where they are beside the parameters.

    Args:
        moved: whose momentum has been moved already.
    """
    if trained.home is not None:
        yield from trained.home.lend(accounts, what, trained.ledger.status.step, moved=moved)
    elif accounts:
        yield accounts, [trained.optimizer.state[account.param] for account in accounts]


def weight_of(account: Account, states: Mapping[str, Tensor]) -> Tensor:
    """What a step writes of a parameter: the shard, the master weight that it is rounded from, or the host's copy."""
    if WEIGHT in states:
        return states[WEIGHT]
    return local_tensor(states[MASTER]) if account.spec.master else account.local.detach()


def gradient_of(account: Account, states: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
    """The shard of ``.grad`` in the dtype of the states, or a copy of it."""
    return states.get(GRADIENT, account.local_grad).to(decode_dtype(account.spec.state_dtype))


@dataclass(frozen=True, eq=False)
class Matrices:
    """What a step writes of one group of matrices.

    Args:
        method: of the group.
        rates: of the group.
        directions: of the shards of those with a gradient, in any floating dtype.
        scale: factor on the learning rate, of the rows and columns of a matrix.
    """

    method: MatrixMethod
    rates: Mapping[str, Any]
    directions: Mapping[Account, Tensor]
    scale: Callable[[int, int], float]

    @property
    def plain(self) -> bool:
        """Whether all of it is one decay and one addition."""
        return self.method.after is None and not self.rates.get("cautious_decay", False)

    @property
    def joint(self) -> bool:
        """Whether one launch may move momenta and weights."""
        return self.plain and self.method.advance is None and self.method.keeps_momentum


@dataclass(frozen=True)
class Prepared:
    """What is left to be written of matrices once their states are: weights alone.

    Args:
        averaged: whether momenta are still to be moved, together with the weights.
        parts: of methods with more to say than a direction.
    """

    groups: Sequence[Matrices]
    averaged: bool
    parts: Sequence[tuple[_Part, Piece, After]]


def commit_states(groups: Sequence[Matrices], lend: Lend, found_inf: Tensor | None, *, beside: bool) -> Prepared:
    """Move momenta toward the gradients, and write further states.

    Args:
        lend: gives the states.
        found_inf: as for :func:`~compile_muon.kernels.muon_apply`.
        beside: whether all momenta are beside their parameters: :func:`commit_weights` then moves those that one launch
            can move together with the weights.
    """
    found: list[tuple[_Part, Piece, After]] = []
    parts = [
        _Part(group, account, part)
        for group in groups
        if not group.plain
        for account in group.directions
        for part in account.spec.parts
    ]
    summed: dict[Account, list[tuple[_Part, Tensor | None]]] = {}
    for part, sums in zip(parts, _row_sums(parts), strict=True):
        summed.setdefault(part.account, []).append((part, sums))
    for group in groups:
        if group.joint and beside:
            continue
        for accounts, states in lend(list(group.directions), Lent.STATES if group.plain else Lent.BESIDE_MASTERS):
            of = dict(zip(accounts, states, strict=True))
            found += _after([pair for account in of for pair in summed.get(account, ())], of, found_inf)
            momenta = {a: local_tensor(row["momentum_buffer"]) for a, row in of.items() if "momentum_buffer" in row}
            if not momenta:
                continue
            with _unless(found_inf, list(momenta.values())):
                grads = [gradient_of(account) for account in momenta]
                advance(group.method, list(momenta.values()), grads, group.rates["momentum"])
    return Prepared(groups, beside, found)


def commit_weights(
    prepared: Prepared,
    summed: Sequence[Account],
    everyone: dist.ProcessGroup | None,
    found_inf: Tensor | None,
    lend: Lend | None = None,
) -> None:
    """Move matrices along their directions.

    Args:
        summed: matrices of methods with facts, with a gradient or without: on every rank the same.
        everyone: all ranks of the optimizer.
        found_inf: as for :func:`~compile_muon.kernels.muon_apply`.
        lend: gives the master weights of those that are rounded copies; None where none is.
    """
    totals = _totals([(part, after) for part, _, after in prepared.parts], summed, everyone)
    parts_of: dict[Account, list[tuple[_Part, Piece, After]]] = {}
    for made in prepared.parts:
        parts_of.setdefault(made[0].account, []).append(made)
    for group in prepared.groups:
        moved = list(group.directions)
        for accounts, states in [(moved, [{} for _ in moved])] if lend is None else lend(moved, Lent.MASTERS):
            weights = {account: weight_of(account, own) for account, own in zip(accounts, states, strict=True)}
            if group.plain:
                _commit_plain(group, weights, averaged=prepared.averaged, found_inf=found_inf)
            for account, weight in weights.items():
                for part, piece, after in parts_of.get(account, ()):
                    _write(part, piece, after, weight, totals.get(account), found_inf)
            round_masters(weights)


def round_masters(weights: Mapping[Account, Tensor]) -> None:
    """Parameters that are rounded copies follow their master weights, which a step has written."""
    for account, master in weights.items():
        if account.spec.master:
            account.local.detach().copy_(master)


def _commit_plain(
    group: Matrices, weights: Mapping[Account, Tensor], *, averaged: bool, found_inf: Tensor | None
) -> None:
    averaged = averaged and group.joint
    # What is moved, along what, and momentum and gradient, a row each.
    rows: list[tuple[Tensor, ...]] = []
    scales: list[float] = []
    for account, weight in weights.items():
        direction = group.directions[account]
        tensors = (weight, direction, *((account.momentum, account.local_grad) if averaged else ()))
        parts = account.spec.parts
        own = [group.scale(part.rows, part.cols) for part in parts]
        if len(set(own)) > 1:  # unequal matrices of a view
            rows += [tuple(part.of(tensor) for tensor in tensors) for part in parts]
            scales += own
        elif own:
            rows.append(tensors)
            scales.append(own[0])
    if rows:
        params, directions, *moving = (list(column) for column in zip(*rows, strict=True))
        muon_apply(
            params,
            directions,
            lr=group.rates["lr"],
            weight_decay=group.rates.get("weight_decay", 0.0),
            scale=scales,
            # torch.optim.Muon's `buf.lerp_(grad, 1 - momentum)`, which is also what the direction was made with.
            averages=Averages(moving[0], moving[1], 1 - group.rates["momentum"]) if averaged else None,
            found_inf=found_inf,
        )


def advance(method: MatrixMethod, momenta: Sequence[Tensor], grads: Sequence[Tensor], beta: float) -> None:
    """Move momenta toward the gradients, as the method does."""
    if method.advance is not None:
        method.advance(momenta, grads, beta)
    else:
        torch._foreach_lerp_(list(momenta), list(grads), 1 - beta)


@contextmanager
def _unless(found_inf: Tensor | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """What the block writes to these is put back where ``found_inf`` is 1."""
    before = [] if found_inf is None else [tensor.clone() for tensor in tensors]
    yield
    if found_inf is not None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(found_inf == 1, old, tensor))


@contextmanager
def _in_rows(tensor: Tensor) -> Iterator[Tensor]:
    """Memory in rows, which ends up in ``tensor``: a convolution may lie channels last."""
    rows = tensor.contiguous()
    yield rows
    if rows is not tensor:
        tensor.copy_(rows)


# ------------------------------------------------------------------------------------------- methods with more to say


class _Part(NamedTuple):
    """Equal matrices of one account."""

    group: Matrices
    account: Account
    part: Part

    def state(self, name: str, states: Mapping[str, Tensor]) -> Tensor:
        """``[n, r, c]`` or ``[n, r, 1]``, the same memory."""
        tensor = local_tensor(states[name])
        each = {state.name: state.each for state in self.group.method.states}[name]
        return self.part.of_rows(tensor) if each == "row" else self.part.of(tensor)

    @property
    def direction(self) -> Tensor:
        wide = torch.promote_types(decode_dtype(self.account.spec.state_dtype), torch.float32)
        return self.part.of(self.group.directions[self.account]).to(wide)

    def row_sums(self) -> Tensor | None:
        """Of this rank's columns, where the method asks for some."""
        if self.group.method.row_sums is None:
            return None
        direction = self.direction
        return self.group.method.row_sums(direction, self.part.of(self.account.local.detach()).to(direction.dtype))

    def piece(self, states: Mapping[str, Tensor], sums: Tensor | None) -> Piece:
        direction = self.direction
        return Piece(
            direction=direction,
            weight=self.part.of(weight_of(self.account, states)).to(direction.dtype),
            grad=self.part.of(gradient_of(self.account)),
            states={state.name: self.state(state.name, states) for state in self.group.method.states},
            sums=sums,
            rates=self.group.rates,
            rows=self.part.rows,
            cols=self.part.cols,
        )


def _row_sums(parts: Sequence[_Part]) -> list[Tensor | None]:
    """The sums over rows that methods ask for; where ranks have parts of the same rows, summed over these ranks, for
    all that share a group at once."""
    sums = [part.row_sums() for part in parts]
    shared: dict[str, list[Tensor]] = {}
    for part, own in zip(parts, sums, strict=True):
        if own is not None and part.account.spec.cut_in_columns:
            shared.setdefault(part.account.spec.layout.tensor.group, []).append(own)
    for group, several in shared.items():
        joined = torch.cat([x.reshape(-1) for x in several])
        dist.all_reduce(joined, group=group_named(group))
        for x, whole in zip(several, joined.split([x.numel() for x in several]), strict=True):
            x.copy_(whole.view(x.shape))
    return sums


def _after(
    parts: Sequence[tuple[_Part, Tensor | None]],
    states: Mapping[Account, Mapping[str, Tensor]],
    found_inf: Tensor | None,
) -> list[tuple[_Part, Piece, After]]:
    """What methods make of directions, their new states written."""
    found = []
    for part, sums in parts:
        piece = part.piece(states[part.account], sums)
        after = After(piece.direction) if part.group.method.after is None else part.group.method.after(piece)
        found.append((part, replace(piece, states={}), replace(after, states={})))
        written = {name: part.state(name, states[part.account]) for name in after.states}
        with _unless(found_inf, list(written.values())):
            for name, new in after.states.items():
                written[name].copy_(new)
    return found


def _totals(
    own: Sequence[tuple[_Part, After]], summed: Sequence[Account], everyone: dist.ProcessGroup | None
) -> dict[Account, Tensor]:
    """Facts of the whole matrices of each account, ``[matrices, k]``.

    Args:
        own: of this rank's rows.
    """
    if not summed:
        return {}
    sizes = [a.spec.matrix_count * matrix_method(a.spec.muon_settings.algorithm).facts for a in summed]
    dtypes = [after.facts.dtype for _, after in own if after.facts is not None]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    # Whoever has no rows of a matrix, or no gradient, brings zeros: every rank as many numbers.
    vector = torch.zeros(sum(sizes), dtype=dtype, device=summed[0].local.device)
    found = {
        account: rows.view(account.spec.matrix_count, -1)
        for account, rows in zip(summed, vector.split(sizes), strict=True)
    }
    for part, after in own:
        if after.facts is not None:
            rows = found[part.account][part.part.first : part.part.first + len(after.facts)]
            # What several ranks hold would be counted once for each.
            rows.add_(after.facts / (1 if everyone is None else part.account.spec.layout.copies))
    if everyone is not None:
        dist.all_reduce(vector, group=everyone)
    return found


def _write(
    part: _Part, piece: Piece, after: After, weight: Tensor, facts: Tensor | None, found_inf: Tensor | None
) -> None:
    group = part.group
    lr, decay = group.rates["lr"], group.rates.get("weight_decay", 0.0)
    keep: Any = 1 - lr * decay
    move: Any = -(lr * group.scale(piece.rows, piece.cols))
    with _in_rows(weight) as rows, _unless(found_inf, [rows]):
        piece = replace(piece, weight=part.part.of(rows).to(piece.direction.dtype))
        if group.method.finish is not None and facts is not None:
            own = facts[part.part.first : part.part.first + len(piece.direction)].to(piece.direction.dtype)
            keep, move = group.method.finish(own, keep, move, piece)
        keep, move = (x[:, None, None] if isinstance(x, Tensor) and x.ndim else x for x in (keep, move))
        if group.rates.get("cautious_decay", False):
            keep = 1 - (1 - keep) * (after.direction * piece.weight >= 0)
        part.part.of(rows).copy_(piece.weight * keep + after.direction * move)


# ------------------------------------------------------------------------------------------- element by element


def commit_elements(
    method: ElementMethod,
    rates: Mapping[str, Any],
    accounts: Sequence[Account],
    slots: Sequence[MutableMapping[str, Tensor]],
    found_inf: Tensor | None,
) -> None:
    """One step of a method for all that is no matrix, on the shards.

    Args:
        accounts: parameters with a gradient.
        slots: the optimizer's states of each; of all, or of none, with what :class:`~.lender.Lender` adds for the host:
            then whoever lent it brings the weights back.
        found_inf: as for :func:`~compile_muon.kernels.muon_apply`.
    """
    if not accounts:
        return
    step, on_host = method.step, GRADIENT in slots[0]
    if on_host:
        assert method.on_host is not None
        step, found_inf = method.on_host, None
        rates = {name: rate.item() if isinstance(rate, Tensor) else rate for name, rate in rates.items()}
    for account, row in zip(accounts, slots, strict=True):
        for state in method.states:  # kernels count steps themselves; a checkpoint may have brought them to the host
            count = row[state.name]
            if state.each == "parameter" and account.local.is_cuda and not (on_host or count.is_cuda):
                row[state.name] = count.to(account.local.device, non_blocking=True)
    params = [weight_of(account, row) for account, row in zip(accounts, slots, strict=True)]
    states: list[MutableMapping[str, Tensor]] = [
        {state.name: local_tensor(row[state.name]) for state in method.states} for row in slots
    ]
    written = [] if method.withholds and params[0].is_cuda else [*params, *(x for row in states for x in row.values())]
    decays = rates.get("weight_decay", 0.0) if rates.get("cautious_decay", False) else 0.0
    with _unless(found_inf if written else None, written):
        before = [param.clone() for param in params] if decays else []
        given = {**rates, "weight_decay": 0.0} if decays else rates
        grads = [gradient_of(account, row) for account, row in zip(accounts, slots, strict=True)]
        step(params, grads, states, given, found_inf)
        for param, old in zip(params, before, strict=False):
            # Decay where the step went toward zero; a weight of zero has nothing to lose.
            param.sub_(rates["lr"] * decays * old * ((old - param) * old >= 0))
    if not on_host:
        round_masters(dict(zip(accounts, params, strict=True)))
