"""Calls of Newton-Schulz: their launches on a GPU, how long they take, and what they hold.

As ``kernels/gpu/grouped.py`` makes them: matrices of a form in chunks that stay under a limit of memory, each product
of a chunk one launch, but for the last, which writes each tensor of results by itself; a chunk of one tensor, or of
small ones of one shape, by the kernels for one shape. The time of each is ``kernels/gpu/model.py``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.fx import Node

from compile_muon.kernels import quack
from compile_muon.kernels.batching import Stack, batch_bytes, chunked
from compile_muon.kernels.call_plan import AUTO_LIMIT, MEMORY_LIMIT
from compile_muon.kernels.dispatch import chosen_form
from compile_muon.kernels.gpu.arena import SMALL, Layout, list_bytes, work_bytes
from compile_muon.kernels.gpu.model import Result, Tile, programs, seconds_beside, waves
from compile_muon.kernels.gpu.model import seconds as launch_seconds
from compile_muon.kernels.gpu.tile_order import results_of
from compile_muon.kernels.gpu.tiles import Table, choose
from compile_muon.kernels.iterations import FORMS
from compile_muon.kernels.stability import Triple
from compile_muon.passes.pipeline import tensor_value
from compile_muon.planning.machine import Machine

__all__ = ["Call", "Launched", "Steps", "launches"]

#: passes over a matrix, in matrices read and written by each: its largest entry, the division by it, norm, division;
#: PyTorch's own operations find the least entry by another
_NORMALIZE = (1, 2, 1, 2)
#: launches for a stack of matrices beside its products: norms, division, copies there and back, the last product
_BESIDE = 5

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


class Call:
    """A ``muon_zero::newton_schulz`` node on a machine.

    Attributes:
        tensors: ``(matrices, k, l, dtype, whether it is tall)`` of each, none empty.
        symmetric: Triton makes it, or quack: one triangle of symmetric products.
        by_shape: quack makes it: of all matrices of a form those of a shape together.
        limit: bytes that it may hold beside inputs and results.
        norms: whether it is given norms of rows.
    """

    def __init__(self, node: Node, machine: Machine) -> None:
        xs, coefficients, self.method, self.dtype, _, _, self.restarts, backend, limit, norms = node.args
        self.machine = machine
        self.limit: int = MEMORY_LIMIT if limit == AUTO_LIMIT else limit
        self.triples = tuple(zip(coefficients[0::3], coefficients[1::3], coefficients[2::3], strict=True))
        halves = machine.device == "cuda" and self.dtype in ("float16", "bfloat16")
        taken = backend == "quack" or machine.tiles is None or machine.tiles.taken(backend)
        self.symmetric = halves and backend != "aten" and taken
        self.by_shape = self.symmetric and backend == "quack"
        self.itemsize: int = getattr(torch, self.dtype).itemsize
        self.norms = bool(norms)
        self.tensors: list[tuple[int, int, int, torch.dtype, bool]] = []
        for value in filter(torch.Tensor.numel, map(tensor_value, xs)):
            rows, cols = (int(size) for size in value.shape[-2:])
            matrices = value.shape[:-2].numel()
            self.tensors.append((matrices, min(rows, cols), max(rows, cols), value.dtype, rows > cols))

    def form(self, rows: int, cols: int) -> str:
        """ "standard" or "gram", of matrices of a shape."""
        return chosen_form(self.method, rows, cols, len(self.triples), len(self.restarts), symmetric=self.symmetric)

    def _steps(self, form: str, *, folds: bool) -> Steps:
        return Steps(form, self.triples, tuple(self.restarts), folds, self.itemsize, self.limit)

    @cached_property
    def listed(self) -> list[Launched] | None:
        """The launches of Triton's products; None where something else makes them, or nothing is known."""
        if self.machine.tiles is None or not self.symmetric or self.by_shape:
            return None
        groups: dict[str, list[tuple[Matrices, int]]] = {}
        for b, k, width, dtype, _ in self.tensors:
            groups.setdefault(self.form(k, width), []).append(((b, k, width), dtype.itemsize))
        found: list[Launched] = []
        for form, tensors in groups.items():
            found += launches(tuple(tensors), self._steps(form, folds=self.dtype == "float16"))
        return found

    @property
    def _shapes(self) -> Counter[tuple[int, int, bool]]:
        """How many matrices there are of each shape, k and l, and tall or not."""
        counts: Counter[tuple[int, int, bool]] = Counter()
        for b, k, width, _, tall in self.tensors:
            counts[k, width, tall] += b
        return counts

    def _beside_products(self) -> Iterator[int]:
        """Bytes of each kernel of Triton's that is no product: norms, divisions, copies of small matrices."""
        copied: dict[tuple[int, int, int, bool], list[tuple[int, int]]] = {}
        for b, k, width, dtype, tall in self.tensors:
            entries, given = b * k * width, dtype.itemsize
            measured = 4 * b * (width if tall else k) if self.norms else given * entries
            if k * width <= SMALL:
                copied.setdefault((k, width, given, tall), []).append((entries, measured))
            else:
                yield from (measured, (given + self.itemsize) * entries)
        for (_, _, given, _), sizes in copied.items():
            entries, measured = map(sum, zip(*sizes, strict=True))
            if len(sizes) > 1:
                yield from (2 * given * entries, 2 * self.itemsize * entries)
                if self.norms:
                    yield 2 * measured
            yield from (measured, (given + self.itemsize) * entries)

    def seconds(self) -> float:
        """Of products, normalization, and turning tall matrices back.

        On CPUs each matrix by itself, and products whole. On GPUs all of a shape at once; of symmetric products in half
        precision one triangle, unless the call asks for aten. Where the machine has tiles, what Triton makes goes by
        the launches of its lists.
        """
        if self.listed is None:
            return sum(self._shape_seconds(count, *shape) for shape, count in self._shapes.items())
        return self._alone(self.listed) + sum(map(self.machine.move_seconds, self._beside_products()))

    def _alone(self, listed: Sequence[Launched]) -> float:
        assert self.machine.tiles is not None
        return sum(launched.seconds(self.machine.tiles, self.machine.processors) for launched in listed)

    def _shape_seconds(self, count: int, k: int, width: int, tall: bool) -> float:
        times, batch = (count, 1) if self.machine.device == "cpu" else (1, count)
        seconds = 0.0
        for launched in launches((((1, k, width), 1),), self._steps(self.form(k, width), folds=False)):
            ((_, m, n, inner),) = launched.results
            n = -(-n // 2) if launched.triangle and self.symmetric else n
            seconds += self.machine.product_seconds(m, n, inner, batch=batch, dtype=self.dtype)
        size = batch * k * width * self.itemsize
        moves = [*_NORMALIZE, *([] if self.symmetric else [1]), *([2] if tall else [])]
        return times * (seconds + sum(self.machine.move_seconds(count * size) for count in moves))

    def slower(self) -> float:
        """How many times as long it takes while a collective holds multiprocessors."""
        tiles, processors, held = self.machine.tiles, self.machine.processors, self.machine.collective_processors
        if not self.listed or tiles is None:
            return processors / (processors - held)
        beside = sum(each.seconds_when_held(tiles, processors, held) for each in self.listed)
        return max(1.0, beside / self._alone(self.listed))

    def launched(self) -> int:
        """Kernels that the host starts; on CPUs it is one.

        On GPUs of all matrices of a form in half precision each product is one launch, but for the last, which writes
        each result; else, and by quack, of all matrices of a shape.
        """
        if self.machine.device == "cpu":
            return 1
        if self.listed is not None:
            return len(self.listed) + sum(1 for _ in self._beside_products())
        products: dict[Any, int] = {}
        for shape in self._shapes:
            form = self.form(*shape[:2])
            together = self.symmetric and not self.by_shape
            products[form if together else shape] = (5 if form == "gram" else 3) * len(self.triples)
        return sum(products.values()) + (_BESIDE if self.symmetric else 2 * _BESIDE) * len(self._shapes)

    def workspace_bytes(self) -> int:
        """What it holds beside inputs and results.

        On CPUs of one matrix X once more, and two of k x k. On GPUs of a chunk of matrices, as ``compile_muon.kernels``
        makes them: by Triton of all matrices of a form together, by quack and aten of one shape.
        """
        if self.machine.device == "cpu":
            return max(((k * width + 2 * k**2) * self.itemsize for _, k, width, _, _ in self.tensors), default=0)
        groups: dict[tuple[object, ...], list[Stack]] = {}
        for b, k, width, dtype, _ in self.tensors:
            how = (self.form(k, width), len(self.triples), len(self.restarts))
            key: tuple[object, ...]
            if self.by_shape and quack.fits(k, width, dtype, getattr(torch, self.dtype)):
                key, each = (k, width), work_bytes(k, width, *how, self.itemsize)
            elif self.symmetric and not self.by_shape:
                key, each = how, list_bytes(k, width, *how, dtype.itemsize, self.itemsize)
            else:
                key, each = (k, width, dtype), batch_bytes(k, width, dtype.itemsize, self.itemsize)
            groups.setdefault(key, []).append(Stack(b, each))
        chunks = [(stacks, chunk) for stacks in groups.values() for chunk in chunked(stacks, self.limit)]
        held = (sum((p.stop - p.start) * stacks[i].bytes_each for i, p in chunk) for stacks, chunk in chunks)
        return max(held, default=0)
