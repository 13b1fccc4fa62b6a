"""How long a launch of a matrix-product kernel should take: a model of few numbers, each replaced by one measurement.

A launch makes the tiles of one result or of many. They are dealt to the multiprocessors, of which the busiest gets q
tiles and runs up to ``tile.resident`` of them side by side:

    seconds = launch + operations(q tiles) / rate(min(q, resident)) + ⌈q / resident⌉ · overhead
    rate(r) = device.rate · tile.rate · (solo + (1 - solo) (r - 1) / (resident - 1)),   rate · tile.rate if resident = 1

So a block alone on its multiprocessor runs at a part ``solo`` of the rate, because nothing fills the gaps between its
loads, products and stores; and what a block does before and after its loop, ``overhead``, is hidden behind the blocks
beside it. In a launch for a list programs stay, and ``between`` two loops, or ``between_flattened``, stands in place of
``overhead``. Memory is no limit of these kernels: from 512 up each of their operands is read from L2.

Sources stand in ``tiles.json``. Tiles of sm_90 and their relative rates are measured by ``benchmarks/tune_tiles.py``;
the device's rate and what lies between two tiles are fitted to lists that ran back to back beside a product, at the
clock of a card that works (``benchmarks/list_model.py --fit``): cuBLAS makes 798 TFLOP/s with pauses between launches
and 650 to 690 without. Rates of other architectures are **estimated** from published figures of Triton and cuBLAS on
large products; overhead and launch from the latencies of a pipeline's first loads and of a graph's kernel nodes;
``start`` from a block's launch, three descriptors and its first loads.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

__all__ = ["Device", "Result", "Tile", "busiest", "ceildiv", "programs", "seconds", "seconds_beside", "waves"]

#: Of a tile's time, that of half of its width: 128 × 128 has 0.873 of the rate of 128 × 256 on an H100.
HALF = 0.57

#: (matrices, rows, columns, summed dimension)
Result = tuple[int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """What one program makes of a result, and how.

    Args:
        rows, cols: of the result.
        depth: of the summed dimension at a time.
        group: rows of tiles that are walked together, so that their operands stay in the L2 cache.
        stages, warps: Triton's num_stages and num_warps.
        rate: what a multiprocessor does of such tiles in a second, relative to the table's fastest.
        descriptors: operands come through the tensor memory accelerator.
        specialize: loads and products run in warps of their own.
        resident: programs that one multiprocessor holds, by registers and shared memory.
        resident_in_list: the same of the kernel for lists, which stores through shared memory; 0 for as many.
        listed: this is the tile of a launch for lists.
    """

    rows: int
    cols: int
    depth: int = 64
    group: int = 8
    stages: int = 3
    warps: int = 4
    rate: float = 1.0
    descriptors: bool = False
    specialize: bool = False
    resident: int = 1
    resident_in_list: int = 0
    listed: bool = False

    @cached_property
    def in_list(self) -> "Tile":
        """The tile as the kernel for lists has it."""
        return replace(self, resident=self.resident_in_list or self.resident, resident_in_list=0, listed=True)

    def halves(self, *, triangle: bool) -> bool:
        """Whether a kernel for lists makes a tile whose right square is above the diagonal of half the width."""
        return triangle and self.cols == 2 * self.rows

    def flattened(self, *, summand: bool) -> bool:
        """Whether a kernel for lists loads the next tile's operands under the stores of this one.

        Not without descriptors, whose loads would hold too many registers. A summand that is loaded ahead takes 64 KiB
        that a stage needs, and makes Triton wait for every product. Where loops are specialized warps do it.
        """
        return self.descriptors and not self.specialize and not summand


@dataclass(frozen=True)
class Device:
    """Assumptions about one architecture.

    Args:
        rate: operations a second of one multiprocessor on the fastest tile of the table, dense, half precision.
        solo: part of a tile's rate that one block reaches alone, where several could be resident.
        overhead: seconds that a block spends before and after its loop.
        launch: seconds from the end of one kernel of a CUDA graph to the start of the next.
        between: seconds that a program of a list spends between the loops of two tiles.
        between_flattened: the same where loops are flattened.
        start: seconds from the end of a program of a list until the one that takes its place makes products.
    """

    rate: float = 1.0
    solo: float = 1.0
    overhead: float = 0.0
    launch: float = 0.0
    between: float = 0.0
    between_flattened: float = 0.0
    start: float = 0.0

    def overhead_of(self, tile: Tile, *, summand: bool) -> float:
        """Seconds that a tile costs beside its loop."""
        if not tile.listed:
            return self.overhead
        return self.between_flattened if tile.flattened(summand=summand) else self.between


def ceildiv(a: int, b: int) -> int:
    """⌈a / b⌉; ``triton.cdiv`` serves kernels too, and on the host costs more than what it divides for."""
    return -(-a // b)


def programs(tile: Tile, rows: int, cols: int, *, triangle: bool) -> int:
    """Tiles of one result; with ``triangle`` only those that hold some of a square result's lower triangle."""
    down, across = ceildiv(rows, tile.rows), ceildiv(cols, tile.cols)
    if not triangle:
        return down * across
    return sum(min(across, ceildiv((i + 1) * tile.rows, tile.cols)) for i in range(down))


