"""A cost model of a matrix-product launch: seconds from a few numbers, each measured or estimated once.

A launch computes the tiles of one result or of many. They are dealt to the multiprocessors, of which the busiest gets q
tiles and runs up to ``tile.resident`` of them side by side:

    seconds = launch + operations(q tiles) / rate(min(q, resident)) + ⌈q / resident⌉ · overhead
    rate(r) = device.rate · tile.rate · (solo + (1 - solo) (r - 1) / (resident - 1)),   rate · tile.rate if resident = 1

So a program alone on its multiprocessor runs at a part ``solo`` of the rate, because nothing fills the gaps between its
loads, products and stores; and the ``overhead`` of a program, before and after its loop, is hidden behind the programs
beside it. A grouped launch, for a list of matrices, is persistent: the time between the loops of two tiles, ``between``
or ``between_flattened``, takes the place of ``overhead``. Memory is no limit of these kernels: from 512 up all their
operands are read from L2.

``tiles.json`` names its sources. ``benchmarks/tune_tiles.py`` measures tiles of sm_90 and their relative rates; the
rate of lists and the time between two tiles are fitted to lists that ran back to back beside a product of random
matrices (``benchmarks/list_model.py --fit``). Power limits both: cuBLAS makes 798 TFLOP/s with pauses between launches
and 650 to 690 without, while a model's own products, of less random numbers, run at the former. Rates of other
architectures are **estimated** from published figures of Triton and cuBLAS on large products; overhead and launch from
the latencies of a pipeline's first loads and of a graph's kernel nodes; ``start`` from a program's launch, three
descriptors and its first loads.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

#: time of half a tile, as a part of the whole tile's: 128 × 128 has 0.873 of the rate of 128 × 256 (H100)
HALF = 0.57

#: (matrices, rows, columns, summed dimension)
Result = tuple[int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """A tile: the part of a result that one program computes at a time, and the settings of its kernel."""

    rows: int
    cols: int
    depth: int = 64  # entries of the summed dimension loaded at a time
    group: int = 8  # rows of tiles that are walked together, so that their operands stay in the L2 cache
    stages: int = 3  # Triton's num_stages
    warps: int = 4  # Triton's num_warps
    rate: float = 1.0  # operations a second of a multiprocessor, relative to the table's fastest tile
    descriptors: bool = False  # operands come through the tensor memory accelerator (TMA)
    specialize: bool = False  # loads and products run in warps of their own
    resident: int = 1  # programs that one multiprocessor holds, by registers and shared memory
    resident_in_list: int = 0  # the same of the grouped kernel, which stores through shared memory; 0 for ``resident``
    listed: bool = False  # this is the tile of a grouped launch

    @cached_property
    def in_list(self) -> "Tile":
        """The tile with the settings of the grouped kernel."""
        return replace(self, resident=self.resident_in_list or self.resident, resident_in_list=0, listed=True)

    def halves(self, *, triangle: bool) -> bool:
        """Tell whether a grouped kernel computes half the width of a tile whose right square is above the diagonal."""
        return triangle and self.cols == 2 * self.rows

    def flattened(self, *, summand: bool) -> bool:
        """Tell whether a grouped kernel loads the next tile's operands while it stores this one."""
        # Without descriptors these loads would hold too many registers. A summand loaded ahead takes 64 KiB that a
        # stage needs, and makes Triton wait for every product. Specialized warps overlap loads and stores anyway.
        return self.descriptors and not self.specialize and not summand


@dataclass(frozen=True)
class Device:
    """The model's numbers for one architecture; times are in seconds."""

    rate: float = 1.0  # operations a second of one multiprocessor on the table's fastest tile, dense, half precision
    # The same in grouped launches, whose matrices take more power than a model's; 0 for ``rate``.
    list_rate: float = 0.0
    solo: float = 1.0  # part of a tile's rate that one program reaches alone, where several could be resident
    overhead: float = 0.0  # of a program, before and after its loop
    launch: float = 0.0  # from the end of one kernel of a CUDA graph to the start of the next
    between: float = 0.0  # of a grouped kernel's program, between the loops of two tiles
    between_flattened: float = 0.0  # the same where loops are flattened
    start: float = 0.0  # from the end of a grouped kernel's program to the first products of the one in its place

    def rate_of(self, tile: Tile) -> float:
        """Return a multiprocessor's operations a second on a tile."""
        return tile.rate * (self.list_rate if tile.listed and self.list_rate else self.rate)

    def overhead_of(self, tile: Tile, *, summand: bool) -> float:
        """Return the seconds that a tile takes outside its loop."""
        if not tile.listed:
            return self.overhead
        return self.between_flattened if tile.flattened(summand=summand) else self.between


