"""The writes of a step: momenta, states of methods, matrices and all else; what is read here was checked before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from compile_muon.engine.directions import Directions
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.elements import commit_elements
from compile_muon.engine.owner_states import states_at_owner
from compile_muon.engine.pieces import (
    Matrices,
    Part,
    make_pieces,
    sums_of_rows,
    totals_of,
    write_piece,
)
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import ROWS, ProvideStates, StateRequest
from compile_muon.engine.trained import Trained
from compile_muon.engine.written import are_first, gradient_of, round_masters, unless, weight_of
from compile_muon.kernels import Averages, average, muon_apply
from compile_muon.passes.methods import After, ElementMethod, MatrixMethod, Piece
from compile_muon.passes.methods.method import STEP

__all__ = ["Prepared", "advance", "commit", "commit_states", "commit_weights"]


def commit(
    trained: Trained,
    made: Directions,
    fetches: Mapping[ShardedParam, int],
    found_inf: Tensor | None = None,
    rates: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> None:
    """Write momenta, moments and parameters; and whatever extensions write behind them.

    Args:
        made: each direction is let go once it is written.
        fetches: which fetch of the momentum each of them is made of, where they were fetched.
        found_inf: 1.0 on the device for nothing to be written; None if the host knows that all may be.
        rates: of a group; None for those that it holds.
    """
    matrices, rest = [], []
    for group in trained.optimizer.param_groups:
        method, own = trained.method(group), trained.with_gradient(group)
        own_rates: Mapping[str, Any] = group if rates is None else rates(group)
        if isinstance(method, MatrixMethod):
            found = {sharded: made.found.pop(sharded.name) for sharded in own}
            new = {sharded: made.states.pop(sharded.name) for sharded in own if sharded.name in made.states}
            if method.has(STEP.name) and own:
                own_rates = {**own_rates, STEP.name: own[0].hyper[2 + method.given.index(STEP.name)]}
            if own and own[0].now.muon_settings.phase in method.idle:
                own_rates = {**own_rates, "weight_decay": 0.0}
            adjust_lr = None if method.adjust_lr is None else trained.config.muon.adjust_lr or method.adjust_lr
            scale = _unscaled if adjust_lr is None else partial(trained.scale, adjust_lr)
            projected = {a: made.projected.pop(a.name) for a in own if a.name in made.projected}
            matrices.append(Matrices(method, own_rates, found, scale, new, projected))
        elif isinstance(method, ElementMethod):
            rest.append((method, own_rates, own))
    provider, ledger = trained.state_provider, trained.ledger
    # What a disk keeps of weights is written with the states; else one that fails has moved nothing.
    masters = any(sharded.spec.master for sharded in trained.muon)
    with provider.writing(fetches, found_inf) as confirm:
        trained.torn = True
        with ledger.range("step commit muon"):
            prepared = commit_states(matrices, trained.provide, found_inf, all_resident=provider.all_resident)
            if masters and trained.summed:
                confirm()
            if provider.all_resident or masters:
                commit_weights(prepared, trained.summed, trained.group, found_inf, trained.provide if masters else None)
        with ledger.range("step commit adamw"):
            for method, taken, own in rest:
                for chosen, states in trained.provide(own, StateRequest.ALL):
                    commit_elements(method, taken, chosen, states, found_inf)
    if not (provider.all_resident or masters):
        with ledger.range("step commit muon"):
            commit_weights(prepared, trained.summed, trained.group, found_inf)
    for write in ledger.hooks.after_commit:
        write(found_inf)


def _unscaled(rows: int, cols: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Prepared:
    """What is left to be written of matrices once their states are: weights alone.

    Args:
        averaged: whether momenta are still to be moved, together with the weights.
        parts: of methods with more to say than a direction.
    """

    groups: Sequence[Matrices]
    averaged: bool
    parts: Sequence[tuple[Part, Piece, After]]


def commit_states(
    groups: Sequence[Matrices], provide: ProvideStates, found_inf: Tensor | None, *, all_resident: bool
) -> Prepared:
    """Move momenta toward the gradients, and write further states.

    Args:
        provide: gives the states.
        found_inf: as for :func:`~compile_muon.kernels.muon_apply`.
        all_resident: whether all momenta are resident: :func:`commit_weights` then moves those that one launch can
            move together with the weights.
    """
    found: list[tuple[Part, Piece, After]] = []
    parts = [
        Part(group, sharded, part, place)
        for group in groups
        if not group.plain
        for sharded in group.directions
        for place, part in enumerate(sharded.now.parts)
    ]
    summed: dict[ShardedParam, list[tuple[Part, Tensor | None]]] = {}
    for part, sums in zip(parts, sums_of_rows(parts, provide), strict=True):
        summed.setdefault(part.sharded, []).append((part, sums))
    for group in groups:
        if group.joint and all_resident:
            continue
        for sharded_params, states in provide(
            list(group.directions), StateRequest.STATES if group.plain else StateRequest.STATES_MASTERS_READ
        ):
            of = dict(zip(sharded_params, states, strict=True))
            # A method whose states come some rows after the other keeps nothing but a momentum, and is asked once.
            begun = {a: {} if ROWS in row else row for a, row in of.items() if are_first(a, row)}
            found += make_pieces([pair for sharded in begun for pair in summed.get(sharded, ())], begun, found_inf)
            for sharded, new in group.states.items():
                held = states_at_owner(sharded, of[sharded]) if sharded in of else []
                for old, own in zip(held, new, strict=False):
                    with unless(found_inf, [old]):
                        old.copy_(own)
            momenta = {a: local_tensor(row["momentum_buffer"]) for a, row in of.items() if "momentum_buffer" in row}
            if not momenta:
                continue
            with unless(found_inf, list(momenta.values())):
                given = {sharded: projected.gradient for sharded, projected in group.projected.items()}
                grads = [given[a] if a in given else gradient_of(a, of[a]) for a in momenta]
                directions = [group.directions[sharded] for sharded in momenta]
                advance(group.method, list(momenta.values()), grads, directions, group.rates)
    return Prepared(groups, all_resident, found)


def commit_weights(
    prepared: Prepared,
    summed: Sequence[ShardedParam],
    everyone: dist.ProcessGroup | None,
    found_inf: Tensor | None,
    provide: ProvideStates | None = None,
) -> None:
    """Move matrices along their directions.

    Args:
        summed: matrices of methods with facts, with a gradient or without: on every rank the same.
        everyone: all ranks of the optimizer.
        found_inf: as for :func:`~compile_muon.kernels.muon_apply`.
        provide: gives the master weights of those that are rounded copies; None where none is.
    """
    totals = totals_of([(part, after) for part, _, after in prepared.parts], summed, everyone)
    parts_of: dict[ShardedParam, list[tuple[Part, Piece, After]]] = {}
    for made in prepared.parts:
        parts_of.setdefault(made[0].sharded, []).append(made)
    for group in prepared.groups:
        moved = list(group.directions)
        for sharded_params, states in (
            [(moved, [{} for _ in moved])] if provide is None else provide(moved, StateRequest.MASTERS)
        ):
            weights = {sharded: weight_of(sharded, own) for sharded, own in zip(sharded_params, states, strict=True)}
            if group.plain:
                _commit_plain(group, weights, averaged=prepared.averaged, found_inf=found_inf)
            for sharded, weight in weights.items():
                for part, piece, after in parts_of.get(sharded, ()):
                    write_piece(part, piece, after, weight, totals.get(sharded), found_inf)
            round_masters(sharded_params, states)


def _commit_plain(
    group: Matrices, weights: Mapping[ShardedParam, Tensor], *, averaged: bool, found_inf: Tensor | None
) -> None:
    averaged = averaged and group.joint
    # What is moved, along what, and momentum and gradient, a row each.
    rows: list[tuple[Tensor, ...]] = []
    scales: list[float] = []
    for sharded, weight in weights.items():
        direction = group.directions[sharded]
        tensors = (weight, direction, *((sharded.momentum, sharded.local_grad) if averaged else ()))
        parts = sharded.now.parts
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


def advance(
    method: MatrixMethod,
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    directions: Sequence[Tensor],
    rates: Mapping[str, Any],
) -> None:
    """Move momenta toward the gradients, as the method does."""
    if method.advance is not None:
        method.advance(momenta, grads, directions, rates)
    else:
        average(Averages(momenta, grads, 1 - rates["momentum"]))
