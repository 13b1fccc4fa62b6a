"""Shared parts of the grouped kernels: rows of their table, operands by pointers or by descriptors, and the launch.

Operands are arenas, whose rows are padded with zeros to a pitch. Pitches and starts come from a table, where Triton
cannot see that they are multiples of 16 and 64: ``tl.multiple_of`` says so. Names end in ``_kk`` for k × k matrices, in
``_kl`` for k × l ones.
"""

from typing import Any

import torch.distributed as dist
import triton
import triton.language as tl

from .arena import Matrices
from .launch import Launch
from .model import Tile
from .operands import WIDEN, constants
from .tile_order import dealt, tables

# Columns that a descriptor stores at a time, WIDE; the next ones wait until these have left shared memory. Stored
# whole, a tile of 256 columns leaves room for three stages; in two pieces for four, as in more, with fewer barriers.
PIECE = 128


@triton.jit
def first_tile(table, shape, waves, width):
    """Return this program's first tile of a shape; every ``width``-th after it is its own: :func:`tile_order.dealt`."""
    # Read from memory each time: a number carried from shape to shape would hold a register.
    first = tl.load(waves + tl.program_id(0) // width, volatile=True) + tl.program_id(0) % width
    tiles_before = tl.load(table + (shape - 1) * 8, mask=shape > 0, other=0, volatile=True).to(tl.int32)
    return first + tl.cdiv(max(tiles_before - first, 0), width) * width


@triton.jit
def last_tile(waves, width):
    """Return the end of this program's wave of tiles. Volatile, so that it holds no register meanwhile."""
    return tl.load(waves + tl.program_id(0) // width + 1, volatile=True)


@triton.jit
def read_shape(table, shape, SQUARE: tl.constexpr):
    """Read a shape's row of the table (``tile_order.Tables``): the end of its tiles, its number of matrices, k, l, then
    start and pitch of its k × k matrices, and of its k × l ones; with SQUARE k × k matrices replace the k × l ones."""
    # Volatile: without descriptors the kernels read the row anew for every tile, and once more for its store. Kept from
    # tile to tile, the row and the addresses computed from it would hold registers that the sums need, and spill.
    row = table + shape * 8
    end = tl.load(row, volatile=True).to(tl.int32)
    matrices = tl.load(row + 1, volatile=True).to(tl.int32)
    k = tl.load(row + 2, volatile=True).to(tl.int32)
    start_kk = tl.multiple_of(tl.load(row + 4, volatile=True), 64)
    pitch_kk = tl.multiple_of(tl.load(row + 5, volatile=True).to(tl.int32), 16)
    if SQUARE:
        return end, matrices, k, k, start_kk, pitch_kk, start_kk, pitch_kk
    else:
        start_kl = tl.multiple_of(tl.load(row + 6, volatile=True), 64)
        pitch_kl = tl.multiple_of(tl.load(row + 7, volatile=True).to(tl.int32), 16)
        return end, matrices, k, tl.load(row + 3, volatile=True).to(tl.int32), start_kk, pitch_kk, start_kl, pitch_kl


@triton.jit
def place_in_list(places, tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Unpack (matrix, first row, first column) of a tile from a word: :func:`tile_order.packed`. Volatile as above."""
    word = tl.load(places + tile, volatile=True)
    return (word >> 32).to(tl.int32), ((word >> 16) & 0xFFFF).to(tl.int32) * ROWS, (word & 0xFFFF).to(tl.int32) * COLS


@triton.jit
def source_of(
    start,
    matrices,
    rows,
    cols,
    pitch,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Return the source of :func:`load_part`: ``start``, or a descriptor of [ROWS, COLS] tiles of all matrices."""
    if DESCRIPTORS:
        return tl.make_tensor_descriptor(
            start,
            shape=[matrices, rows, cols],
            strides=[rows.to(tl.int64) * pitch, pitch.to(tl.int64), 1],
            block_shape=[1, ROWS, COLS],
        )
    else:
        return start


@triton.jit
def load_part(
    source,
    matrix,
    row,
    col,
    rows,
    pitch,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Load the tile [ROWS, COLS] of matrix number ``matrix`` from (row, col) on, zero outside."""
    if DESCRIPTORS:
        part = source.load([matrix, row, col]).reshape(ROWS, COLS)
    else:
        i = tl.arange(0, ROWS)[:, None]
        j = tl.arange(0, COLS)[None, :]
        # 64 bits: an arena may have more elements than an int32 counts.
        start = source + (matrix.to(tl.int64) * rows + row) * pitch + col
        part = tl.load(start + i * pitch + j, mask=(row + i < rows) & (col + j < pitch), other=0.0)
    if WIDEN:
        part = part.to(tl.float32)
    return part


def grouped_launch(
    kernel: Any,
    left: Matrices,
    right: Matrices,
    plus: Matrices | None,
    out: Matrices,
    numbers: tuple[float, ...],
    tile: Tile,
    processors: int,
    *,
    triangle: bool,
    **settings: Any,
) -> Launch:
    """Make the launch of either grouped kernel on arenas of one layout.

    ``kernel`` takes these arenas, the tables, the number of shapes, and ``numbers``. ``triangle`` is that of
    ``tile_order.results_of``, ``processors`` the multiprocessors of the device, ``settings`` constants of this kernel
    alone.
    """
    square = right.square
    table = tables(out.layout, tile, out.flat.device, triangle=triangle, square=square)
    # Collectives with other ranks may hold some of the device's multiprocessors.
    shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    deal = dealt(table.tiles, processors * tile.resident, out.flat.device, shared=shared)
    arenas = (left.flat, right.flat, None if plus is None else plus.flat, out.flat)
    tile_args = (table.shapes, table.places, len(out.layout.shapes), deal.waves, deal.width)
    settings |= {name: value for name, value in constants(tile, plus=plus is not None).items() if name != "GROUP"}
    settings |= {"SQUARE": square, "WIDE": min(PIECE, tile.rows, tile.cols)}
    settings["FLATTEN"] = tile.flattened(summand=plus is not None)
    return Launch(kernel, deal.programs, out.flat, (*arenas, *tile_args, *numbers), settings, scratch=tile.descriptors)
