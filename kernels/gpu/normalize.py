"""Frobenius normalization, fused: two passes over memory, all arithmetic in float32, one rounding at the very end.

    X ← X / (safety · max(‖X‖, eps))      X [b, k, l], ‖·‖ of each matrix

No entry's square overflows or vanishes: entries are divided by the largest so far before they are squared, as in
``reference.normalize``, so those from 1e-30 to 1e+30 are right in every output dtype. The first pass stores a pair for
each program, (largest |entry|, Σ (entry / largest)²); the second combines the pairs in a fixed order. Without atomics
the same input gives the same bits. Shapes in names: B matrices of R rows and C columns, P programs a matrix.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .model import ceildiv
from .operands import empty_matrices

# A tile: wide where most inputs are contiguous, tall enough for inputs with contiguous columns.
ROWS, COLS = tl.constexpr(32), tl.constexpr(128)
MOST_PARTIALS = 256  # a matrix, so that every program of the second pass can combine all of them
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _load(x, matrix, tile, across, rows, cols, matrix_stride, row_stride, col_stride):
    """Return the rows, columns, mask and fp32 entries of tile number ``tile``, row by row with ``across`` in each."""
    r = (tile // across) * ROWS + tl.arange(0, ROWS)
    c = (tile % across) * COLS + tl.arange(0, COLS)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    r = r.to(tl.int64)[:, None]
    c = c.to(tl.int64)[None, :]
    matrix_ptr = x + matrix.to(tl.int64) * matrix_stride
    return r, c, mask, tl.load(matrix_ptr + r * row_stride + c * col_stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def partial_norms_kernel(x, partials, rows, cols, matrix_stride, row_stride, col_stride, programs):
    """Write the pair of this program's tiles to ``partials``, [b, 2, programs], ``programs`` of them a matrix."""
    program = tl.program_id(0)
    matrix = program // programs
    first_tile = program % programs
    across = tl.cdiv(cols, COLS)
    largest = TINY
    squares = 0.0
    for tile in tl.range(first_tile, tl.cdiv(rows, ROWS) * across, programs):
        _, _, _, x_tile = _load(x, matrix, tile, across, rows, cols, matrix_stride, row_stride, col_stride)
        new_largest = tl.maximum(largest, tl.max(tl.max(tl.abs(x_tile), axis=1), axis=0))
        x_tile *= 1.0 / new_largest
        shrink = largest / new_largest
        squares = squares * shrink * shrink + tl.sum(tl.sum(x_tile * x_tile, axis=1), axis=0)
        largest = new_largest
    pair_ptr = partials + matrix.to(tl.int64) * 2 * programs + first_tile
    tl.store(pair_ptr, largest)
    tl.store(pair_ptr + programs, squares)


@triton.jit
def divide_kernel(
    x,
    partials,
    out,
    rows,
    cols,
    matrix_stride,
    row_stride,
    col_stride,
    out_matrix_stride,
    out_row_stride,
    programs,
    eps: tl.float32,
    safety: tl.float32,
    PARTIALS: tl.constexpr,
):
    """Combine all pairs of a matrix into its norm, and write one tile divided by it."""
    across = tl.cdiv(cols, COLS)
    tiles = tl.cdiv(rows, ROWS) * across
    program = tl.program_id(0)
    matrix = program // tiles
    i = tl.arange(0, PARTIALS)
    start = partials + matrix.to(tl.int64) * 2 * programs + i
    largest_of_programs = tl.load(start, mask=i < programs, other=TINY)
    sums = tl.load(start + programs, mask=i < programs, other=0.0)
    largest = tl.max(largest_of_programs, axis=0)
    shrink = largest_of_programs / largest
    # The sum is NaN if any entry is NaN or infinite. The maximum must propagate it, or the matrix would seem finite.
    least = tl.maximum(eps / largest, TINY)
    norm = tl.maximum(tl.sqrt(tl.sum(sums * shrink * shrink, axis=0)), least, propagate_nan=tl.PropagateNan.ALL)
    tile = program % tiles
    r, c, mask, x_tile = _load(x, matrix, tile, across, rows, cols, matrix_stride, row_stride, col_stride)
    # ``norm`` is of the matrix divided by ``largest``. Two divisions: the product of the divisors may overflow.
    x_tile = (x_tile / largest) / (norm * safety)
    start = out + matrix.to(tl.int64) * out_matrix_stride
    tl.store(start + r * out_row_stride + c, x_tile.to(out.dtype.element_ty), mask=mask)


def partial_norms(x_BRC: Tensor, partials_B2P: Tensor) -> Launch:
    """Make the first pass over ``x_BRC``, of any strides; ``partials_B2P`` is contiguous, in float32."""
    matrices, rows, cols = x_BRC.shape
    programs = partials_B2P.shape[-1]
    arguments = (x_BRC, partials_B2P, rows, cols, *x_BRC.stride(), programs)
    return Launch(partial_norms_kernel, matrices * programs, x_BRC, arguments)


def divide(x_BRC: Tensor, partials_B2P: Tensor, out_BRC: Tensor, *, eps: float, safety: float) -> Launch:
    """Make the second pass, out ← x / (safety · max(‖x‖, eps)) of each matrix; ``out_BRC`` has unit last stride."""
    matrices, rows, cols = x_BRC.shape
    programs = partials_B2P.shape[-1]
    strides = *x_BRC.stride(), *out_BRC.stride()[:2]
    arguments = (x_BRC, partials_B2P, out_BRC, rows, cols, *strides, programs, eps, safety)
    constants = {"PARTIALS": triton.next_power_of_2(programs)}
    return Launch(divide_kernel, matrices * _tiles(rows, cols), x_BRC, arguments, constants)


def normalize(
    x: Tensor, *, dtype: torch.dtype, eps: float, safety: float, out: Tensor | None = None, norms: Tensor | None = None
) -> Tensor:
    """Return X / (safety · max(‖X‖, eps)) as ``reference.normalize`` does, NaN and zeros included.

    ``x``: [B, R, C] in float16, bfloat16 or float32, any strides, unmodified. ``out``: takes the result; like x in
    ``dtype`` with unit last stride, no memory shared with x; None for a new tensor. ``norms``: [B, 1, N] in float32,
    the norms of N parts (rows, say) of each matrix, which save the first pass from reading x.
    """
    matrices, rows, cols = x.shape
    programs = min(_tiles(rows, cols), MOST_PARTIALS)
    partials_B2P = torch.empty(matrices, 2, programs, dtype=torch.float32, device=x.device)
    out_BRC = empty_matrices(matrices, rows, cols, like=x, dtype=dtype) if out is None else out
    # A matrix and the vector of its parts' norms have the same Frobenius norm.
    partial_norms(x if norms is None else norms, partials_B2P).run()
    divide(x, partials_B2P, out_BRC, eps=eps, safety=safety).run()
    return out_BRC


def _tiles(rows: int, cols: int) -> int:
    return ceildiv(rows, ROWS.value) * ceildiv(cols, COLS.value)