def ceildiv(a: int, b: int) -> int:
    """Return ⌈a / b⌉ on the host, where ``triton.cdiv``, which also serves kernels, takes longer."""
    return -(-a // b)


def programs(tile: Tile, rows: int, cols: int, *, triangle: bool) -> int:
    """Count the tiles of one result; with ``triangle`` those that hold some of a square result's lower triangle."""
    down, across = ceildiv(rows, tile.rows), ceildiv(cols, tile.cols)
    if not triangle:
        return down * across
    return sum(min(across, ceildiv((i + 1) * tile.rows, tile.cols)) for i in range(down))


def costs(tile: Tile, results: Sequence[Result], *, triangle: bool) -> list[tuple[int, int]]:
    """List (number of equal tiles, operations of one) in the order in which tiles are dealt out."""
    whole = [(b * programs(tile, m, n, triangle=triangle), 2 * tile.rows * tile.cols * d) for b, m, n, d in results]
    if not (tile.listed and tile.halves(triangle=triangle)):
        return whole
    # A grouped kernel's half tiles on diagonals come last, with as many operations as they take time for.
    halves = [
        (b * ceildiv(ceildiv(m, tile.rows), 2), int(HALF * cost))
        for (b, m, *_), (_, cost) in zip(results, whole, strict=True)
    ]
    return [(tiles - on_diagonal, cost) for (tiles, cost), (on_diagonal, _) in zip(whole, halves, strict=True)] + halves


def busiest(tile: Tile, results: Sequence[Result], processors: int, *, triangle: bool) -> tuple[int, int]:
    """Return (operations, tiles) of the busiest multiprocessor when the tiles of all results are dealt out in order."""
    loads = [0] * processors
    first = 0
    for tiles, cost in costs(tile, results, triangle=triangle):
        end = first + tiles
        for processor in range(processors):
            loads[processor] += (ceildiv(end - processor, processors) - ceildiv(first - processor, processors)) * cost
        first = end
    return max(loads), ceildiv(first, processors)


def seconds(
    tile: Tile, device: Device, results: Sequence[Result], processors: int, *, triangle: bool, summand: bool = True
) -> float:
    """Estimate the seconds of one launch that computes ``results`` by ``tile`` on ``processors`` multiprocessors.

    ``triangle`` counts only the tiles that hold some of a square result's lower triangle.
    """
    # On 132 multiprocessors the 272 tiles of 128 × 256 in the triangle of a 4096 × 4096 result keep some busy for three
    # tiles, where 128 × 128 are 528, four each: two thirds of the work.
    operations, tiles = busiest(tile, results, processors, triangle=triangle)
    active = min(tiles, tile.resident)
    factor = 1.0 if tile.resident == 1 else device.solo + (1 - device.solo) * (active - 1) / (tile.resident - 1)
    loop = operations / (device.rate_of(tile) * factor)
    return device.launch + loop + ceildiv(tiles, tile.resident) * device.overhead_of(tile, summand=summand)


def waves(tiles: int, width: int, *, shared: bool) -> list[int]:
    """Return the first tile of each wave of programs, then ``tiles``.

    Program p takes every ``width``-th tile of wave ⌊p / width⌋, from p mod width on.
    """
    # One wave is best on a device that runs nothing else. Where collectives hold some multiprocessors (``shared``),
    # programs that find no place begin when others end: in one wave all their tiles are still to do then, and the
    # launch takes twice as long. So each wave takes half of the remaining tiles, the last waves a tile a program. No
    # counter on the device has to be reset, and a collective gets in whenever a program ends.
    starts = [0]
    while starts[-1] < tiles:
        tiles_a_program = ceildiv(tiles - starts[-1], width)
        starts.append(min(tiles, starts[-1] + (max(tiles_a_program // 2, 1) if shared else tiles_a_program) * width))
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
    """Estimate (seconds of a grouped launch, seconds of its longest program) on ``free`` multiprocessors, at least one;
    other kernels hold the rest.

    The second is the wait of a collective that arrives when all multiprocessors are taken. ``starts`` and ``width`` are
    those of :func:`waves`; ``start``: seconds that a program takes to begin where another ended, None for the device's.
    On a free device one wave takes :func:`seconds`, unless the busiest multiprocessor's tiles are not the most.
    """
    rate = device.rate_of(tile) / tile.resident  # of one program among as many as there is room for
    overhead = device.overhead_of(tile, summand=summand)
    tile_seconds: list[float] = []
    for tiles, operations in costs(tile, results, triangle=triangle):
        tile_seconds += [operations / rate + overhead] * tiles
    ends = [0.0] * (free * tile.resident)
    longest = 0.0
    for first, stop in pairwise(starts):
        for first_tile in range(first, min(first + width, stop)):
            program_seconds = sum(tile_seconds[first_tile:stop:width])
            freed = heapq.heappop(ends)
            if freed:  # the program takes the place of one that ended then
                program_seconds += device.start if start is None else start
            heapq.heappush(ends, freed + program_seconds)
            longest = max(longest, program_seconds)
    return device.launch + max(ends), longest
