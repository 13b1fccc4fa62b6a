"""Pieces: this rank's parts of equal matrices of one parameter, for methods whose step is not one decay and one
addition.

Methods see pieces only. Their facts are sums over whole matrices, over all pieces and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.projected import ProjectedGrad, exact_weights, over_whole_rows
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import ProvideStates
from compile_muon.engine.written import gradient_of, in_rows, restore_if_found_inf, weight_of
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.language.views import Part as ViewPart
from compile_muon.passes.methods import After, MatrixMethod, Piece, State, matrix_method

__all__ = [
    "Matrices",
    "Part",
    "make_pieces",
    "sums_of_rows",
    "totals_of",
    "write_piece",
]


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
    """Return for each part the method's sums over whole rows, where ranks hold columns of the same rows; None where a
    rank holds whole rows. Collective in the former case."""
    cut_parts: dict[ShardedParam, list[Part]] = {}
    for part in parts:
        if part.sharded.spec.cut_in_columns and part.group.method.row_sums is not None:
            cut_parts.setdefault(part.sharded, []).append(part)
    row_sums: dict[tuple[ShardedParam, int], Tensor | None] = {}
    for sharded, weight in exact_weights(provide, list(cut_parts)):
        row_sums |= {(sharded, part.place): part.row_sums(weight) for part in cut_parts[sharded]}
    sums = [row_sums.get((part.sharded, part.place)) for part in parts]
    over_whole_rows([(part.sharded, part.place, own) for part, own in zip(parts, sums, strict=True)])
    return sums


def make_pieces(
    parts: Sequence[tuple[Part, Tensor | None]],
    states: Mapping[ShardedParam, Mapping[str, Tensor]],
    found_inf: Tensor | None,
) -> list[tuple[Part, Piece, After]]:
    """Call the methods' ``after`` on each part and write the new states; return pieces and results without states."""
    pieces = []
    for part, sums in parts:
        piece = part.piece(states[part.sharded], sums)
        after = After(piece.direction) if part.group.method.after is None else part.group.method.after(piece)
        pieces.append((part, replace(piece, states={}), replace(after, states={})))
        states_named = {state.name: state for state in part.group.method.states}
        state_tensors = {name: part.state(states_named[name], states[part.sharded]) for name in after.states}
        with restore_if_found_inf(found_inf, list(state_tensors.values())):
            for name, new in after.states.items():
                state_tensors[name].copy_(new)
    return pieces


def totals_of(
    own: Sequence[tuple[Part, After]], summed: Sequence[ShardedParam], everyone: dist.ProcessGroup | None
) -> dict[ShardedParam, Tensor]:
    """Return the facts of all matrices, ``[matrices, k]`` for each parameter of ``summed``; ``own``: results of this
    rank's rows. Collective."""
    if not summed:
        return {}
    shapes = [(sharded.now.matrix_count, matrix_method(sharded.spec.muon_settings.method).facts) for sharded in summed]
    sizes = [math.prod(shape) for shape in shapes]
    # Every rank reduces as many numbers: zeros for matrices of which it has no rows or no gradient.
    vector = torch.zeros(sum(sizes), dtype=torch.float64, device=summed[0].local.device)
    views = [own.view(shape) for own, shape in zip(vector.split(sizes), shapes, strict=True)]
    totals = dict(zip(summed, views, strict=True))
    for part, after in own:
        if after.facts is not None:
            # The sum over ranks would count rows once for each rank that holds a copy.
            copies = 1 if everyone is None else part.sharded.spec.layout.copies
            totals[part.sharded][part.numbers].add_(after.facts / copies)
    if everyone is not None:
        dist.all_reduce(vector, group=everyone)
    return totals


def _factors(group: Matrices, piece: Piece, facts: Tensor | None) -> tuple[Any, Any]:
    """Return the factors of a weight and of its direction; ``facts`` are of the piece's matrices."""
    lr, decay = group.rates["lr"], group.rates.get("weight_decay", 0.0)
    keep: Any = 1 - lr * decay
    move: Any = -(lr * group.scale(piece.rows, piece.cols))
    if group.method.finish is None:
        return keep, move
    return group.method.finish(None if facts is None else facts.to(piece.direction.dtype), keep, move, piece)


def write_piece(
    part: Part, piece: Piece, after: After, weight: Tensor, facts: Tensor | None, found_inf: Tensor | None
) -> None:
    """Write ``keep * weight + move * direction`` to the piece's rows of ``weight``."""
    group = part.group
    with in_rows(weight) as rows, restore_if_found_inf(found_inf, [rows]):
        piece = replace(piece, weight=part.part.of(rows).to(piece.direction.dtype))
        keep, move = _factors(group, piece, None if facts is None else facts[part.numbers])
        keep = keep if after.keep is None else after.keep
        keep, move = (x[:, None, None] if isinstance(x, Tensor) and x.ndim == 1 else x for x in (keep, move))
        kept = piece.weight * keep
        if group.rates.get("cautious_decay", False):
            kept = torch.where(after.direction * piece.weight >= 0, kept, piece.weight)
        part.part.of(rows).copy_(kept + after.direction * move)
