"""The writes of a step: momenta, states of methods, matrices and all else. What is read here has been checked before.

A method that needs sums over whole matrices gets them in one all-reduce for all its matrices, and what is largest in
them in another, neither of which the host waits for.
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

from compile_muon.engine.directions import Directions
from compile_muon.engine.dtensors import columns_shape, local_tensor
from compile_muon.engine.owner_states import states_at_owner
from compile_muon.engine.projected import Projected, exact_weights, over_whole_rows
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import GRADIENT, MASTER, ROWS, WEIGHT, ProvideStates, StateRequest
from compile_muon.engine.trained import Trained
from compile_muon.kernels import Averages, average, muon_apply
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.language.views import Part, View
from compile_muon.passes.methods import After, ElementMethod, MatrixMethod, Piece, State, matrix_method
from compile_muon.passes.methods.method import STEP

__all__ = ["Matrices", "Prepared", "advance", "commit", "commit_elements", "commit_states", "commit_weights"]


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
            adjust_lr = None if method.adjust_lr is None else trained.config.muon.adjust_lr or method.adjust_lr
            scale = _unscaled if adjust_lr is None else partial(trained.scale, adjust_lr)
            projected = {a: made.projected.pop(a.name) for a in own if a.name in made.projected}
            matrices.append(Matrices(method, own_rates, found, scale, new, projected))
        elif isinstance(method, ElementMethod):
            rest.append((method, own_rates, own))
    provider, ledger = trained.state_provider, trained.ledger
    # Where the device decides whether to write, no momentum has been moved for good.
    moved = provider.moved(fetches) if found_inf is None else frozenset[ShardedParam]()
    # What a disk keeps of weights is written with the states; else one that fails has moved nothing.
    masters = any(sharded.spec.master for sharded in trained.muon)
    with provider.writing(found_inf):
        with ledger.range("step commit muon"):
            prepared = commit_states(
                matrices, partial(trained.provide, moved=moved), found_inf, all_resident=provider.all_resident
            )
            if masters and trained.summed:
                provider.confirm()
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


def weight_of(sharded: ShardedParam, states: Mapping[str, Tensor]) -> Tensor:
    """What a step writes of a parameter: the shard, the master weight that it is rounded from, or the host's copy; some
    rows of it where states are provided by rows."""
    if WEIGHT in states:
        return states[WEIGHT]
    return local_tensor(states[MASTER]) if sharded.spec.master else _provided_rows(sharded, states)


def _are_first(sharded: ShardedParam, states: Mapping[str, Tensor]) -> bool:
    return ROWS not in states or states[ROWS].storage_offset() == sharded.local.storage_offset()


def _provided_rows(sharded: ShardedParam, states: Mapping[str, Tensor]) -> Tensor:
    return states[ROWS] if ROWS in states else sharded.local.detach()


def gradient_of(sharded: ShardedParam, states: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
    """The shard of ``.grad`` in the dtype of the states, or what was provided of it, or a copy."""
    return states.get(GRADIENT, sharded.local_grad).to(decode_dtype(sharded.spec.state_dtype))


@dataclass(frozen=True, eq=False)
class Matrices:
    """What a step writes of one group of matrices.

    Args:
        method: of the group.
        rates: of the group.
        directions: of the shards of those with a gradient, in any floating dtype.
        scale: factor on the learning rate, of the rows and columns of a matrix.
        states: new ones at owners, of those that have some here.
        projected: what stands for gradients, of methods that project them.
    """

    method: MatrixMethod
    rates: Mapping[str, Any]
    directions: Mapping[ShardedParam, Tensor]
    scale: Callable[[int, int], float]
    states: Mapping[ShardedParam, Sequence[Tensor]] = field(default_factory=dict)
    projected: Mapping[ShardedParam, Projected] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether all of it is one decay and one addition."""
        method = self.method
        return method.after is None and method.finish is None and not self.rates.get("cautious_decay", False)

    @property
    def joint(self) -> bool:
        """Whether one launch may move momenta and weights."""
        method = self.method
        return self.plain and method.advance is None and method.keeps_momentum and not method.owned


