"""The launches of Triton's kernels for a list of matrices, and how long the model of a launch says that they take.

As ``kernels/gpu/grouped.py`` makes them: matrices of a form in chunks that stay under a limit of memory, each product
of a chunk one launch, but for the last, which writes each tensor of results by itself; a chunk of one tensor, or of
small ones of one shape, by the kernels for one shape. The time of each is ``kernels/gpu/model.py``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from compile_muon.kernels.batching import Stack, chunked
from compile_muon.kernels.gpu.arena import SMALL, Layout, list_bytes
from compile_muon.kernels.gpu.model import Result, Tile, programs, seconds_beside, waves
from compile_muon.kernels.gpu.model import seconds as launch_seconds
from compile_muon.kernels.gpu.tile_order import results_of
from compile_muon.kernels.gpu.tiles import Table, choose
from compile_muon.kernels.iterations import FORMS
from compile_muon.kernels.stability import Triple

__all__ = ["Launched", "Steps", "launches"]

#: (matrices, k, l) of a tensor, k ≤ l
Matrices = tuple[int, int, int]


@dataclass(frozen=True)
class Launched:
    """A launch.

    Args:
        part: what it computes.
        results: (matrices, rows, columns, summed dimension).
        triangle: one triangle of symmetric results is computed.
        summand: the product has one.
        listed: it is of a whole list.
        halves: a list's tiles on diagonals may be half as wide.
    """

    part: str
    results: tuple[Result, ...]
    triangle: bool
    summand: bool
    listed: bool = True
    halves: bool = True

    def tile(self, table: Table, processors: int) -> Tile:
        """That the launch is made with."""
        tiles = table.symmetric if self.triangle else table.product
        if self.listed:
            tiles = tuple(replace(tile.in_list, listed=self.halves) for tile in tiles)
        return choose(tiles, table.device, self.results, processors, triangle=self.triangle, summand=self.summand)

    def seconds(self, table: Table, processors: int) -> float:
        """While nothing else runs."""
        tile, how = self.tile(table, processors), {"triangle": self.triangle, "summand": self.summand}
        return launch_seconds(tile, table.device, self.results, processors, **how)

    def seconds_when_held(self, table: Table, processors: int, held: int) -> float:
        """While collectives with other ranks hold ``held`` multiprocessors."""
        tile, how = self.tile(table, processors), {"triangle": self.triangle, "summand": self.summand}
        tiles = sum(b * programs(tile, rows, cols, triangle=self.triangle) for b, rows, cols, _ in self.results)
        width = processors * tile.resident
        # Kernels for one shape start a program for each tile, which is what waves come down to at their end.
        starts = waves(tiles, width, shared=True) if self.listed else [*range(0, tiles, width), tiles]
        return seconds_beside(tile, table.device, self.results, processors - held, starts, width, **how)[0]


@dataclass(frozen=True)
class Steps:
    """What is done with each matrix of a list.

    Args:
        form: "standard" or "gram".
        triples: (a, b, c) of each step.
        restarts: of the gram form.
        folds: aI + Z is one matrix, as in float16.
        itemsize: bytes of an entry.
        limit: bytes that a chunk may hold beside inputs and results.
    """

    form: str
    triples: tuple[Triple, ...]
    restarts: tuple[int, ...]
    folds: bool
    itemsize: int
    limit: int


@lru_cache(maxsize=256)  # a plan asks several times for each call, and layers have the same ones
def launches(tensors: tuple[tuple[Matrices, int], ...], steps: Steps) -> tuple[Launched, ...]:
    """Of the products of these matrices.

    Args:
        tensors: and bytes of an entry of each.
    """
    found: list[Launched] = []
    how = (steps.form, len(steps.triples), len(steps.restarts))
    stacks = [Stack(b, list_bytes(k, w, *how, given, steps.itemsize)) for (b, k, w), given in tensors]
    for chunk in chunked(stacks, steps.limit):
        pieces = [(piece.stop - piece.start, tensors[i][0][1], tensors[i][0][2]) for i, piece in chunk]
        small = [piece for piece in pieces if piece[1] * piece[2] <= SMALL]
        results = [piece for piece in pieces if piece not in small]
        for k, width in dict.fromkeys(piece[1:] for piece in small):
            results.append((sum(piece[0] for piece in small if piece[1:] == (k, width)), k, width))
        results.sort(key=lambda piece: (-piece[2], -piece[1]))
        counts: dict[tuple[int, int], int] = {}
        for b, k, width in results:
            counts[k, width] = counts.get((k, width), 0) + b
        layout = Layout(tuple((b, k, width) for (k, width), b in counts.items()))
        noted = _Noted(layout, results, listed=len(results) > 1)
        folding = noted if steps.folds else None
        FORMS[steps.form](False, steps.triples, steps.restarts, noted, out=True, folding=folding)
        found += noted.launched
    return tuple(found)


@dataclass
class _Noted:
    """``iterations.Products`` and ``Folding`` that note what would be launched; a matrix is whether it is square."""

    layout: Layout
    results: Sequence[Matrices]
    listed: bool
    launched: list[Launched] = field(default_factory=list)

    def _note(self, part: str, triangle: bool, square: bool, summand: bool) -> bool:
        results = results_of(self.layout, triangle=triangle, square=square)
        self.launched.append(Launched(part, results, triangle, summand, self.listed))
        return square

    def outer(self, x: bool) -> bool:
        self._note("XXᵀ", triangle=True, square=x, summand=False)
        return True

    def symmetric(
        self, left: bool, right: bool, *, plus: bool | None = None, beta: float = 0, alpha: float = 1, gamma: float = 0
    ) -> bool:
        part = "bR + cR², and aI" if alpha != 1 or gamma else "S and R"
        return self._note(part, triangle=True, square=True, summand=plus is not None)

    def general(
        self, left: bool, right: bool, *, plus: bool | None = None, beta: float = 0, out: object = None
    ) -> bool:
        if out is None:
            return self._note("Q" if right else "FX, or QX", triangle=False, square=right, summand=plus is not None)
        self.launched += [
            Launched("the last X", ((b, k, width, k),), triangle=False, summand=plus is not None, listed=False)
            for b, k, width in self.results
        ]
        return right

    def add_to_diagonal(self, x: bool, a: float) -> None:
        """No product."""
