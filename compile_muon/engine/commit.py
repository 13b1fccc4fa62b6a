"""The writes of a step: momenta, states, matrices and all other parameters. The checks have passed before.

A method whose step is not one decay and one addition sees pieces: this rank's parts of equal matrices of one parameter.
Its facts are sums over whole matrices, over all pieces and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.engine.directions import Directions, ProjectedGrad, exact_weights, over_whole_rows
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.hooks import GRADIENT, MASTER, ROWS, WEIGHT, ProvideStates, StateRequest
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import states_at_owner
from compile_muon.engine.trained import OptimizerState
from compile_muon.kernels import Averages, average, muon_apply
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.language.views import Part as ViewPart
from compile_muon.passes.methods import After, ElementMethod, MatrixMethod, Piece, State, matrix_method
from compile_muon.passes.methods.method import STEP


@dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices of one parameter group, as a step writes them."""

    method: MatrixMethod  # of the group
    rates: Mapping[str, Any]  # of the group
    directions: Mapping[ShardedParam, Tensor]  # of the shards with a gradient, in any floating dtype
    scale: Callable[[int, int], float]  # ``(rows, cols)`` -> factor on the learning rate
    states: Mapping[ShardedParam, Sequence[Tensor]] = field(default_factory=dict)  # new states at owners
    # In place of gradients, where the method projects them.
    projected: Mapping[ShardedParam, ProjectedGrad] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether the write is one decay and one addition."""
        method = self.method
        return method.after is None and method.finish is None and not self.rates.get("cautious_decay", False)

    @property
    def joint(self) -> bool:
        """Whether one launch may move momenta and weights."""
        method = self.method
        return self.plain and method.advance is None and method.keeps_momentum and not method.owned


class Part(NamedTuple):
    """Equal matrices of one parameter: part ``place`` of ``sharded.now.parts``."""

    group: Matrices
    sharded: ShardedParam
    part: ViewPart
    place: int

    def state(self, state: State, states: Mapping[str, Tensor]) -> Tensor:
        """Return the piece's part of a state, on the same memory."""
        tensor = local_tensor(states[state.name])
        return self.part.of_rows(tensor) if state.each == "row" else self.part.of(tensor)

    @property
    def numbers(self) -> slice:
        """The numbers of these matrices in the whole parameter."""
        part, local = self.part, self.sharded.spec.layout.local_shape
        count = part.segment.count if part.segment is not None else local[0] if part.stack else 1
        return slice(part.first, part.first + count)

    @property
    def direction(self) -> Tensor:
        wide = torch.promote_types(decode_dtype(self.sharded.spec.state_dtype), torch.float32)
        return self.part.of(self.group.directions[self.sharded]).to(wide)

    def row_sums(self, weight: Tensor) -> Tensor | None:
        """Return the method's sums over this rank's columns, ``[n, r, k]``; None if it has none."""
        if self.group.method.row_sums is None:
            return None
        direction = self.direction
        return self.group.method.row_sums(direction, self.part.of(weight).to(direction.dtype))

    def piece(self, states: Mapping[str, Tensor], sums: Tensor | None) -> Piece:
        """Return the piece that the method's functions receive."""
        direction, weight = self.direction, weight_of(self.sharded, states)
        sums = self.row_sums(weight) if sums is None else sums
        projected = self.group.projected.get(self.sharded)
        return Piece(
            direction=direction,
            weight=self.part.of(weight).to(direction.dtype),
            grad=self.part.of(_gradient_of(self.sharded)),
            states={s.name: self.state(s, states) for s in self.group.method.states if not s.at_owner},
            sums=sums,
            rates=self.group.rates,
            rows=self.part.rows,
            cols=self.part.cols,
            scale=self.group.scale(self.part.rows, self.part.cols),
            projected=None if projected is None else projected.sums[self.place],
        )


