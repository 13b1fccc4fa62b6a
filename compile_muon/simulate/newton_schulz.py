"""Newton-Schulz calls: their launches on a GPU, their time, their memory.

The launches are those of ``kernels/gpu/grouped.py``: matrices of one form in chunks below a limit of memory, one launch
for each product of a chunk, except the last product, which writes each result tensor in a launch of its own. A chunk of
one tensor, or of small matrices of one shape, takes the kernels for one shape. ``kernels/gpu/model.py`` has the time of
each launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.fx import Node

from compile_muon.kernels.batching import Stack, batch_bytes, chunked
from compile_muon.kernels.call_plan import AUTO_LIMIT, MEMORY_LIMIT
from compile_muon.kernels.dispatch import chosen_form
from compile_muon.kernels.gpu.arena import SMALL, Layout, list_bytes
from compile_muon.kernels.gpu.model import Result, Tile, programs, seconds_beside, waves
from compile_muon.kernels.gpu.model import seconds as launch_seconds
from compile_muon.kernels.gpu.tile_order import results_of
from compile_muon.kernels.gpu.tiles import Table, choose
from compile_muon.kernels.iterations import FORMS
from compile_muon.kernels.stability import Triple
from compile_muon.passes.pipeline import tensor_value
from compile_muon.simulate.machine import Machine

#: kernels of the normalization, by how many matrices each reads and writes: largest entry, division by it, norm,
#: division; aten needs one more pass for the least entry
_NORMALIZE = (1, 2, 1, 2)
#: launches for a stack of matrices beside its products: norms, division, two copies, the last product
_BESIDE = 5

#: (matrices, k, l) of a tensor, k ≤ l
Matrices = tuple[int, int, int]


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel launch that computes one product of all its matrices."""

    part: str  # name of the product
    results: tuple[Result, ...]  # (matrices, rows, columns, summed dimension)
    triangle: bool  # computes one triangle of symmetric results
    summand: bool  # the product adds a matrix
    listed: bool = True  # one launch for a whole list, by the kernel for lists
    halves: bool = True  # tiles on the diagonal of a list may be half as wide

    def tile(self, table: Table, processors: int) -> Tile:
        """Return the tile that the kernel would choose."""
        tiles = table.symmetric if self.triangle else table.product
        if self.listed:
            tiles = tuple(replace(tile.in_list, listed=self.halves) for tile in tiles)
        return choose(tiles, table.device, self.results, processors, triangle=self.triangle, summand=self.summand)

    def seconds(self, table: Table, processors: int) -> float:
        """Return the time of the launch on an otherwise idle GPU."""
        tile, how = self.tile(table, processors), {"triangle": self.triangle, "summand": self.summand}
        return launch_seconds(tile, table.device, self.results, processors, **how)

    def seconds_when_held(self, table: Table, processors: int, held_processors: int) -> float:
        """Return the time of the launch while collectives with other ranks hold `held_processors`."""
        tile, how = self.tile(table, processors), {"triangle": self.triangle, "summand": self.summand}
        tiles = sum(b * programs(tile, rows, cols, triangle=self.triangle) for b, rows, cols, _ in self.results)
        width = processors * tile.resident
        # Kernels for one shape start a program for each tile, as the last waves of a list do.
        starts = waves(tiles, width, shared=True) if self.listed else [*range(0, tiles, width), tiles]
        return seconds_beside(tile, table.device, self.results, processors - held_processors, starts, width, **how)[0]


@dataclass(frozen=True)
class Steps:
    """The Newton-Schulz iteration applied to each matrix of a list."""

    form: str  # "standard" or "gram"
    triples: tuple[Triple, ...]  # (a, b, c) of each iteration
    restarts: tuple[int, ...]  # iterations at which the gram form restarts
    folds: bool  # aI + Z is one matrix, as in float16
    itemsize: int  # bytes of an entry
    limit: int  # bytes that a chunk may hold beside inputs and results


@lru_cache(maxsize=256)  # plans repeat calls, and layers repeat shapes
def launches(tensors: tuple[tuple[Matrices, int], ...], steps: Steps) -> tuple[KernelLaunch, ...]:
    """Return the launches of the products of these tensors, each given with the bytes of an input entry."""
    launched: list[KernelLaunch] = []
    how = (steps.form, len(steps.triples), len(steps.restarts))
    stacks = [Stack(b, list_bytes(k, w, *how, input_itemsize, steps.itemsize)) for (b, k, w), input_itemsize in tensors]
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
        FORMS[steps.form](False, steps.triples, steps.restarts, noted, out=True, folded=steps.folds)
        launched += noted.launched
    return tuple(launched)