@dataclass(frozen=True)
class Prepared:
    """What is left to be written of matrices once their states are: weights alone.

    Args:
        averaged: whether momenta are still to be moved, together with the weights.
        parts: of methods with more to say than a direction.
        everywhere: of methods with states that every rank has all of, these by parameter and name.
    """

    groups: Sequence[Matrices]
    averaged: bool
    parts: Sequence[tuple[_Part, Piece, After]]
    everywhere: Mapping[ShardedParam, Mapping[str, Tensor]]


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
    found: list[tuple[_Part, Piece, After]] = []
    parts = [
        _Part(group, sharded, part, place)
        for group in groups
        if not group.plain
        for sharded in group.directions
        for place, part in enumerate(sharded.now.parts)
    ]
    everywhere: dict[ShardedParam, Mapping[str, Tensor]] = {}
    summed: dict[ShardedParam, list[tuple[_Part, Tensor | None]]] = {}
    for part, sums in zip(parts, _row_sums(parts, provide), strict=True):
        summed.setdefault(part.sharded, []).append((part, sums))
    for group in groups:
        if group.joint and all_resident:
            continue
        for sharded_params, states in provide(
            list(group.directions), StateRequest.STATES if group.plain else StateRequest.STATES_MASTERS_READ
        ):
            of = dict(zip(sharded_params, states, strict=True))
            # A method whose states come some rows after the other keeps nothing but a momentum, and is asked once.
            begun = {a: {} if ROWS in row else row for a, row in of.items() if _are_first(a, row)}
            found += _after([pair for sharded in begun for pair in summed.get(sharded, ())], begun, found_inf)
            if names := [state.name for state in group.method.everywhere]:
                everywhere |= {sharded: {name: row[name] for name in names} for sharded, row in of.items()}
            for sharded, new in group.states.items():
                held = states_at_owner(sharded, of[sharded]) if sharded in of else []
                for old, own in zip(held, new, strict=False):
                    with _unless(found_inf, [old]):
                        old.copy_(own)
            momenta = {a: local_tensor(row["momentum_buffer"]) for a, row in of.items() if "momentum_buffer" in row}
            if not momenta:
                continue
            with _unless(found_inf, list(momenta.values())):
                given = {sharded: projected.gradient for sharded, projected in group.projected.items()}
                grads = [given[a] if a in given else gradient_of(a, of[a]) for a in momenta]
                directions = [group.directions[sharded] for sharded in momenta]
                advance(group.method, list(momenta.values()), grads, directions, group.rates)
    return Prepared(groups, all_resident, found, everywhere)


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
    totals = _totals([(part, after) for part, _, after in prepared.parts], summed, everyone)
    parts_of: dict[ShardedParam, list[tuple[_Part, Piece, After]]] = {}
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
                    _write(part, piece, after, weight, totals.get(sharded), found_inf)
                if sharded in prepared.everywhere:
                    _advance_everywhere(group, sharded, prepared.everywhere[sharded], totals.get(sharded), found_inf)
            round_masters(sharded_params, states)


def round_masters(sharded_params: Sequence[ShardedParam], states: Sequence[Mapping[str, Tensor]]) -> None:
    """Parameters that are rounded copies follow their master weights, which a step has written."""
    for sharded, own in zip(sharded_params, states, strict=True):
        if sharded.spec.master:
            _provided_rows(sharded, own).copy_(local_tensor(own[MASTER]))


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
    """Equal matrices of one parameter."""

    group: Matrices
    sharded: ShardedParam
    part: Part
    place: int

    def state(self, state: State, states: Mapping[str, Tensor]) -> Tensor:
        """As :class:`~compile_muon.passes.methods.Piece` has it, the same memory."""
        tensor = local_tensor(states[state.name])
        if state.each == "parameter":
            return tensor
        if state.each == "matrix":
            return tensor[self.numbers][:, None, None]
        if state.each == "col":
            return self.columns(tensor.view(-1, 1, tensor.shape[-1]))
        return self.part.of_rows(tensor) if state.each == "row" else self.part.of(tensor)

    @property
    def numbers(self) -> slice:
        """Of its matrices in the whole parameter."""
        part, local = self.part, self.sharded.spec.layout.local_shape
        count = part.segment.count if part.segment is not None else local[0] if part.stack else 1
        return slice(part.first, part.first + count)

    def columns(self, whole: Tensor) -> Tensor:
        """Its own, ``[n, k, c]``, of ``[matrices, k, cols]``, or ``[1, k, cols]`` where a view cuts columns: the same
        memory."""
        spec, segment = self.sharded.now, self.part.segment
        own = whole[..., spec.layout.part[-1]] if spec.cut_in_columns else whole
        if segment is None or segment.dim == 0:
            return own[self.numbers]
        return own[0, :, segment.start : segment.stop].unflatten(-1, (segment.count, -1)).movedim(-2, 0)

    @property
    def direction(self) -> Tensor:
        wide = torch.promote_types(decode_dtype(self.sharded.spec.state_dtype), torch.float32)
        return self.part.of(self.group.directions[self.sharded]).to(wide)

    def row_sums(self, weight: Tensor) -> Tensor | None:
        """Of this rank's columns, where the method asks for some."""
        if self.group.method.row_sums is None:
            return None
        direction = self.direction
        return self.group.method.row_sums(direction, self.part.of(weight).to(direction.dtype))

    def piece(self, states: Mapping[str, Tensor], sums: Tensor | None) -> Piece:
        direction, weight = self.direction, weight_of(self.sharded, states)
        if sums is None:
            sums = self.row_sums(weight)
        projected = self.group.projected.get(self.sharded)
        return Piece(
            direction=direction,
            weight=self.part.of(weight).to(direction.dtype),
            grad=self.part.of(gradient_of(self.sharded)),
            states={s.name: self.state(s, states) for s in self.group.method.states if not s.at_owner},
            sums=sums,
            rates=self.group.rates,
            rows=self.part.rows,
            cols=self.part.cols,
            scale=self.group.scale(self.part.rows, self.part.cols),
            projected=None if projected is None else projected.sums[self.place],
        )


