"""Pieces: what a step writes where a method has more to say than a direction.

A piece is this rank's part of equal matrices of one parameter. Methods see pieces alone; sums over whole matrices and
their columns, and what is largest in them, are made here, of all pieces and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.projected import Projected, exact_weights, over_whole_rows
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import ProvideStates
from compile_muon.engine.states import columns_shape
from compile_muon.engine.written import gradient_of, in_rows, unless, weight_of
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.language.views import Part as ViewPart
from compile_muon.passes.language.views import View
from compile_muon.passes.methods import After, MatrixMethod, Piece, State, matrix_method

__all__ = [
    "Matrices",
    "Part",
    "Totals",
    "advance_everywhere",
    "make_pieces",
    "sums_of_rows",
    "totals_of",
    "write_piece",
]


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


class Part(NamedTuple):
    """Equal matrices of one parameter."""

    group: Matrices
    sharded: ShardedParam
    part: ViewPart
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


def sums_of_rows(parts: Sequence[Part], provide: ProvideStates) -> list[Tensor | None]:
    """The sums over rows that methods ask for where ranks have parts of the same rows, summed over these ranks; None
    where a rank has whole ones."""
    cut: dict[ShardedParam, list[Part]] = {}
    for part in parts:
        if part.sharded.spec.cut_in_columns and part.group.method.row_sums is not None:
            cut.setdefault(part.sharded, []).append(part)
    found: dict[tuple[ShardedParam, int], Tensor | None] = {}
    for sharded, weight in exact_weights(provide, list(cut)):
        found |= {(sharded, part.place): part.row_sums(weight) for part in cut[sharded]}
    sums = [found.get((part.sharded, part.place)) for part in parts]
    over_whole_rows([(part.sharded, own) for part, own in zip(parts, sums, strict=True)])
    return sums


def make_pieces(
    parts: Sequence[tuple[Part, Tensor | None]],
    states: Mapping[ShardedParam, Mapping[str, Tensor]],
    found_inf: Tensor | None,
) -> list[tuple[Part, Piece, After]]:
    """What methods make of directions, their new states written."""
    found = []
    for part, sums in parts:
        piece = part.piece(states[part.sharded], sums)
        after = After(piece.direction) if part.group.method.after is None else part.group.method.after(piece)
        everywhere = {state.name: piece.states[state.name] for state in part.group.method.everywhere}
        found.append((part, replace(piece, states=everywhere), replace(after, states={})))
        named = {state.name: state for state in part.group.method.states}
        written = {name: part.state(named[name], states[part.sharded]) for name in after.states}
        with unless(found_inf, list(written.values())):
            for name, new in after.states.items():
                written[name].copy_(new)
    return found


class Totals(NamedTuple):
    """Facts of the whole matrices of one parameter, ``[matrices, k]``, and of their columns, ``[matrices, k, cols]``
    (``[1, k, cols]`` where a view cuts columns); and what is largest of the matrices, ``[matrices, k]``."""

    facts: Tensor
    columns: Tensor
    maxima: Tensor


def totals_of(
    own: Sequence[tuple[Part, After]], summed: Sequence[ShardedParam], everyone: dist.ProcessGroup | None
) -> dict[ShardedParam, Totals]:
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
    found = {sharded: Totals(next(views), next(views), top) for sharded, top in zip(summed, tops, strict=True)}
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


def _factors(group: Matrices, piece: Piece, totals: Totals | None) -> tuple[Any, Any, Mapping[str, Tensor]]:
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


def advance_everywhere(
    group: Matrices,
    sharded: ShardedParam,
    held: Mapping[str, Tensor],
    totals: Totals | None,
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
        own = None if totals is None else Totals(*(x for x in several if x is not None))
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
        with unless(found_inf, [state]):
            state.copy_(value)


def _cut_columns(view: View, whole: Tensor) -> list[Tensor]:
    """``[matrices, k, cols]``, or ``[1, k, cols]`` where the view cuts columns, block by block."""
    return view.cut(whole[0]) if view.dim == 1 else list(whole.split([block.count for block in view.blocks]))


def write_piece(
    part: Part, piece: Piece, after: After, weight: Tensor, totals: Totals | None, found_inf: Tensor | None
) -> None:
    group = part.group
    with in_rows(weight) as rows, unless(found_inf, [rows]):
        piece = replace(piece, weight=part.part.of(rows).to(piece.direction.dtype))
        own = None
        if totals is not None:
            facts, maxima = (x[part.numbers] for x in (totals.facts, totals.maxima))
            own = Totals(facts, part.columns(totals.columns), maxima)
        keep, move, _ = _factors(group, piece, own)
        keep = keep if after.keep is None else after.keep
        keep, move = (x[:, None, None] if isinstance(x, Tensor) and x.ndim == 1 else x for x in (keep, move))
        kept = piece.weight * keep
        if group.rates.get("cautious_decay", False):
            kept = torch.where(after.direction * piece.weight >= 0, kept, piece.weight)
        part.part.of(rows).copy_(kept + after.direction * move)