def costs(tile: Tile, results: Sequence[Result], *, triangle: bool) -> list[tuple[int, int]]:
    """(tiles, operations of one) in the order they are dealt out; for lists halves on diagonals are behind all others,
    with as many operations as they take time for."""
    whole = [(b * programs(tile, m, n, triangle=triangle), 2 * tile.rows * tile.cols * d) for b, m, n, d in results]
    if not (tile.listed and tile.halves(triangle=triangle)):
        return whole
    halves = [
        (b * ceildiv(ceildiv(m, tile.rows), 2), int(HALF * cost))
        for (b, m, *_), (_, cost) in zip(results, whole, strict=True)
    ]
    return [(tiles - some, cost) for (tiles, cost), (some, _) in zip(whole, halves, strict=True)] + halves


def busiest(tile: Tile, results: Sequence[Result], processors: int, *, triangle: bool) -> tuple[int, int]:
    """(operations, tiles) of the busiest multiprocessor when the tiles of all results are dealt out in order."""
    loads = [0] * processors
    first = 0
    for tiles, cost in costs(tile, results, triangle=triangle):
        end = first + tiles
        for p in range(processors):
            loads[p] += (ceildiv(end - p, processors) - ceildiv(first - p, processors)) * cost
        first = end
    return max(loads), ceildiv(first, processors)


def seconds(
    tile: Tile, device: Device, results: Sequence[Result], processors: int, *, triangle: bool, summand: bool = True
) -> float:
    """Expected time of one launch.

    On 132 multiprocessors the 272 tiles of 128 × 256 in the triangle of a 4096 × 4096 result keep some busy for three
    tiles, where 128 × 128 are 528, four each: two thirds of the work.

    Args:
        tile: of all results.
        device: assumptions.
        results: (matrices, rows, columns, summed dimension), in order.
        processors: multiprocessors that share the tiles.
        triangle: counts only the tiles that hold some of a square result's lower triangle.
        summand: the product has one.
    """
    operations, tiles = busiest(tile, results, processors, triangle=triangle)
    beside = min(tiles, tile.resident)
    filled = 1.0 if tile.resident == 1 else device.solo + (1 - device.solo) * (beside - 1) / (tile.resident - 1)
    loop = operations / (device.rate * tile.rate * filled)
    return device.launch + loop + ceildiv(tiles, tile.resident) * device.overhead_of(tile, summand=summand)


def waves(tiles: int, width: int, *, shared: bool) -> list[int]:
    """The tile that each wave of programs begins with, and ``tiles``: program p takes every ``width``-th tile of wave
    ⌊p / width⌋, from p mod width on.

    One wave is the least for a device that nothing else runs on. Where collectives with other ranks hold some of it
    (``shared``), programs that find no place begin when others end: with one wave that is when nothing is left for
    those to do, and the launch takes twice as long. So each wave takes half of what is left, the last ones a tile a
    program. Nothing is counted on the device, so nothing has to be reset; and whenever a program ends a collective gets
    in.
    """
    starts = [0]
    while starts[-1] < tiles:
        left = ceildiv(tiles - starts[-1], width)
        starts.append(min(tiles, starts[-1] + (max(left // 2, 1) if shared else left) * width))
    return starts


def seconds_beside(
    tile: Tile,
    device: Device,
    results: Sequence[Result],
    free: int,
    starts: Sequence[int],
    width: int,
    *,
    triangle: bool,
    summand: bool,
    start: float | None = None,
) -> tuple[float, float]:
    """A launch for a list while others hold all but ``free`` multiprocessors: (its time, that of its longest program).

    The latter is how long a collective waits that comes when all are taken. Programs begin in order, each where one
    ends first; on a device all of whose ``width`` places are free one wave takes :func:`seconds`, but for where the
    tiles of the busiest multiprocessor are not the most.

    Args:
        tile, device, results, triangle, summand: as for :func:`seconds`; one program a multiprocessor runs at its rate.
        free: multiprocessors, at least one.
        starts, width: who makes which tile, as :func:`waves` has it.
        start: seconds that a program takes to begin where another ended; None for the device's.
    """
    rate = device.rate * tile.rate / tile.resident  # of one program among as many as there is room for
    overhead = device.overhead_of(tile, summand=summand)
    each: list[float] = []
    for tiles, operations in costs(tile, results, triangle=triangle):
        each += [operations / rate + overhead] * tiles
    ends = [0.0] * (free * tile.resident)
    longest = 0.0
    for first, stop in pairwise(starts):
        for lane in range(first, min(first + width, stop)):
            time = sum(each[lane:stop:width])
            begun = heapq.heappop(ends)
            if begun:
                time += device.start if start is None else start
            heapq.heappush(ends, begun + time)
            longest = max(longest, time)
    return device.launch + max(ends), longest
