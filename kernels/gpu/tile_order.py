"""In which order the tiles of a list's results are made, and by which program: tables that the grouped kernels read.

Tiles are dealt out to programs in a fixed order, each wave in turn (``model.waves``), so that a matrix's last tiles run
beside the first ones of the next. The order is written out, (matrix, row, column) of every tile, made
here by plain integer arithmetic: a kernel would have to take a square root to find a row in a triangle, and a list can
have any order. This one goes column by column within groups of tile rows, so that operands stay in the L2 cache.

Tables depend on shapes and tiles alone. They are made once and kept for good: a CUDA graph that was captured reads them
again at every replay.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, cycle

import torch
from torch import Tensor

from .arena import Layout
from .model import Result, Tile, ceildiv, waves

__all__ = ["FIELDS", "Deal", "Tables", "dealt", "packed", "places", "results_of", "tables"]

# int64 entries of a table's row, one row a shape: the list's tiles up to the end of this shape; matrices, k, l; where
# the k × k and the k × l matrices begin in their arenas and their pitch, in elements. grouped_operands.read_shape.
FIELDS = 8


@dataclass(frozen=True)
class Tables:
    """What a grouped launch reads.

    Args:
        shapes: [number of shapes, FIELDS] int64; where tiles on diagonals are halves as many rows again, for them.
        places: [tiles] int64: number of the matrix within its shape, row and column in tiles, or halves of tiles where
            they are: :func:`packed`.
        tiles: how many.
    """

    shapes: Tensor
    places: Tensor
    tiles: int


def places(matrices: int, rows: int, cols: int, tile: Tile, *, triangle: bool) -> Tensor:
    """[tiles, 3] int32, (matrix, tile row, tile column) of every tile of results [matrices, rows, cols], in order.

    Args:
        triangle: only the tiles that hold some of a square result's lower triangle.
    """
    down, across = ceildiv(rows, tile.rows), _arange(ceildiv(cols, tile.cols))
    groups = []
    for first in range(0, down, tile.group):
        rows_of_group = first + _arange(min(tile.group, down - first))
        of_group = torch.cartesian_prod(across, rows_of_group).flip(1)
        groups.append(of_group[of_group[:, 1] * tile.cols < (of_group[:, 0] + 1) * tile.rows] if triangle else of_group)
    one = torch.cat(groups)
    matrix = _arange(matrices).repeat_interleave(len(one))
    return torch.cat([matrix[:, None], one.repeat(matrices, 1)], dim=1).int()


def packed(places: Tensor) -> Tensor:
    """[tiles] int64 of [tiles, 3]: a word for each, so that a kernel reads it at once."""
    matrix, row, col = places.long().unbind(1)
    assert places.numel() == 0 or max(int(row.max()), int(col.max())) < 2**16
    return (matrix << 32) | (row << 16) | col


def results_of(layout: Layout, *, triangle: bool, square: bool) -> tuple[Result, ...]:
    """(matrices, rows, columns, summed dimension) of the product whose results these are, by shape.

    Args:
        triangle: of the symmetric product, whose operands are k × k (``square``) or k × l; else of the general one,
            which has them k × k and k × k (``square``) or k × l.
    """
    shapes = zip(layout.shapes, layout.widths(square=square), strict=True)
    return tuple((b, k, k, cols) if triangle else (b, k, cols, k) for (b, k, _), cols in shapes)


@dataclass(frozen=True)
class Deal:
    """Which tiles belong to which program: ``model.waves``.

    Args:
        waves: [waves + 1] int32, the tile that each wave begins with, and how many tiles there are.
        width: programs of a wave, but for the last, which may have fewer.
        programs: of all waves.
    """

    waves: Tensor
    width: int
    programs: int


@cache  # never evicted: see the module's docstring
def dealt(tiles: int, width: int, device: torch.device, *, shared: bool) -> Deal:
    """Tiles, at least one, among ``width`` programs at a time.

    Args:
        shared: as for ``model.waves``.
    Raises:
        RuntimeError: as :func:`tables`.
    """
    starts = waves(tiles, width, shared=shared)
    _no_capture(device)
    (copied,) = _copied([torch.tensor(starts, dtype=torch.int32, device="cpu")], device)
    last = starts[-1] - starts[-2]
    return Deal(copied, width, (len(starts) - 2) * width + min(width, last))


@cache  # never evicted: see the module's docstring
def tables(layout: Layout, tile: Tile, device: torch.device, *, triangle: bool, square: bool) -> Tables:
    """The tables of one product of a list, on ``device``; the first call for a list copies them there.

    Args:
        triangle, square: as for :func:`results_of`.
    Raises:
        RuntimeError: the first call is under CUDA graph capture, which cannot copy from the host.
    """
    _no_capture(device)
    listed = [
        places(b, rows, cols, tile, triangle=triangle)
        for b, rows, cols, _ in results_of(layout, triangle=triangle, square=square)
    ]
    if tile.halves(triangle=triangle):
        on = [x[:, 2] * tile.cols == x[:, 1] * tile.rows for x in listed]
        halves = [x[half] * torch.tensor([1, 1, 2]).int() for x, half in zip(listed, on, strict=True)]
        listed = [x[~half] for x, half in zip(listed, on, strict=True)] + halves
    ends = list(accumulate(len(x) for x in listed))
    columns = [c for which in (True, False) for c in (layout.starts(square=which), layout.pitches(square=which))]
    places_of = [[*shape, *(column[i] for column in columns)] for i, shape in enumerate(layout.shapes)]
    rows = [[end, *place] for end, place in zip(ends, cycle(places_of), strict=False)]
    shapes, order = _copied([torch.tensor(rows, dtype=torch.int64, device="cpu"), packed(torch.cat(listed))], device)
    return Tables(shapes, order, ends[-1])


def _no_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "Newton-Schulz of a list of matrices, captured in a CUDA graph: its tables are not on the device yet; "
            "call it once on matrices of these shapes, beside as many ranks, before capture"
        )


def _arange(n: int) -> Tensor:
    return torch.arange(n, device="cpu")  # whatever torch's default device is


def _copied(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """On ``device``, and complete.

    From a thread of its own: while torch warms up a CUDA graph, what the calling thread allocates comes from the
    graph's pool, where nothing may stay that is not one of the graph's results.
    """
    if device.type == "cpu":
        return tensors
    with ThreadPoolExecutor(1) as thread:
        return list(thread.map(lambda x: x.to(device), tensors))
