"""Shared parts of the matrix-product kernels: operands by pointers or tensor descriptors (TMA), and the tile order."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .model import Tile, ceildiv

# For Triton's interpreter, whose bfloat16 products are wrong (numpy has no bfloat16): there tiles become float32 once
# loaded. No product changes: two bfloat16 or float16 numbers multiply exactly in float32.
WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def load_tile(
    source,
    matrix,
    row,
    col,
    rows,
    cols,
    matrix_stride,
    row_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Load the tile [ROWS, COLS] of matrix number ``matrix`` from (row, col) on, zero outside [rows, cols]."""
    if DESCRIPTORS:
        tile = source.load([matrix, row, col]).reshape(ROWS, COLS)
    else:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        # 64 bits: 320 matrices of 2560 × 3072 have more elements than an int32 counts.
        matrix_ptr = source + matrix.to(tl.int64) * matrix_stride
        mask = (r < rows)[:, None] & (c < cols)[None, :]
        tile = tl.load(matrix_ptr + r.to(tl.int64)[:, None] * row_stride + c[None, :], mask=mask, other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def shifted(value, row, col, gamma, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return ``value``, a matrix's tile [ROWS, COLS] from (row, col) on, with ``gamma`` added on the diagonal."""
    i = row + tl.arange(0, ROWS)[:, None]
    j = col + tl.arange(0, COLS)[None, :]
    return tl.where(i == j, value + gamma, value)


@triton.jit
def store_pieces(out, value, matrix, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr):
    """Store a tile [ROWS, COLS] by a descriptor of [1, ROWS, WIDE], piece after piece through one shared memory."""
    if COLS <= WIDE:
        out.store([matrix, row, col], value.reshape(1, ROWS, COLS))
    else:
        left, right = tl.split(value.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1))
        store_pieces(out, left, matrix, row, col, ROWS, COLS // 2, WIDE)
        store_pieces(out, right, matrix, row, col + COLS // 2, ROWS, COLS // 2, WIDE)


@triton.jit
def store_square(
    out,
    value,
    matrix,
    row,
    col,
    size,
    width,
    matrix_stride,
    row_stride,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Store a square tile below the diagonal and its mirror image, or a tile on the diagonal; skip one above it.
    ``width``: entries of a row to write, ``size``, or ``row_stride`` to write the padding too."""
    if DESCRIPTORS:
        # To skip a store, begin it at row ``size``: a descriptor drops rows past the last. A store that begins before
        # the first row is an illegal instruction, and a branch keeps Triton 3.7.1 from flattening the loop around it.
        store_pieces(out, value, matrix, tl.where(col <= row, row, size), col, SIDE, SIDE, WIDE)
        store_pieces(out, value.T, matrix, tl.where(col < row, col, size), row, SIDE, SIDE, WIDE)
    else:
        i = tl.arange(0, SIDE)[:, None]
        j = tl.arange(0, SIDE)[None, :]
        # Offsets within a square fit 32 bits, which take half the registers. Masks end a row but do not
        # cut it along the diagonal: a mask of single entries would make every store two bytes wide.
        matrix_ptr = out + matrix.to(tl.int64) * matrix_stride
        if col < row:
            mirrored_ptr = matrix_ptr + col.to(tl.int64) * row_stride + row
            tl.store(mirrored_ptr + j * row_stride + i, value, mask=(col + j < size) & (row + i < width))
        if col <= row:
            straight_ptr = matrix_ptr + row.to(tl.int64) * row_stride + col
            tl.store(straight_ptr + i * row_stride + j, value, mask=(row + i < size) & (col + j < width))


@triton.jit
def store_triangle(
    out,
    value,
    matrix,
    row,
    col,
    size,
    width,
    matrix_stride,
    row_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Store a tile, one square or two side by side, by :func:`store_square`."""
    if COLS == ROWS:
        store_square(out, value, matrix, row, col, size, width, matrix_stride, row_stride, ROWS, WIDE, DESCRIPTORS)
    else:
        tl.static_assert(COLS == 2 * ROWS, "tiles of a symmetric result are squares, or two side by side")
        left, right = tl.split(value.reshape(ROWS, 2, ROWS).permute(0, 2, 1))
        store_square(out, left, matrix, row, col, size, width, matrix_stride, row_stride, ROWS, WIDE, DESCRIPTORS)
        store_square(
            out, right, matrix, row, col + ROWS, size, width, matrix_stride, row_stride, ROWS, WIDE, DESCRIPTORS
        )


@triton.jit
def place_of(rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """Locate this program's tile, (matrix, first row, first column): column by column in groups of GROUP tile rows."""
    down = tl.cdiv(rows, ROWS)
    across = tl.cdiv(cols, COLS)
    matrix = tl.program_id(0) // (down * across)
    program = tl.program_id(0) % (down * across)
    in_group = GROUP * across
    first = (program // in_group) * GROUP
    height = min(down - first, GROUP)
    row = first + (program % in_group) % height
    col = (program % in_group) // height
    return matrix, row * ROWS, col * COLS


def constants(tile: Tile, *, plus: bool) -> dict[str, Any]:
    """Return the compile-time arguments of the kernels for one shape; grouped kernels have no GROUP."""
    return {
        "PLUS": plus,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEPTH": tile.depth,
        "GROUP": tile.group,
        "DESCRIPTORS": tile.descriptors,
        "SPECIALIZE": tile.specialize,
        "num_stages": tile.stages,
        "num_warps": tile.warps,
    }


def empty_matrices(matrices: int, rows: int, cols: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate uninitialized [matrices, rows, cols], rows a multiple of 16 elements apart."""
    # Tensor descriptors need multiples of 16 bytes, and Triton compiles wide loads for multiples of 16 elements.
    pitch = ceildiv(cols, 16) * 16
    return torch.empty(matrices, rows, pitch, dtype=dtype, device=like.device)[:, :, :cols]


def operand(x_BRC: Tensor, tile: Tile, rows: int, cols: int) -> Any:
    """Make a kernel's argument: the tensor, of unit last stride, or a descriptor of its [rows, cols] tiles."""
    if not tile.descriptors:
        return x_BRC
    return TensorDescriptor(x_BRC, list(x_BRC.shape), list(x_BRC.stride()), [1, rows, cols])
