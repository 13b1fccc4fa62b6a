"""Tile order: tables that tell a grouped kernel which program computes which tile of a list's results, and when.

Tiles are dealt out to programs in a fixed order, wave by wave (``model.waves``), so that a matrix's last tiles run
beside the first ones of the next. The tables list the place (matrix, row, column) of every tile: a kernel that computed
it would need a square root to find a row in a triangle, and a table can have any order. This one goes column by column
within groups of tile rows, so that operands stay in the L2 cache.

Tables depend on shapes and tiles alone. They are made once and never freed: a captured CUDA graph reads them again at
every replay. T in names: tiles.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, cycle

import torch
from torch import Tensor

from .arena import Layout
from .model import Result, Tile, ceildiv, waves


@dataclass(frozen=True)
class Tables:
    """The tables that a grouped launch reads."""

    # [number of shapes, 8] int64, a row a shape, read by grouped_operands.read_shape: the list's tiles up to the end of
    # this shape; matrices, k, l; start and pitch, in elements, of the k × k matrices in their arena, and of the k × l
    # matrices in theirs. Where tiles on diagonals are cut to halves, as many rows again for these.
    shapes: Tensor
    # [tiles] int64, packed: index of the matrix within its shape, row and column in tiles; halves: column in halves
    places: Tensor
    tiles: int  # number of tiles


def places(matrices: int, rows: int, cols: int, tile: Tile, *, triangle: bool) -> Tensor:
    """List the places (matrix, row, column), in tiles, of [matrices, rows, cols] in order, as [T, 3] int32."""
    down, across = ceildiv(rows, tile.rows), _arange(ceildiv(cols, tile.cols))
    groups = []
    for first in range(0, down, tile.group):
        rows_of_group = first + _arange(min(tile.group, down - first))
        group_T2 = torch.cartesian_prod(across, rows_of_group).flip(1)
        # With ``triangle`` only the tiles that hold some of a square result's lower triangle.
        groups.append(group_T2[group_T2[:, 1] * tile.cols < (group_T2[:, 0] + 1) * tile.rows] if triangle else group_T2)
    matrix_T2 = torch.cat(groups)
    index_T = _arange(matrices).repeat_interleave(len(matrix_T2))
    return torch.cat([index_T[:, None], matrix_T2.repeat(matrices, 1)], dim=1).int()


def packed(places_T3: Tensor) -> Tensor:
    """Pack places into [T] int64, so that a kernel reads a place in one load."""
    matrix, row, col = places_T3.long().unbind(1)
    assert places_T3.numel() == 0 or max(int(row.max()), int(col.max())) < 2**16
    return (matrix << 32) | (row << 16) | col


def results_of(layout: Layout, *, triangle: bool, square: bool) -> tuple[Result, ...]:
    """Return (matrices, rows, columns, summed dimension) of a product's results for each shape.

    ``triangle``: of the symmetric product, whose operands are k × k (``square``) or k × l; else of the general one, of
    k × k matrices by k × k (``square``) or k × l ones.
    """
    shapes = zip(layout.shapes, layout.widths(square=square), strict=True)
    return tuple((b, k, k, cols) if triangle else (b, k, cols, k) for (b, k, _), cols in shapes)


@dataclass(frozen=True)
class Deal:
    """The tiles of each program, as in ``model.waves``."""

    waves: Tensor  # [waves + 1] int32: first tile of each wave, then the number of tiles
    width: int  # programs of a wave; the last wave may have fewer
    programs: int  # of all waves


@cache  # never evicted: see the module's docstring
def dealt(tiles: int, width: int, device: torch.device, *, shared: bool) -> Deal:
    """Deal ``tiles``, at least one, to waves of ``width`` programs by ``model.waves``; raises as :func:`tables`."""
    starts = waves(tiles, width, shared=shared)
    _no_capture(device)
    (device_starts,) = _copied([torch.tensor(starts, dtype=torch.int32, device="cpu")], device)
    last_wave = starts[-1] - starts[-2]
    return Deal(device_starts, width, (len(starts) - 2) * width + min(width, last_wave))


@cache  # never evicted: see the module's docstring
def tables(layout: Layout, tile: Tile, device: torch.device, *, triangle: bool, square: bool) -> Tables:
    """Return the tables of one product of a list on ``device``; ``triangle`` and ``square`` as for :func:`results_of`.

    The first call for a list copies them to the device; under CUDA graph capture it raises RuntimeError.
    """
    _no_capture(device)
    results = results_of(layout, triangle=triangle, square=square)
    all_T3 = [places(b, rows, cols, tile, triangle=triangle) for b, rows, cols, _ in results]
    if tile.halves(triangle=triangle):
        # Tiles with their right half above the diagonal come last, with columns counted in half tiles.
        cut = [x_T3[:, 2] * tile.cols == x_T3[:, 1] * tile.rows for x_T3 in all_T3]
        halves = [x_T3[cut_T] * torch.tensor([1, 1, 2]).int() for x_T3, cut_T in zip(all_T3, cut, strict=True)]
        all_T3 = [x_T3[~cut_T] for x_T3, cut_T in zip(all_T3, cut, strict=True)] + halves
    ends = list(accumulate(map(len, all_T3)))
    arena_fields = [c for of_kk in (True, False) for c in (layout.starts(square=of_kk), layout.pitches(square=of_kk))]
    shape_rows = [[*shape, *(field[i] for field in arena_fields)] for i, shape in enumerate(layout.shapes)]
    rows = [[end, *row] for end, row in zip(ends, cycle(shape_rows), strict=False)]
    shapes, order = _copied([torch.tensor(rows, dtype=torch.int64, device="cpu"), packed(torch.cat(all_T3))], device)
    return Tables(shapes, order, ends[-1])


def _no_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "Newton-Schulz of a list of matrices, captured in a CUDA graph: its tables are not on the device yet; "
            "call it once on matrices of these shapes, beside as many ranks, before capture"
        )


def _arange(n: int) -> Tensor:
    return torch.arange(n, device="cpu")  # torch's default device may be another one


def _copied(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to ``device``, and wait for the copies."""
    if device.type == "cpu":
        return tensors
    # In a thread of its own: while torch warms up a CUDA graph, the calling thread allocates from the graph's pool,
    # where only the graph's results may stay.
    with ThreadPoolExecutor(1) as thread:
        return list(thread.map(lambda x: x.to(device), tensors))