@dataclass(frozen=True)
class Prepared:
    """Matrices whose states are written, and whose weights are not."""

    groups: Sequence[Matrices]
    averaged: bool  # one launch is still to move momenta together with the weights
    parts: Sequence[tuple[Part, Piece, After]]  # of methods that are not ``plain``


def commit(
    trained: OptimizerState,
    directions: Directions,
    found_inf: Tensor | None = None,
    rates: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> None:
    """Write momenta, states and parameters, then call the ``after_commit`` hooks.

    ``directions`` is emptied, to free each of them once it is written. ``found_inf``: 1.0 on the device for nothing to
    be written, None if the host has decided to write. ``rates``: returns the rates of a group as tensors (CUDA graphs);
    None for the numbers it holds.
    """
    matrices, rest = [], []
    for group in trained.optimizer.param_groups:
        method, members = trained.method(group), [trained.sharded_params[param] for param in group["params"]]
        params = [sharded for sharded in members if sharded.grad is not None]
        group_rates: Mapping[str, Any] = group if rates is None else rates(group)
        if isinstance(method, MatrixMethod):
            if method.has(STEP.name) and params:
                step = params[0].graph_scalars[2 + method.graph_rates.index(STEP.name)]
                group_rates = {**group_rates, STEP.name: step}
            if params and params[0].now.muon_settings.phase in method.idle:
                group_rates = {**group_rates, "weight_decay": 0.0}
            adjust_lr = None if method.adjust_lr is None else trained.config.muon.adjust_lr or method.adjust_lr
            scale = (lambda rows, cols: 1.0) if adjust_lr is None else partial(lr_scale, adjust_lr)
            tensors = {sharded: directions.tensors.pop(sharded.name) for sharded in params}
            new_states = {a: directions.states.pop(a.name) for a in params if a.name in directions.states}
            projected = {a: directions.projected.pop(a.name) for a in params if a.name in directions.projected}
            matrices.append(Matrices(method, group_rates, tensors, scale, new_states, projected))
        elif isinstance(method, ElementMethod):
            rest.append((method, group_rates, params))
    provider, ledger = trained.state_provider, trained.ledger
    # Master weights on a disk are written with the states. Without any, weights move only after the states are safe,
    # so that a failing disk leaves them as they were.
    masters = any(sharded.spec.master for sharded in trained.muon)
    with provider.writing(directions.fetches, found_inf) as confirm:
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


# -------------------------------------------------------------------------------------------------------------- states


def commit_states(
    groups: Sequence[Matrices], provide: ProvideStates, found_inf: Tensor | None, *, all_resident: bool
) -> Prepared:
    """Move momenta toward the gradients, and write all other states. With ``all_resident``, :func:`commit_weights`
    moves the momenta that one launch can move together with weights."""
    pieces: list[tuple[Part, Piece, After]] = []
    parts = [
        Part(group, sharded, part, place)
        for group in groups
        if not group.plain
        for sharded in group.directions
        for place, part in enumerate(sharded.now.parts)
    ]
    sums_of, parts_of = _sums_of_rows(parts, provide), dict[ShardedParam, list[Part]]()
    for part in parts:
        parts_of.setdefault(part.sharded, []).append(part)
    for group in groups:
        if group.joint and all_resident:
            continue
        for sharded_params, states in provide(
            list(group.directions), StateRequest.STATES if group.plain else StateRequest.STATES_MASTERS_READ
        ):
            rows = dict(zip(sharded_params, states, strict=True))
            for sharded, slots in rows.items():
                # States larger than a buffer arrive by rows; such a method has only a momentum, so pieces are made
                # once, with the first rows.
                by_rows = ROWS in slots
                if not by_rows or slots[ROWS].storage_offset() == sharded.local.storage_offset():
                    numbers = {} if by_rows else slots
                    for part in parts_of.get(sharded, ()):
                        pieces.append(_piece(part, numbers, sums_of.get((sharded, part.place)), found_inf))
            for sharded, new_states in group.states.items():
                old_states = states_at_owner(sharded, rows[sharded]) if sharded in rows else []
                for old, new in zip(old_states, new_states, strict=False):
                    with _restored(found_inf, [old]):
                        old.copy_(new)
            momenta = {a: local_tensor(row["momentum_buffer"]) for a, row in rows.items() if "momentum_buffer" in row}
            if not momenta:
                continue
            with _restored(found_inf, list(momenta.values())):
                projected = {sharded: projected.gradient for sharded, projected in group.projected.items()}
                grads = [projected[a] if a in projected else _gradient_of(a, rows[a]) for a in momenta]
                directions = [group.directions[sharded] for sharded in momenta]
                advance(group.method, list(momenta.values()), grads, directions, group.rates)
    return Prepared(groups, all_resident, pieces)


def _sums_of_rows(parts: Sequence[Part], provide: ProvideStates) -> dict[tuple[ShardedParam, int], Tensor | None]:
    """Return the method's sums over whole rows by parameter and number of the part, where ranks hold columns of the
    same rows; collective then."""
    cut_parts: dict[ShardedParam, list[Part]] = {}
    for part in parts:
        if part.sharded.spec.cut_in_columns and part.group.method.row_sums is not None:
            cut_parts.setdefault(part.sharded, []).append(part)
    if not cut_parts:
        return {}
    sums: dict[tuple[ShardedParam, int], Tensor | None] = {}
    for sharded, weight in exact_weights(provide, list(cut_parts)):
        sums |= {(sharded, part.place): part.row_sums(weight) for part in cut_parts[sharded]}
    over_whole_rows([(part.sharded, part.place, sums.get((part.sharded, part.place))) for part in parts])
    return sums


def _piece(
    part: Part, states: Mapping[str, Tensor], sums: Tensor | None, found_inf: Tensor | None
) -> tuple[Part, Piece, After]:
    """Call the method's ``after`` on a part and write the new states; return piece and result without states."""
    method, piece = part.group.method, part.piece(states, sums)
    after = After(piece.direction) if method.after is None else method.after(piece)
    states_named = {state.name: state for state in method.states}
    old_states = [part.state(states_named[name], states) for name in after.states]
    with _restored(found_inf, old_states):
        for old, new in zip(old_states, after.states.values(), strict=True):
            old.copy_(new)
    return part, replace(piece, states={}), replace(after, states={})


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


# ------------------------------------------------------------------------------------------------------------- weights


def commit_weights(
    prepared: Prepared,
    summed: Sequence[ShardedParam],
    everyone: dist.ProcessGroup | None,
    found_inf: Tensor | None,
    provide: ProvideStates | None = None,
) -> None:
    """Move matrices along their directions. ``summed``: matrices of methods with facts, with a gradient or without,
    equal on all ranks (``everyone``). ``provide`` yields master weights; None where no parameter is a rounded copy."""
    totals = _totals([(part, after) for part, _, after in prepared.parts], summed, everyone)
    parts_of: dict[ShardedParam, list[tuple[Part, Piece, After]]] = {}
    for prepared_part in prepared.parts:
        parts_of.setdefault(prepared_part[0].sharded, []).append(prepared_part)
    for group in prepared.groups:
        matrices = list(group.directions)
        for sharded_params, states in (
            [(matrices, [{} for _ in matrices])] if provide is None else provide(matrices, StateRequest.MASTERS)
        ):
            weights = {
                sharded: weight_of(sharded, slots) for sharded, slots in zip(sharded_params, states, strict=True)
            }
            if group.plain:
                _write_plain(group, weights, averaged=prepared.averaged and group.joint, found_inf=found_inf)
            for sharded, weight in weights.items():
                for part, piece, after in parts_of.get(sharded, ()):
                    _write_piece(part, piece, after, weight, totals.get(sharded), found_inf)
            round_masters(sharded_params, states)


def _totals(
    results: Sequence[tuple[Part, After]], summed: Sequence[ShardedParam], everyone: dist.ProcessGroup | None
) -> dict[ShardedParam, Tensor]:
    """Return the facts of all matrices, ``[matrices, k]`` for each parameter of ``summed``; ``results`` are of this
    rank's rows. Collective."""
    if not summed:
        return {}
    shapes = [(sharded.now.matrix_count, matrix_method(sharded.spec.muon_settings.method).facts) for sharded in summed]
    sizes = [math.prod(shape) for shape in shapes]
    # Every rank reduces as many numbers: zeros for matrices of which it has no rows or no gradient.
    vector = torch.zeros(sum(sizes), dtype=torch.float64, device=summed[0].local.device)
    views = [facts.view(shape) for facts, shape in zip(vector.split(sizes), shapes, strict=True)]
    totals = dict(zip(summed, views, strict=True))
    for part, after in results:
        if after.facts is not None:
            # The sum over ranks would count rows once for each rank that holds a copy.
            copies = 1 if everyone is None else part.sharded.spec.layout.copies
            totals[part.sharded][part.numbers].add_(after.facts / copies)
    if everyone is not None:
        dist.all_reduce(vector, group=everyone)
    return totals


def _write_plain(
    group: Matrices, weights: Mapping[ShardedParam, Tensor], *, averaged: bool, found_inf: Tensor | None
) -> None:
    """Move weights by decay and direction, and momenta with them if ``averaged``, in one launch."""
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


def lr_scale(adjust_lr: str | float, rows: int, cols: int) -> float:
    """Return the factor on lr for one [rows, cols] matrix; the first two equal ``torch.optim.Muon``'s bitwise.

    ========================  ============================
    ``original``              sqrt(max(1, rows / cols))
    ``match_rms_adamw``       0.2 * sqrt(max(rows, cols))
    ``spectral``              sqrt(rows / cols)
    a number                  that * sqrt(max(rows, cols))
    ========================  ============================

    The second and the last give updates a root mean square of 0.2 lr, or of the number times lr (DeepSeek-V4: 0.18).
    ``rows`` and ``cols`` are those of :attr:`.Assignment.matrix`, never of a shard: [out, rest] of a convolution, one
    expert of a stack. As in torch they are taken as stored, so rows of Hugging Face's ``Conv1D`` are *in*.
    """
    if adjust_lr == "original":
        return math.sqrt(max(1, rows / cols))
    if adjust_lr == "match_rms_adamw":
        adjust_lr = 0.2
    if isinstance(adjust_lr, float):
        return adjust_lr * math.sqrt(max(rows, cols))
    return math.sqrt(rows / cols)


def _write_piece(
    part: Part, piece: Piece, after: After, weight: Tensor, facts: Tensor | None, found_inf: Tensor | None
) -> None:
    """Write ``keep * weight + move * direction`` to the piece's rows of ``weight``, which may be channels last.
    ``facts`` are of all matrices of the parameter."""
    group, rows = part.group, weight.contiguous()
    lr, decay = group.rates["lr"], group.rates.get("weight_decay", 0.0)
    with _restored(found_inf, [rows]):
        piece = replace(piece, weight=part.part.of(rows).to(piece.direction.dtype))
        keep: Any = 1 - lr * decay
        move: Any = -(lr * group.scale(piece.rows, piece.cols))
        if group.method.finish is not None:
            of_piece = None if facts is None else facts[part.numbers].to(piece.direction.dtype)
            keep, move = group.method.finish(of_piece, keep, move, piece)
        keep = keep if after.keep is None else after.keep
        keep, move = (x[:, None, None] if isinstance(x, Tensor) and x.ndim == 1 else x for x in (keep, move))
        decayed = piece.weight * keep
        if group.rates.get("cautious_decay", False):
            decayed = torch.where(after.direction * piece.weight >= 0, decayed, piece.weight)
        part.part.of(rows).copy_(decayed + after.direction * move)
    if rows is not weight:
        weight.copy_(rows)


# ---------------------------------------------------------------------------------------------------- other parameters


def commit_elements(
    method: ElementMethod,
    rates: Mapping[str, Any],
    sharded_params: Sequence[ShardedParam],
    slots: Sequence[MutableMapping[str, Tensor]],
    found_inf: Tensor | None,
) -> None:
    """Run one step of an elementwise method on the shards of parameters with a gradient.

    ``slots``: the optimizer's states of each. A state provider adds tensors to all of them or none: ``GRADIENT``
    without ``ROWS`` means that the host computes the step and the provider copies the weights back.
    """
    if not sharded_params:
        return
    step, on_host = method.step, GRADIENT in slots[0] and ROWS not in slots[0]
    if on_host:
        assert method.on_host is not None
        step, found_inf = method.on_host, None
        rates = {name: rate.item() if isinstance(rate, Tensor) else rate for name, rate in rates.items()}
    for sharded, row in zip(sharded_params, slots, strict=True):
        local = local_tensor(sharded.param)
        for state in method.states:  # kernels count steps on the GPU; a loaded count may be on the host
            count = row[state.name]
            if state.each == "parameter" and local.is_cuda and not (on_host or count.is_cuda):
                row[state.name] = count.to(local.device, non_blocking=True)
    params = [weight_of(sharded, row) for sharded, row in zip(sharded_params, slots, strict=True)]
    states: list[MutableMapping[str, Tensor]] = [
        {state.name: local_tensor(row[state.name]) for state in method.states} for row in slots
    ]
    # Tensors to restore; a method that withholds its writes on CUDA by itself needs none.
    restored = [] if method.withholds and params[0].is_cuda else [*params, *(x for row in states for x in row.values())]
    decay = rates.get("weight_decay", 0.0) if rates.get("cautious_decay", False) else 0.0
    cautious = isinstance(decay, Tensor) or decay != 0  # a CUDA graph may get another decay
    with _restored(found_inf, restored):
        old_params = [param.clone() for param in params] if cautious else []
        step_rates = {**rates, "weight_decay": 0.0} if cautious else rates
        grads = [_gradient_of(sharded, row) for sharded, row in zip(sharded_params, slots, strict=True)]
        step(params, grads, states, step_rates, found_inf)
        for param, old in zip(params, old_params, strict=False):
            # Cautious weight decay: only where the step moves toward zero.
            lost = (rates["lr"] * decay) * old.to(torch.promote_types(old.dtype, torch.float32))
            param.sub_(lost * ((old - param) * old >= 0))
    if not on_host:
        round_masters(sharded_params, slots)


# ------------------------------------------------------------------------------------------- the tensors of a parameter


def weight_of(sharded: ShardedParam, states: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor that a step writes: the shard, the master weight that it is rounded from, or the host's copy;
    some rows of it where states are provided by rows."""
    if WEIGHT in states:
        return states[WEIGHT]
    return local_tensor(states[MASTER]) if sharded.spec.master else _provided_rows(sharded, states)


def _provided_rows(sharded: ShardedParam, states: Mapping[str, Tensor]) -> Tensor:
    """Return the rows of the shard that the states belong to."""
    return states[ROWS] if ROWS in states else local_tensor(sharded.param).detach()


def _gradient_of(sharded: ShardedParam, states: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
    """Return the gradient of the shard, or of provided rows, in the dtype of states; a copy if that differs."""
    return states.get(GRADIENT, sharded.local_grad).to(decode_dtype(sharded.spec.state_dtype))


def round_masters(sharded_params: Sequence[ShardedParam], states: Sequence[Mapping[str, Tensor]]) -> None:
    """Round the written master weights to their parameters."""
    for sharded, slots in zip(sharded_params, states, strict=True):
        if sharded.spec.master:
            _provided_rows(sharded, slots).copy_(local_tensor(slots[MASTER]))


@contextmanager
def _restored(found_inf: Tensor | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore these tensors after the block where ``found_inf`` is 1."""
    if found_inf is None:
        yield
        return
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(found_inf == 1, old, tensor))
