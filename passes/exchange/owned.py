"""The matrices of a parameter that a rank owns, and the optimizer states that it keeps for whole matrices.

A state at owners is one tensor on each rank. It holds the states of the matrices that the rank owns, part after part,
in the order in which a method's ``whole`` receives the matrices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..language.spec import ParamSpec
from ..language.work import Category
from ..methods import State
from .shares import shares


@dataclass(frozen=True)
class Owned:
    """``count`` equal matrices of a parameter with consecutive numbers and the same owner."""

    first: int  # number of the first in the whole parameter
    count: int
    rows: int  # of each matrix
    cols: int


def owned(spec: ParamSpec, owners: Sequence[int]) -> tuple[Owned, ...]:
    """Return the matrices that this rank owns; ``owners``: of each share, from :func:`~.owner.assign_owners`."""
    layout, muon = spec.layout, spec.muon_settings
    if muon.exchange == "local":
        return _local(spec, owners)
    own_number = layout.replica_group.index * layout.owner_group.size + layout.owner_group.index
    number = layout.part[0].start if spec.stacked else 0  # of the next matrix in the whole parameter
    matrices = []
    for share, owner in zip(shares(spec), owners, strict=True):
        for count, rows, cols in share.matrices:
            if owner == own_number:
                matrices.append(Owned(number, count, rows, cols))
            number += count
    return tuple(matrices)


def _local(spec: ParamSpec, owners: Sequence[int]) -> tuple[Owned, ...]:
    """Return the matrices that this rank owns under :func:`.local.local`, which deals parts of stacks to replicas."""
    layout, muon = spec.layout, spec.muon_settings
    if not math.prod(layout.local_shape):
        return ()
    if muon.view is not None and not layout.sharded:
        matrices, number = [], 0
        for count, rows, cols in muon.view.shapes(muon.rows, muon.cols):
            matrices.append(Owned(number, count, rows, cols))
            number += count
        return tuple(matrices)
    if muon.view is not None:  # sharded between its matrices: ``exchange_of`` says "local" for no other view
        segments = [part for part in spec.parts if part.segment is not None]
        return tuple(Owned(p.first, p.segment.count, p.rows, p.cols) for p in segments if p.segment is not None)
    (part,) = spec.parts
    count, first = layout.local_shape[0] if part.stack else 1, part.first
    replicas = layout.replica_group.serving(Category.EXCHANGE)
    if not replicas.alone:
        part_number = (replicas.index - owners[0] // layout.owner_group.size) % replicas.size
        quotient, remainder = divmod(count, replicas.size)  # as Tensor.tensor_split cuts
        first += part_number * quotient + min(part_number, remainder)
        count = quotient + (part_number < remainder)
    return (Owned(first, count, part.rows, part.cols),) if count else ()


def matrix_shapes(spec: ParamSpec) -> list[tuple[int, int]]:
    """Return ``(rows, cols)`` of each matrix of the whole parameter, by number."""
    muon = spec.muon_settings
    if muon.view is None:
        return [(muon.rows, muon.cols)] * spec.matrix_count
    return [(rows, cols) for count, rows, cols in muon.view.shapes(muon.rows, muon.cols) for _ in range(count)]


def state_shape(spec: ParamSpec, state: State, parts: Sequence[Owned]) -> tuple[int, ...]:
    """Return a state's shape on its owner: ``[matrices, a, b]``, or ``[elements]`` where a view's matrices differ."""
    shapes = {state.shape(*shape) for shape in matrix_shapes(spec)}
    if len(shapes) == 1:
        return (sum(part.count for part in parts), *shapes.pop())
    return (sum(part.count * math.prod(state.shape(part.rows, part.cols)) for part in parts),)


def parts_of_state(tensor: Tensor, state: State, parts: Sequence[Owned]) -> list[Tensor]:
    """Split a state ``tensor`` into ``[count, a, b]`` of each part: the same memory."""
    shapes = [(part.count, *state.shape(part.rows, part.cols)) for part in parts]
    pieces = tensor.view(-1).split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