def _row_sums(parts: Sequence[_Part], provide: ProvideStates) -> list[Tensor | None]:
    """The sums over rows that methods ask for where ranks have parts of the same rows, summed over these ranks; None
    where a rank has whole ones."""
    cut: dict[ShardedParam, list[_Part]] = {}
    for part in parts:
        if part.sharded.spec.cut_in_columns and part.group.method.row_sums is not None:
            cut.setdefault(part.sharded, []).append(part)
    found: dict[tuple[ShardedParam, int], Tensor | None] = {}
    for sharded, weight in exact_weights(provide, list(cut)):
        found |= {(sharded, part.place): part.row_sums(weight) for part in cut[sharded]}
    sums = [found.get((part.sharded, part.place)) for part in parts]
    over_whole_rows([(part.sharded, own) for part, own in zip(parts, sums, strict=True)])
    return sums


def _after(
    parts: Sequence[tuple[_Part, Tensor | None]],
    states: Mapping[ShardedParam, Mapping[str, Tensor]],
    found_inf: Tensor | None,
) -> list[tuple[_Part, Piece, After]]:
    """What methods make of directions, their new states written."""
    found = []
    for part, sums in parts:
        piece = part.piece(states[part.sharded], sums)
        after = After(piece.direction) if part.group.method.after is None else part.group.method.after(piece)
        everywhere = {state.name: piece.states[state.name] for state in part.group.method.everywhere}
        found.append((part, replace(piece, states=everywhere), replace(after, states={})))
        named = {state.name: state for state in part.group.method.states}
        written = {name: part.state(named[name], states[part.sharded]) for name in after.states}
        with _unless(found_inf, list(written.values())):
            for name, new in after.states.items():
                written[name].copy_(new)
    return found


class _Totals(NamedTuple):
    """Facts of the whole matrices of one parameter, ``[matrices, k]``, and of their columns, ``[matrices, k, cols]``
    (``[1, k, cols]`` where a view cuts columns); and what is largest of the matrices, ``[matrices, k]``."""

    facts: Tensor
    columns: Tensor
    maxima: Tensor