@dataclass
class _Noted:
    """``iterations.Products`` that record launches in place of computing.

    A matrix is represented by one bool: whether it is square.
    """

    layout: Layout
    results: Sequence[Matrices]
    listed: bool
    launched: list[KernelLaunch] = field(default_factory=list)

    def _note(self, part: str, triangle: bool, square: bool, summand: bool) -> bool:
        results = results_of(self.layout, triangle=triangle, square=square)
        self.launched.append(KernelLaunch(part, results, triangle, summand, self.listed))
        return square

    def outer(self, x: bool) -> bool:
        self._note("XXᵀ", triangle=True, square=x, summand=False)
        return True

    def symmetric(
        self, left: bool, right: bool, *, plus: bool | None = None, beta: float = 0, alpha: float = 1, gamma: float = 0
    ) -> bool:
        part = "bR + cR², and aI" if alpha != 1 or gamma else "S and R, a mirrored Q"
        return self._note(part, triangle=True, square=True, summand=plus is not None)

    def general(
        self, left: bool, right: bool, *, plus: bool | None = None, beta: float = 0, out: object = None
    ) -> bool:
        if out is None:
            return self._note("Q" if right else "FX, or QX", triangle=False, square=right, summand=plus is not None)
        self.launched += [
            KernelLaunch("the last X", ((b, k, width, k),), triangle=False, summand=plus is not None, listed=False)
            for b, k, width in self.results
        ]
        return right

    def add_to_diagonal(self, x: bool, a: float) -> None:
        """Record nothing: this is no product."""


