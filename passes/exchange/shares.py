"""Shares: the units that owners are assigned to, a whole parameter or, with a view, some of its matrices.

With a view, matrices that are whole on a rank stay there. The others are split into as many shares as there are ranks,
so that ranks orthogonalize the heads of one projection in parallel.
"""

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

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Matrices of one parameter that one rank orthogonalizes."""

    spec: ParamSpec
    matrices: tuple[tuple[int, int, int], ...]  # ``(count, rows, cols)`` of equal ones
    span: tuple[int, int] | None = None  # rows of the parameter, or columns if its view cuts those; None for all
    whole_at: int | None = None  # place along ``layout.owner_group`` that holds the share whole; None if no place does

    @property
    def view(self) -> View | None:
        """The view that cuts :meth:`join`'s result into the matrices; None if it is one matrix or a stack."""
        view = self.spec.muon_settings.view
        if self.span is None or view is None:
            return view
        start, stop = self.span
        count = self.matrices[0][0]
        return None if count == 1 else View((Block(((0, stop - start),), count),), view.dim)

    def numel(self, place: int) -> int:
        """Elements of the share's piece at ``place`` along ``layout.owner_group``."""
        if self.span is None:
            return math.prod(self.spec.layout.owner_group_shape(place))
        return math.prod(stop - start for start, stop in self._bounds(place))

    def piece(self, update: Tensor) -> Tensor:
        """Return this rank's piece of the share, from ``update`` of ``layout.local_shape``."""
        if self.span is None:
            return update
        layout = self.spec.layout
        here = layout.owner_group.index
        first = layout.owner_group_rows(here)[0]
        (top, bottom), (left, right) = self._bounds(here)
        return update.flatten(1)[top - first : bottom - first, left:right]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Concatenate flat pieces, by place along ``layout.owner_group``, into the share's matrix or stack."""
        if self.span is None:
            return as_matrices(self.spec.layout.join(pieces), self.spec.muon_settings)
        (left, right) = self._bounds(0)[1]
        return torch.cat([pieces[place] for place in self.spec.layout.data_holders]).view(-1, right - left)

    def cut(self, direction: Tensor, place: int) -> Tensor:
        """Return the piece at ``place`` of a tensor shaped like the result of :meth:`join`."""
        if self.span is None:
            return self.spec.layout.cut(direction, place)
        top, bottom = self._bounds(place)[0]
        first = 0 if self.dim else self.span[0]
        return direction[top - first : bottom - first]

    @property
    def dim(self) -> int:
        """The dim along which shares of a parameter are concatenated."""
        view = self.spec.muon_settings.view
        return 0 if view is None else view.dim

    def _bounds(self, place: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """``(start, stop)`` of the share's rows at ``place``, and of its columns."""
        assert self.span is not None
        rows = self.spec.layout.owner_group_rows(place)
        if self.dim:
            return rows, self.span
        top = min(max(rows[0], self.span[0]), rows[1])
        return (top, max(min(rows[1], self.span[1]), top)), (0, self.spec.muon_settings.cols)


@functools.cache
def shares(spec: ParamSpec) -> tuple[Share, ...]:
    """Return the shares of a parameter by rows, or by columns where its view cuts those; alike on all ranks."""
    layout, muon = spec.layout, spec.muon_settings
    view = muon.view
    one_share = (Share(spec, muon.matrices),)
    if (
        muon.exchange != "owner"
        or view is None
        or layout.tensor_parallel
        or any(len(block.runs) > 1 for block in view.blocks)
    ):
        return one_share
    places = range(layout.owner_group.size)
    split_shares: list[Share] = []
    for block, (count, rows, cols) in zip(view.blocks, view.shapes(muon.rows, muon.cols), strict=True):
        first, size = block.runs[0][0], block.size

        def whole_at(number: int, first: int = first, size: int = size) -> int:
            """Return the place that holds all of matrix ``number``, or -1, which ``groupby`` can compare."""
            start = first + number * size
            for place in places:
                low, high = layout.owner_group_rows(place)
                if len(places) == 1 or (view.dim == 0 and low <= start and start + size <= high):
                    return place
            return -1

        for place, numbers in groupby(range(count), whole_at):
            group = list(numbers)  # of consecutive matrices
            # Whole matrices are shared among the replicas of their place, others among all ranks.
            owners = layout.replica_group.size * (1 if place >= 0 else len(places))
            parts = min(len(group), owners)
            for part in range(parts):
                low, high = group[len(group) * part // parts], group[len(group) * (part + 1) // parts - 1] + 1
                span = first + low * size, first + high * size
                split_shares.append(Share(spec, ((high - low, rows, cols),), span, None if place < 0 else place))
    return tuple(split_shares)


def by_parameter(specs: Sequence[ParamSpec], of_shares: Iterable[T]) -> list[list[T]]:
    """Group one item for each share into one list for each parameter."""
    items = iter(of_shares)
    return [[next(items) for _ in shares(spec)] for spec in specs]