def _totals(
    own: Sequence[tuple[_Part, After]], summed: Sequence[ShardedParam], everyone: dist.ProcessGroup | None
) -> dict[ShardedParam, _Totals]:
    """Facts of the whole matrices of each parameter.

    Args:
        own: of this rank's rows.
    """
    if not summed:
        return {}
    shapes: list[tuple[int, ...]] = []
    methods = [matrix_method(sharded.spec.muon_settings.method) for sharded in summed]
    for sharded, method in zip(summed, methods, strict=True):
        shapes += (sharded.now.matrix_count, method.facts), columns_shape(sharded.now, method.columns)
    sizes = [math.prod(shape) for shape in shapes]
    dtypes = [x.dtype for _, after in own for x in (after.facts, after.columns, after.maxima) if x is not None]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    # Whoever has no rows of a matrix, or no gradient, brings zeros: every rank as many numbers.
    vector = torch.zeros(sum(sizes), dtype=dtype, device=summed[0].local.device)
    views = iter([own.view(shape) for own, shape in zip(vector.split(sizes), shapes, strict=True)])
    counts = [sharded.now.matrix_count * method.maxima for sharded, method in zip(summed, methods, strict=True)]
    # Whoever has nothing of a matrix has nothing that is larger than anything.
    largest = vector.new_full((sum(counts),), -math.inf)
    tops = [
        own.view(sharded.now.matrix_count, method.maxima)
        for own, sharded, method in zip(largest.split(counts), summed, methods, strict=True)
    ]
    found = {sharded: _Totals(next(views), next(views), top) for sharded, top in zip(summed, tops, strict=True)}
    for part, after in own:
        # What several ranks hold would be counted once for each.
        copies = 1 if everyone is None else part.sharded.spec.layout.copies
        if after.facts is not None:
            rows = found[part.sharded].facts[part.part.first : part.part.first + len(after.facts)]
            rows.add_(after.facts / copies)
        if after.columns is not None:
            part.columns(found[part.sharded].columns).add_(after.columns / copies)
        if after.maxima is not None:
            top = found[part.sharded].maxima[part.part.first : part.part.first + len(after.maxima)]
            torch.maximum(top, after.maxima.to(top.dtype), out=top)
    if everyone is not None:
        dist.all_reduce(vector, group=everyone)
        if largest.numel():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=everyone)
    return found


def _factors(group: Matrices, piece: Piece, totals: _Totals | None) -> tuple[Any, Any, Mapping[str, Tensor]]:
    """What a weight and its direction are multiplied by, and new states that are everywhere.

    Args:
        totals: of the matrices of the piece.
    """
    lr, decay = group.rates["lr"], group.rates.get("weight_decay", 0.0)
    keep: Any = 1 - lr * decay
    move: Any = -(lr * group.scale(piece.rows, piece.cols))
    if group.method.finish is None:
        return keep, move, {}
    facts = None
    if totals is not None:
        wide = piece.direction.dtype
        facts, piece = totals.facts.to(wide), replace(piece, columns=totals.columns.to(wide))
        piece = replace(piece, maxima=totals.maxima.to(wide))
    keep, move, *states = group.method.finish(facts, keep, move, piece)
    return keep, move, states[0] if states else {}


def _advance_everywhere(
    group: Matrices,
    sharded: ShardedParam,
    held: Mapping[str, Tensor],
    totals: _Totals | None,
    found_inf: Tensor | None,
) -> None:
    """Write the states that every rank has all of: of all matrices, by pieces without a row.

    Args:
        held: these states.
    """
    muon, each = sharded.now.muon_settings, {state.name: state.each for state in group.method.everywhere}
    wide = torch.promote_types(decode_dtype(sharded.spec.state_dtype), torch.float32)
    shapes = [(sharded.now.matrix_count, muon.rows, muon.cols)]
    cut = (lambda x: [x]) if muon.view is None else partial(_cut_columns, muon.view)
    if muon.view is not None:
        shapes = list(muon.view.shapes(muon.rows, muon.cols))
    counts = [count for count, *_ in shapes]
    columns = [None] * len(shapes) if totals is None else cut(totals.columns)
    facts = [None] * len(shapes) if totals is None else totals.facts.split(counts)
    maxima = [None] * len(shapes) if totals is None else totals.maxima.split(counts)
    pieces: dict[str, Sequence[Tensor]] = {}
    for name, state in held.items():
        if each[name] == "parameter":
            pieces[name] = [state] * len(shapes)
        elif each[name] == "matrix":
            pieces[name] = [own[:, None, None] for own in state.split(counts)]
        else:
            pieces[name] = cut(state.view(-1, 1, state.shape[-1]))
    new: dict[str, list[Tensor]] = {name: [] for name in held}
    for place, (count, rows, cols) in enumerate(shapes):
        empty = sharded.local.new_empty((count, 0, cols), dtype=wide)
        states = {name: own[place] for name, own in pieces.items()}
        piece = Piece(empty, empty, empty, states, None, group.rates, rows, cols)
        several = facts[place], columns[place], maxima[place]
        own = None if totals is None else _Totals(*(x for x in several if x is not None))
        _, _, found = _factors(group, piece, own)
        for name, old in states.items():
            new[name].append(found.get(name, old).to(old.dtype).reshape(old.shape))
    for name, state in held.items():
        if each[name] == "parameter":
            value = new[name][-1]
        elif each[name] == "matrix":
            value = torch.cat(new[name]).flatten()
        elif muon.view is not None and muon.view.dim == 1:
            value = muon.view.join(new[name]).flatten()
        else:
            value = torch.cat(new[name]).flatten(1)
        with _unless(found_inf, [state]):
            state.copy_(value)