class Call:
    """A ``muon_zero::newton_schulz`` node on a machine."""

    def __init__(self, node: Node, machine: Machine) -> None:
        xs, coefficients, self.method, self.dtype, _, _, self.restarts, backend, limit, norms = node.args
        self.machine = machine
        #: bytes that the call may hold beside inputs and results
        self.limit: int = MEMORY_LIMIT if limit == AUTO_LIMIT else limit
        self.triples = tuple(zip(coefficients[0::3], coefficients[1::3], coefficients[2::3], strict=True))
        halves = machine.device == "cuda" and self.dtype in ("float16", "bfloat16")
        has_kernels = machine.tiles is None or machine.tiles.taken(backend)
        #: Triton computes it: one triangle of symmetric products
        self.symmetric = halves and backend != "aten" and has_kernels
        self.itemsize: int = getattr(torch, self.dtype).itemsize
        self.norms = bool(norms)  # norms of rows are given
        #: (matrices, k, l, dtype, whether it is tall) of each tensor with entries
        self.tensors: list[tuple[int, int, int, torch.dtype, bool]] = []
        for value in filter(torch.Tensor.numel, map(tensor_value, xs)):
            rows, cols = (int(size) for size in value.shape[-2:])
            matrices = value.shape[:-2].numel()
            self.tensors.append((matrices, min(rows, cols), max(rows, cols), value.dtype, rows > cols))

    def form(self, rows: int, cols: int) -> str:
        """Return the iteration, "standard" or "gram", that the kernels choose for matrices of this shape."""
        return chosen_form(self.method, rows, cols, len(self.triples), len(self.restarts), symmetric=self.symmetric)

    def _steps(self, form: str, *, folds: bool) -> Steps:
        return Steps(form, self.triples, tuple(self.restarts), folds, self.itemsize, self.limit)

    @cached_property
    def listed(self) -> list[KernelLaunch] | None:
        """Triton's launches; None where other kernels compute the call, or the machine has no tile tables."""
        if self.machine.tiles is None or not self.symmetric:
            return None
        groups: dict[str, list[tuple[Matrices, int]]] = {}
        for b, k, width, dtype, _ in self.tensors:
            groups.setdefault(self.form(k, width), []).append(((b, k, width), dtype.itemsize))
        launched: list[KernelLaunch] = []
        for form, tensors in groups.items():
            launched += launches(tuple(tensors), self._steps(form, folds=self.dtype == "float16"))
        return launched

    @property
    def _shapes(self) -> Counter[tuple[int, int, bool]]:
        """The number of matrices of each (k, l, whether tall)."""
        counts: Counter[tuple[int, int, bool]] = Counter()
        for b, k, width, _, tall in self.tensors:
            counts[k, width, tall] += b
        return counts

    def _beside_products(self) -> Iterator[int]:
        """Yield the bytes of each Triton kernel that is no product: norms, divisions, copies of small matrices."""
        small_sizes: dict[tuple[int, int, int, bool], list[tuple[int, int]]] = {}
        for b, k, width, dtype, tall in self.tensors:
            entries, itemsize = b * k * width, dtype.itemsize
            norm_bytes = 4 * b * (width if tall else k) if self.norms else itemsize * entries
            if k * width <= SMALL:
                small_sizes.setdefault((k, width, itemsize, tall), []).append((entries, norm_bytes))
            else:
                yield from (norm_bytes, (itemsize + self.itemsize) * entries)
        for (_, _, itemsize, _), sizes in small_sizes.items():
            entries, norm_bytes = map(sum, zip(*sizes, strict=True))
            if len(sizes) > 1:
                yield from (2 * itemsize * entries, 2 * self.itemsize * entries)
                if self.norms:
                    yield 2 * norm_bytes
            yield from (norm_bytes, (itemsize + self.itemsize) * entries)

    def seconds(self) -> float:
        """Return the time of products, normalization, and transposing tall matrices back.

        CPUs take one matrix at a time and compute products whole. GPUs take all matrices of a shape at once and compute
        one triangle of symmetric products in half precision, unless the call asks for aten. Where the machine has tile
        tables, the time of Triton's kernels is the sum of their launches.
        """
        if self.listed is None:
            return sum(self._shape_seconds(count, *shape) for shape, count in self._shapes.items())
        return self._alone(self.listed) + sum(map(self.machine.move_seconds, self._beside_products()))

    def _alone(self, listed: Sequence[KernelLaunch]) -> float:
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
        """Return the factor by which a collective that holds multiprocessors lengthens this call."""
        tiles, processors, busy = self.machine.tiles, self.machine.processors, self.machine.collective_processors
        if not self.listed or tiles is None:
            return processors / (processors - busy)
        beside = sum(each.seconds_when_held(tiles, processors, busy) for each in self.listed)
        return max(1.0, beside / self._alone(self.listed))

    def launched(self) -> int:
        """Return how many kernels the host launches; 1 on CPUs.

        Triton launches one kernel for each product of all half-precision matrices of a form, but one for each result in
        the last product. cuBLAS takes the matrices of one shape together.
        """
        if self.machine.device == "cpu":
            return 1
        if self.listed is not None:
            return len(self.listed) + sum(1 for _ in self._beside_products())
        products: dict[Any, int] = {}
        for shape in self._shapes:
            form = self.form(*shape[:2])
            products[form if self.symmetric else shape] = (5 if form == "gram" else 3) * len(self.triples)
        return sum(products.values()) + (_BESIDE if self.symmetric else 2 * _BESIDE) * len(self._shapes)

    def workspace_bytes(self) -> int:
        """Return the bytes held beside inputs and results.

        On CPUs, X once more and two k x k matrices, for one matrix at a time. On GPUs, those of the largest chunk as
        ``compile_muon.kernels`` builds chunks: all matrices of a form for Triton, those of one shape for aten.
        """
        if self.machine.device == "cpu":
            return max(((k * width + 2 * k**2) * self.itemsize for _, k, width, _, _ in self.tensors), default=0)
        groups: dict[tuple[object, ...], list[Stack]] = {}
        for b, k, width, dtype, _ in self.tensors:
            steps = (self.form(k, width), len(self.triples), len(self.restarts))
            key: tuple[object, ...]
            if self.symmetric:
                key, matrix_bytes = steps, list_bytes(k, width, *steps, dtype.itemsize, self.itemsize)
            else:
                key, matrix_bytes = (k, width, dtype), batch_bytes(k, width, dtype.itemsize, self.itemsize)
            groups.setdefault(key, []).append(Stack(b, matrix_bytes))
        chunks = [(stacks, chunk) for stacks in groups.values() for chunk in chunked(stacks, self.limit)]
        chunk_bytes = (sum((p.stop - p.start) * stacks[i].bytes_each for i, p in chunk) for stacks, chunk in chunks)
        return max(chunk_bytes, default=0)
