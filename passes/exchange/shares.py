"""What of a parameter goes to one owner: all of it, or with a view some of its matrices.

Matrices that lie whole on a rank stay there. The others are dealt one by one, so that the heads of one projection are
orthogonalized by as many ranks as there are, and not by one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from ..language.spec import ParamSpec
from ..language.views import Block, View
from .matrices import as_matrices

__all__ = ["Share", "by_parameter", "shares"]

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Matrices of a parameter that one rank orthogonalizes.

    Args:
        spec: of the parameter.
        matrices: ``(count, rows, cols)`` of them.
        span: rows of the parameter, or columns where its view cuts these; None for all of it.
        whole_at: the place along ``layout.owner_group`` that has all of it; None where no place has.
    """

    spec: ParamSpec
    matrices: tuple[tuple[int, int, int], ...]
    span: tuple[int, int] | None = None
    whole_at: int | None = None

    @property
    def view(self) -> View | None:
        """Of :meth:`join`'s result."""
        view = self.spec.muon_settings.view
        if self.span is None or view is None:
            return view
        start, stop = self.span
        count = self.matrices[0][0]
        return None if count == 1 else View((Block(((0, stop - start),), count),), view.dim)

    def numel(self, place: int) -> int:
        """Elements that ``place`` along ``layout.owner_group`` has of it."""
        if self.span is None:
            return math.prod(self.spec.layout.owner_group_shape(place))
        return math.prod(stop - start for start, stop in self._bounds(place))

    def piece(self, update: Tensor) -> Tensor:
        """This rank's of it, out of a tensor of ``layout.local_shape``."""
        if self.span is None:
            return update
        layout = self.spec.layout
        here = layout.owner_group.index
        first = layout.owner_group_rows(here)[0]
        (top, bottom), (left, right) = self._bounds(here)
        return update.flatten(1)[top - first : bottom - first, left:right]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The matrix, or stack, of flat pieces by place along ``layout.owner_group``."""
        if self.span is None:
            return as_matrices(self.spec.layout.join(pieces), self.spec.muon_settings)
        (left, right) = self._bounds(0)[1]
        return torch.cat([pieces[place] for place in self.spec.layout.data_holders]).view(-1, right - left)

    def cut(self, direction: Tensor, place: int) -> Tensor:
        """The piece of ``place``, out of what :meth:`join` made."""
        if self.span is None:
            return self.spec.layout.cut(direction, place)
        top, bottom = self._bounds(place)[0]
        first = 0 if self.dim else self.span[0]
        return direction[top - first : bottom - first]

    @property
    def dim(self) -> int:
        """That pieces of the shares of a parameter are joined along."""
        view = self.spec.muon_settings.view
        return 0 if view is None else view.dim

    def _bounds(self, place: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """``(start, stop)`` of the rows that ``place`` has, and of their columns."""
        assert self.span is not None
        rows = self.spec.layout.owner_group_rows(place)
        if self.dim:
            return rows, self.span
        top = min(max(rows[0], self.span[0]), rows[1])
        return (top, max(min(rows[1], self.span[1]), top)), (0, self.spec.muon_settings.cols)


@functools.cache
def shares(spec: ParamSpec) -> tuple[Share, ...]:
    """Of a parameter, in the order of its rows, or columns; the same on every rank but for whose piece is whose."""
    layout, muon = spec.layout, spec.muon_settings
    view = muon.view
    whole = (Share(spec, muon.matrices),)
    if muon.exchange != "owner" or view is None or layout.joined or any(len(block.runs) > 1 for block in view.blocks):
        return whole
    places = range(layout.owner_group.size)
    found: list[Share] = []
    for block, (count, rows, cols) in zip(view.blocks, view.shapes(muon.rows, muon.cols), strict=True):
        first, size = block.runs[0][0], block.size

        def whole_at(number: int, first: int = first, size: int = size) -> int:
            """The place that has all of a matrix; -1 for none."""
            start = first + number * size
            for place in places:
                low, high = layout.owner_group_rows(place)
                if len(places) == 1 or (view.dim == 0 and low <= start and start + size <= high):
                    return place
            return -1

        for place, numbers in groupby(range(count), whole_at):
            run = list(numbers)
            owners = layout.replica_group.size * (1 if place >= 0 else len(places))
            parts = min(len(run), owners)
            for part in range(parts):
                low, high = run[len(run) * part // parts], run[len(run) * (part + 1) // parts - 1] + 1
                span = first + low * size, first + high * size
                found.append(Share(spec, ((high - low, rows, cols),), span, None if place < 0 else place))
    return tuple(found)


def by_parameter(specs: Sequence[ParamSpec], of_shares: Iterable[T]) -> list[list[T]]:
    """What there is of each share, parameter by parameter, in a list for each."""
    each = iter(of_shares)
    return [[next(each) for _ in shares(spec)] for spec in specs]
