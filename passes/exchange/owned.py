"""Which matrices of a parameter a rank owns, and the states of them that it keeps whole.

A state at owners is one tensor of a parameter on each rank, of the matrices that it owns: those of each part one behind
the other, in the order in which a method's ``whole`` is given them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..language.spec import ParamSpec
from ..language.work import Category
from ..methods import State
from .shares import shares

__all__ = ["Owned", "matrix_shapes", "owned", "parts_of_state", "state_shape"]


@dataclass(frozen=True)
class Owned:
    """Equal matrices of a parameter at one owner.

    Args:
        first: number of the first in the whole parameter, which the others follow.
        count: how many.
        rows, cols: of each.
    """

    first: int
    count: int
    rows: int
    cols: int


def owned(spec: ParamSpec, owners: Sequence[int]) -> tuple[Owned, ...]:
    """What this rank owns of a parameter.

    Args:
        owners: of each share, as :func:`~.owner.assign_owners` gives them.
    """
    layout, muon = spec.layout, spec.muon_settings
    if muon.exchange == "local":
        return _local(spec, owners)
    here = layout.replica_group.index * layout.owner_group.size + layout.owner_group.index
    number = layout.part[0].start if spec.stacked else 0
    found = []
    for share, owner in zip(shares(spec), owners, strict=True):
        for count, rows, cols in share.matrices:
            if owner == here:
                found.append(Owned(number, count, rows, cols))
            number += count
    return tuple(found)


def _local(spec: ParamSpec, owners: Sequence[int]) -> tuple[Owned, ...]:
    layout, muon = spec.layout, spec.muon_settings
    if not math.prod(layout.local_shape):
        return ()
    if muon.view is not None and not layout.sharded:
        found, number = [], 0
        for count, rows, cols in muon.view.shapes(muon.rows, muon.cols):
            found.append(Owned(number, count, rows, cols))
            number += count
        return tuple(found)
    if muon.view is not None:  # of whole matrices in rows
        own = [part for part in spec.parts if part.segment is not None]
        return tuple(Owned(p.first, p.segment.count, p.rows, p.cols) for p in own if p.segment is not None)
    (part,) = spec.parts
    count, first = layout.local_shape[0] if part.stack else 1, part.first
    replicas = layout.replica_group.serving(Category.EXCHANGE)
    if not replicas.alone:  # which share the stacks that they hold
        number = (replicas.index - owners[0] // layout.owner_group.size) % replicas.size
        each, more = divmod(count, replicas.size)  # as Tensor.tensor_split cuts
        first += number * each + min(number, more)
        count = each + (number < more)
    return (Owned(first, count, part.rows, part.cols),) if count else ()


def matrix_shapes(spec: ParamSpec) -> list[tuple[int, int]]:
    """Rows and columns of each matrix of a whole parameter, by number."""
    muon = spec.muon_settings
    if muon.view is None:
        return [(muon.rows, muon.cols)] * spec.matrix_count
    return [(rows, cols) for count, rows, cols in muon.view.shapes(muon.rows, muon.cols) for _ in range(count)]


def state_shape(spec: ParamSpec, state: State, parts: Sequence[Owned]) -> tuple[int, ...]:
    """Of a state of what a rank owns: ``[matrices, a, b]``, or ``[numbers]`` where a view has unequal matrices."""
    shapes = {state.shape(*shape) for shape in matrix_shapes(spec)}
    if len(shapes) == 1:
        return (sum(part.count for part in parts), *shapes.pop())
    return (sum(part.count * math.prod(state.shape(part.rows, part.cols)) for part in parts),)


def parts_of_state(tensor: Tensor, state: State, parts: Sequence[Owned]) -> list[Tensor]:
    """``[count, a, b]`` of each part: the same memory."""
    shapes = [(part.count, *state.shape(part.rows, part.cols)) for part in parts]
    pieces = tensor.view(-1).split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