def _cut_columns(view: View, whole: Tensor) -> list[Tensor]:
    """``[matrices, k, cols]``, or ``[1, k, cols]`` where the view cuts columns, block by block."""
    return view.cut(whole[0]) if view.dim == 1 else list(whole.split([block.count for block in view.blocks]))


def _write(
    part: _Part, piece: Piece, after: After, weight: Tensor, totals: _Totals | None, found_inf: Tensor | None
) -> None:
    group = part.group
    with _in_rows(weight) as rows, _unless(found_inf, [rows]):
        piece = replace(piece, weight=part.part.of(rows).to(piece.direction.dtype))
        own = None
        if totals is not None:
            facts, maxima = (x[part.numbers] for x in (totals.facts, totals.maxima))
            own = _Totals(facts, part.columns(totals.columns), maxima)
        keep, move, _ = _factors(group, piece, own)
        keep = keep if after.keep is None else after.keep
        keep, move = (x[:, None, None] if isinstance(x, Tensor) and x.ndim == 1 else x for x in (keep, move))
        kept = piece.weight * keep
        if group.rates.get("cautious_decay", False):
            kept = torch.where(after.direction * piece.weight >= 0, kept, piece.weight)
        part.part.of(rows).copy_(kept + after.direction * move)


# ------------------------------------------------------------------------------------------- element by element


def commit_elements(
    method: ElementMethod,
    rates: Mapping[str, Any],
    sharded_params: Sequence[ShardedParam],
    slots: Sequence[MutableMapping[str, Tensor]],
    found_inf: Tensor | None,
) -> None:
    """One step of a method for all that is no matrix, on the shards.

    Args:
        sharded_params: parameters with a gradient.
        slots: the optimizer's states of each; of all, or of none, with what :class:`~.StateProvider` adds for the host:
            then whoever provided it brings the weights back.
        found_inf: as for :func:`~compile_muon.kernels.muon_apply`.
    """
    if not sharded_params:
        return
    step, on_host = method.step, GRADIENT in slots[0] and ROWS not in slots[0]
    if on_host:
        assert method.on_host is not None
        step, found_inf = method.on_host, None
        rates = {name: rate.item() if isinstance(rate, Tensor) else rate for name, rate in rates.items()}
    for sharded, row in zip(sharded_params, slots, strict=True):
        for state in method.states:  # kernels count steps themselves; a checkpoint may have brought them to the host
            count = row[state.name]
            if state.each == "parameter" and sharded.local.is_cuda and not (on_host or count.is_cuda):
                row[state.name] = count.to(sharded.local.device, non_blocking=True)
    params = [weight_of(sharded, row) for sharded, row in zip(sharded_params, slots, strict=True)]
    states: list[MutableMapping[str, Tensor]] = [
        {state.name: local_tensor(row[state.name]) for state in method.states} for row in slots
    ]
    written = [] if method.withholds and params[0].is_cuda else [*params, *(x for row in states for x in row.values())]
    decay = rates.get("weight_decay", 0.0) if rates.get("cautious_decay", False) else 0.0
    cautious = isinstance(decay, Tensor) or decay != 0  # a graph holds a decay that may become another one
    with _unless(found_inf if written else None, written):
        before = [param.clone() for param in params] if cautious else []
        given = {**rates, "weight_decay": 0.0} if cautious else rates
        grads = [gradient_of(sharded, row) for sharded, row in zip(sharded_params, slots, strict=True)]
        step(params, grads, states, given, found_inf)
        for param, old in zip(params, before, strict=False):
            # Decay where the step went toward zero; a weight of zero has nothing to lose.
            lost = (rates["lr"] * decay) * old.to(torch.promote_types(old.dtype, torch.float32))
            param.sub_(lost * ((old - param) * old >= 0))
    if not on_host:
        round_masters(sharded_params, slots)
