"""The general product: a k × k matrix times one whose product is not symmetric.

    C = L R + β P      L [b, k, k], R, P, C [b, k, l]

In ``iterations`` these are aX + ZX with β = a, QX, and aQ + ZQ. Sums are in float32, rounded once. C may have any
strides, so that the last product of an iteration writes a tall result in place, through its transpose.
"""

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .model import Tile, ceildiv
from .operands import constants, load_tile, operand, place_of


@triton.jit
def product_kernel(
    left,
    right,
    plus,
    out,
    rows,
    cols,
    left_matrix_stride,
    left_row_stride,
    right_matrix_stride,
    right_row_stride,
    plus_matrix_stride,
    plus_row_stride,
    out_matrix_stride,
    out_row_stride,
    out_col_stride,
    beta: tl.float32,
    PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    matrix, row, col = place_of(rows, cols, ROWS, COLS, GROUP)

    # The summand comes first: added at the end it would hold registers that the sums need, and spill.
    if PLUS:
        sums = beta * load_tile(
            plus, matrix, row, col, rows, cols, plus_matrix_stride, plus_row_stride, ROWS, COLS, DESCRIPTORS
        ).to(tl.float32)
    else:
        sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for i in tl.range(0, tl.cdiv(rows, DEPTH), warp_specialize=SPECIALIZE):
        k = i * DEPTH
        a = load_tile(left, matrix, row, k, rows, rows, left_matrix_stride, left_row_stride, ROWS, DEPTH, DESCRIPTORS)
        b = load_tile(
            right, matrix, k, col, rows, cols, right_matrix_stride, right_row_stride, DEPTH, COLS, DESCRIPTORS
        )
        sums = tl.dot(a, b, sums, input_precision="ieee")

    r = row + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    r = r.to(tl.int64)[:, None]
    c = c.to(tl.int64)[None, :]
    out_ptr = out + matrix.to(tl.int64) * out_matrix_stride
    tl.store(out_ptr + r * out_row_stride + c * out_col_stride, sums.to(out.dtype.element_ty), mask=mask)


def product(
    left_BKK: Tensor, right_BKL: Tensor, out_BKL: Tensor, tile: Tile, *, plus: Tensor | None = None, beta: float = 0.0
) -> Launch:
    """Make the launch of out ← left right + β plus, with ``plus`` like ``right_BKL``. All have unit last stride, but
    ``out_BKL``, which has any strides and shares no memory with the others."""
    matrices, rows, cols = right_BKL.shape
    programs = matrices * ceildiv(rows, tile.rows) * ceildiv(cols, tile.cols)
    factors = operand(left_BKK, tile, tile.rows, tile.depth), operand(right_BKL, tile, tile.depth, tile.cols)
    plus_arg = None if plus is None else operand(plus, tile, tile.rows, tile.cols)
    strides = [s for x in (left_BKK, right_BKL, right_BKL if plus is None else plus) for s in x.stride()[:2]]
    arguments = (*factors, plus_arg, out_BKL, rows, cols, *strides, *out_BKL.stride(), beta)
    return Launch(product_kernel, programs, out_BKL, arguments, constants(tile, plus=plus is not None))
