"""The writes of a step: momenta, states of methods, matrices and all else. What is read here has been checked before.

A method that needs sums over whole matrices gets them in one all-reduce for all its matrices, which the host does not
wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.kernels import Averages, muon_apply
from compile_muon.passes.methods import After, ElementMethod, MatrixMethod, Piece, matrix_method
from compile_muon.passes.torch_private import group_named
from compile_muon.runtime.account import Account
from compile_muon.runtime.shards import local_tensor
from compile_muon.runtime.states import cut_in_columns, matrices_of, view

__all__ = ["Matrices", "commit_elements", "commit_matrices"]


@dataclass(frozen=True)
class Matrices:
    """What a step writes of one group of matrices.

    Args:
        method: of the group.
        rates: of the group.
        accounts: those with a gradient.
        directions: of their shards, in any floating dtype.
        scales: factor on the learning rate of each.
        states: the optimizer's, of each.
    """

    method: MatrixMethod
    rates: Mapping[str, Any]
    accounts: Sequence[Account]
    directions: Sequence[Tensor]
    scales: Sequence[float]
    states: Sequence[Mapping[str, Tensor]]

    @property
    def plain(self) -> bool:
        """Whether all of it is one decay and one addition."""
        return self.method.after is None and not self.rates.get("cautious_decay", False)


def commit_matrices(
    groups: Sequence[Matrices], summed: Sequence[Account], everyone: dist.ProcessGroup | None, withheld: Tensor | None
) -> None:
    """Move momenta toward the gradients, and matrices along their directions.

    Args:
        summed: matrices of methods with facts, with a gradient or without: on every rank the same.
        everyone: all ranks of the optimizer.
        withheld: as for :func:`~compile_muon.kernels.muon_apply`.
    """
    for group in groups:
        if group.plain and group.accounts:
            _commit_plain(group, withheld)
    rest = [(group, i) for group in groups if not group.plain for i in range(len(group.accounts))]
    pieces = _with_sums([(group.method, group.accounts[i], _piece(group, i)) for group, i in rest])
    afters = [
        After(piece.direction) if group.method.after is None else group.method.after(piece)
        for (group, _), piece in zip(rest, pieces, strict=True)
    ]
    made = {group.accounts[i]: after for (group, i), after in zip(rest, afters, strict=True)}
    totals = _totals({a: after.facts for a, after in made.items() if after.facts is not None}, summed, everyone)
    for (group, i), piece, after in zip(rest, pieces, afters, strict=True):
        _write(group, i, piece, after, totals.get(group.accounts[i]), withheld)
    for group in groups:
        if not group.plain and group.accounts:
            _advance(group, withheld)


def _commit_plain(group: Matrices, withheld: Tensor | None) -> None:
    accounts, averaged = group.accounts, group.method.advance is None
    # torch.optim.Muon's `buf.lerp_(grad, 1 - momentum)`, which is also what the direction was made with.
    averages = Averages([a.momentum for a in accounts], [a.local_grad for a in accounts], 1 - group.rates["momentum"])
    muon_apply(
        [account.local.detach() for account in accounts],
        list(group.directions),
        lr=group.rates["lr"],
        weight_decay=group.rates.get("weight_decay", 0.0),
        scale=list(group.scales),
        averages=averages if averaged else None,
        withheld=withheld,
    )
    if not averaged:
        _advance(group, withheld)


def _advance(group: Matrices, withheld: Tensor | None) -> None:
    momenta = [account.momentum for account in group.accounts]
    grads = [account.local_grad for account in group.accounts]
    with _unless(withheld, momenta):
        if group.method.advance is not None:
            group.method.advance(momenta, grads, group.rates["momentum"])
        else:
            torch._foreach_lerp_(momenta, grads, 1 - group.rates["momentum"])


@contextmanager
def _unless(withheld: Tensor | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """What the block writes to these is put back where ``withheld`` is 1."""
    before = [] if withheld is None else [tensor.clone() for tensor in tensors]
    yield
    if withheld is not None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(withheld == 1, old, tensor))


# ------------------------------------------------------------------------------------------- methods with more to say


def _piece(group: Matrices, i: int) -> Piece:
    account, spec = group.accounts[i], group.accounts[i].spec
    wide = torch.promote_types(account.local.dtype, torch.float32)
    return Piece(
        direction=view(group.directions[i].to(wide), spec),
        weight=view(account.local.detach().to(wide), spec),
        grad=view(account.local_grad, spec),
        states={s.name: view(local_tensor(group.states[i][s.name]), spec) for s in group.method.states},
        sums=None,
        rates=group.rates,
        rows=spec.muon_settings.rows,
        cols=spec.muon_settings.cols,
    )


def _with_sums(found: Sequence[tuple[MatrixMethod, Account, Piece]]) -> list[Piece]:
    """The pieces with the sums over rows that their methods ask for; where ranks have parts of the same rows, summed
    over these ranks, for all that share a group at once."""
    sums = [None if m.row_sums is None else m.row_sums(p.direction, p.weight) for m, _, p in found]
    parts: dict[str, list[Tensor]] = {}
    for (_, account, _), own in zip(found, sums, strict=True):
        if own is not None and cut_in_columns(account.spec):
            parts.setdefault(account.spec.layout.tensor.group, []).append(own)
    for group, several in parts.items():
        joined = torch.cat([x.reshape(-1) for x in several])
        dist.all_reduce(joined, group=group_named(group))
        for x, whole in zip(several, joined.split([x.numel() for x in several]), strict=True):
            x.copy_(whole.view(x.shape))
    return [replace(piece, sums=own) for (_, _, piece), own in zip(found, sums, strict=True)]


def _totals(
    own: Mapping[Account, Tensor], summed: Sequence[Account], everyone: dist.ProcessGroup | None
) -> dict[Account, Tensor]:
    """Facts of whole matrices, ``[n, k]``, of those that this rank has rows of.

    Args:
        own: of this rank's rows.
    """
    if everyone is None or not summed:
        return dict(own)
    places = [
        (account, *matrices_of(account.spec), matrix_method(account.spec.muon_settings.algorithm).facts)
        for account in summed
    ]
    dtypes = [facts.dtype for facts in own.values()]
    # Whoever has no rows of a matrix, or no gradient, brings zeros: every rank as many numbers.
    vector = torch.zeros(
        sum(count * width for _, count, _, width in places),
        dtype=torch.float64 if torch.float64 in dtypes else torch.float32,
        device=summed[0].local.device,
    )
    rows = dict(zip(summed, vector.split([count * width for _, count, _, width in places]), strict=True))
    mine = {}
    for account, count, start, width in places:
        if account in own:
            mine[account] = rows[account].view(count, width)[start : start + len(own[account])]
            # What several ranks hold would be counted once for each.
            mine[account].copy_(own[account] / account.spec.layout.copies)
    dist.all_reduce(vector, group=everyone)
    return mine


def _write(group: Matrices, i: int, piece: Piece, after: After, facts: Tensor | None, withheld: Tensor | None) -> None:
    local = group.accounts[i].local.detach()
    lr, decay = group.rates["lr"], group.rates.get("weight_decay", 0.0)
    keep: Any = 1 - lr * decay
    move: Any = -(lr * group.scales[i])
    if group.method.finish is not None and facts is not None:
        keep, move = group.method.finish(facts.to(piece.direction.dtype), keep, move, piece)
    keep, move = (x[:, None, None] if isinstance(x, Tensor) and x.ndim else x for x in (keep, move))
    if group.rates.get("cautious_decay", False):
        keep = 1 - (1 - keep) * (after.direction * piece.weight >= 0)
    states = {name: local_tensor(group.states[i][name]) for name in after.states}
    with _unless(withheld, [local, *states.values()]):
        local.copy_((piece.weight * keep + after.direction * move).view(local.shape))
        for name, new in after.states.items():
            states[name].copy_(new.view(states[name].shape))


# ------------------------------------------------------------------------------------------- element by element


def commit_elements(
    method: ElementMethod,
    rates: Mapping[str, Any],
    accounts: Sequence[Account],
    slots: Sequence[MutableMapping[str, Tensor]],
    withheld: Tensor | None,
) -> None:
    """One step of a method for all that is no matrix, on the shards.

    Args:
        accounts: parameters with a gradient.
        slots: the optimizer's states of each.
        withheld: as for :func:`~compile_muon.kernels.muon_apply`.
    """
    if not accounts:
        return
    for account, row in zip(accounts, slots, strict=True):
        for state in method.states:  # kernels count steps themselves; a checkpoint may have brought them to the host
            count = row[state.name]
            if state.each == "parameter" and account.local.is_cuda and not count.is_cuda:
                row[state.name] = count.to(account.local.device, non_blocking=True)
    params = [account.local.detach() for account in accounts]
    states: list[MutableMapping[str, Tensor]] = [
        {state.name: local_tensor(row[state.name]) for state in method.states} for row in slots
    ]
    written = [] if method.withholds and params[0].is_cuda else [*params, *(x for row in states for x in row.values())]
    decays = rates.get("weight_decay", 0.0) if rates.get("cautious_decay", False) else 0.0
    with _unless(withheld if written else None, written):
        before = [param.clone() for param in params] if decays else []
        given = {**rates, "weight_decay": 0.0} if decays else rates
        method.step(params, [account.local_grad for account in accounts], states, given, withheld)
        for param, old in zip(params, before, strict=False):
            # Decay where the step went toward zero; a weight of zero has nothing to lose.
            param.sub_(rates["lr"] * decays * old * ((old - param) * old >= 0))
