"""The writes of a step: momenta, states, matrices and all other parameters. The checks have passed before."""

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
from compile_muon.engine.trained import OptimizerState
from compile_muon.engine.written import are_first, gradient_of, restore_if_found_inf, round_masters, weight_of
from compile_muon.kernels import Averages, average, muon_apply
from compile_muon.passes.methods import After, ElementMethod, MatrixMethod, Piece
from compile_muon.passes.methods.method import STEP

__all__ = ["Prepared", "advance", "commit", "commit_states", "commit_weights"]


def commit(
    trained: OptimizerState,
    made: Directions,
    fetches: Mapping[ShardedParam, int],
    found_inf: Tensor | None = None,
    rates: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> None:
    """Write momenta, states and parameters, then call the ``after_commit`` hooks.

    ``made`` is emptied, to free each direction once it is written. ``fetches``: the fetch of the momentum that each
    direction was made of. ``found_inf``: 1.0 on the device for nothing to be written, None if the host has decided to
    write. ``rates``: returns the rates of a group as tensors (CUDA graphs); None for the numbers it holds.
    """
    matrices, rest = [], []
    for group in trained.optimizer.param_groups:
        method, params = trained.method(group), trained.with_gradient(group)
        own_rates: Mapping[str, Any] = group if rates is None else rates(group)
        if isinstance(method, MatrixMethod):
            directions = {sharded: made.tensors.pop(sharded.name) for sharded in params}
            new_states = {sharded: made.states.pop(sharded.name) for sharded in params if sharded.name in made.states}
            if method.has(STEP.name) and params:
                own_rates = {**own_rates, STEP.name: params[0].graph_scalars[2 + method.graph_rates.index(STEP.name)]}
            if params and params[0].now.muon_settings.phase in method.idle:
                own_rates = {**own_rates, "weight_decay": 0.0}
            adjust_lr = None if method.adjust_lr is None else trained.config.muon.adjust_lr or method.adjust_lr
            scale = _unscaled if adjust_lr is None else partial(trained.scale, adjust_lr)
            projected = {a: made.projected.pop(a.name) for a in params if a.name in made.projected}
            matrices.append(Matrices(method, own_rates, directions, scale, new_states, projected))
        elif isinstance(method, ElementMethod):
            rest.append((method, own_rates, params))
    provider, ledger = trained.state_provider, trained.ledger
    # Master weights on a disk are written with the states. Without any, weights move only after the states are safe,
    # so that a failing disk leaves them as they were.
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
            for method, element_rates, params in rest:
                for chosen, states in trained.provide(params, StateRequest.ALL):
                    commit_elements(method, element_rates, chosen, states, found_inf)
    if not (provider.all_resident or masters):
        with ledger.range("step commit muon"):
            commit_weights(prepared, trained.summed, trained.group, found_inf)
    for write in ledger.hooks.after_commit:
        write(found_inf)


def _unscaled(rows: int, cols: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Prepared:
    """Matrices whose states are written, and whose weights are not."""

    groups: Sequence[Matrices]
    averaged: bool  # one launch is still to move momenta together with the weights
    parts: Sequence[tuple[Part, Piece, After]]  # of methods that are not ``plain``


def commit_states(
    groups: Sequence[Matrices], provide: ProvideStates, found_inf: Tensor | None, *, all_resident: bool
) -> Prepared:
    """Move momenta toward the gradients, and write all other states. With ``all_resident``, :func:`commit_weights`
    moves the momenta that one launch can move together with weights."""
    pieces: list[tuple[Part, Piece, After]] = []
    all_parts = [
        Part(group, sharded, part, place)
        for group in groups
        if not group.plain
        for sharded in group.directions
        for place, part in enumerate(sharded.now.parts)
    ]
    summed: dict[ShardedParam, list[tuple[Part, Tensor | None]]] = {}
    for part, sums in zip(all_parts, sums_of_rows(all_parts, provide), strict=True):
        summed.setdefault(part.sharded, []).append((part, sums))
    for group in groups:
        if group.joint and all_resident:
            continue
        for sharded_params, states in provide(
            list(group.directions), StateRequest.STATES if group.plain else StateRequest.STATES_MASTERS_READ
        ):
            rows = dict(zip(sharded_params, states, strict=True))
            # States larger than a buffer arrive by rows; such a method has only a momentum, so pieces are made once.
            first = {a: {} if ROWS in row else row for a, row in rows.items() if are_first(a, row)}
            pieces += make_pieces([pair for sharded in first for pair in summed.get(sharded, ())], first, found_inf)
            for sharded, new in group.states.items():
                old_states = states_at_owner(sharded, rows[sharded]) if sharded in rows else []
                for old, own in zip(old_states, new, strict=False):
                    with restore_if_found_inf(found_inf, [old]):
                        old.copy_(own)
            momenta = {a: local_tensor(row["momentum_buffer"]) for a, row in rows.items() if "momentum_buffer" in row}
            if not momenta:
                continue
            with restore_if_found_inf(found_inf, list(momenta.values())):
                projected_grads = {sharded: projected.gradient for sharded, projected in group.projected.items()}
                grads = [projected_grads[a] if a in projected_grads else gradient_of(a, rows[a]) for a in momenta]
                directions = [group.directions[sharded] for sharded in momenta]
                advance(group.method, list(momenta.values()), grads, directions, group.rates)
    return Prepared(groups, all_resident, pieces)


def commit_weights(
    prepared: Prepared,
    summed: Sequence[ShardedParam],
    everyone: dist.ProcessGroup | None,
    found_inf: Tensor | None,
    provide: ProvideStates | None = None,
) -> None:
    """Move matrices along their directions.

    ``summed``: matrices of methods with facts, with a gradient or without, equal on all ranks (``everyone``).
    ``provide`` yields master weights; None where no parameter is a rounded copy.
    """
    totals = totals_of([(part, after) for part, _, after in prepared.parts], summed, everyone)
    parts_of: dict[ShardedParam, list[tuple[Part, Piece, After]]] = {}
    for prepared_part in prepared.parts:
        parts_of.setdefault(prepared_part[0].sharded, []).append(prepared_part)
    for group in prepared.groups:
        matrices = list(group.directions)
        for sharded_params, states in (
            [(matrices, [{} for _ in matrices])] if provide is None else provide(matrices, StateRequest.MASTERS)
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
    """Move weights by decay and direction, and momenta with them if ``averaged``, in one launch."""
    averaged = averaged and group.joint
    # (weight, direction), or (weight, direction, momentum, gradient), for each matrix or stack of equal ones.
    rows: list[tuple[Tensor, ...]] = []
    scales: list[float] = []
    for sharded, weight in weights.items():
        direction = group.directions[sharded]
        tensors = (weight, direction, *((sharded.momentum, sharded.local_grad) if averaged else ()))
        parts = sharded.now.parts
        part_scales = [group.scale(part.rows, part.cols) for part in parts]
        if len(set(part_scales)) > 1:  # unequal matrices of a view
            rows += [tuple(part.of(tensor) for tensor in tensors) for part in parts]
            scales += part_scales
        elif part_scales:
            rows.append(tensors)
            scales.append(part_scales[0])
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
    """Move momenta toward the gradients by the method's rule."""
    if method.advance is not None:
        method.advance(momenta, grads, directions, rates)
    else:
        average(Averages(momenta, grads, 1 - rates["momentum"]))
