"""Symmetric products: one triangle is computed, the other is its mirror image.

    C = α X Xᵀ            X [b, k, d], C [b, k, k]
    C = α L R + β P + γ I   L, R, P, C [b, k, k]

where L R is symmetric up to rounding: A A, and in the gram form R Z and Z S. Sums in float32, rounded once. Square
tiles below the diagonal are computed, from the same tiles of P, and written twice. A square on the diagonal is written
as computed, symmetric up to rounding: mirroring it in registers would double the instructions behind the loop. So R Z
and Z S have to be computed as they stand. With Z Sᵀ for Z S the diagonal squares would follow Z² R instead of Z R Z,
the order that iterations.py warns of: twice the error where the squares are half of the matrix.
"""

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .model import Tile, ceildiv
from .operands import constants, load_tile, operand, place_of, shifted, store_triangle


@triton.jit
def symmetric_kernel(
    left,
    right,
    plus,
    out,
    size,
    depth,
    left_matrix_stride,
    left_row_stride,
    right_matrix_stride,
    right_row_stride,
    plus_matrix_stride,
    plus_row_stride,
    out_matrix_stride,
    out_row_stride,
    alpha: tl.float32,
    initial: tl.float32,
    gamma: tl.float32,
    PLUS: tl.constexpr,
    SHIFT: tl.constexpr,
    OUTER: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    matrix, row, col = place_of(size, size, ROWS, COLS, GROUP)
    if col >= row + ROWS:  # nothing of the lower triangle
        return

    # The summand comes first, as in ``product``; initial = β / α.
    if PLUS:
        sums = initial * load_tile(
            plus, matrix, row, col, size, size, plus_matrix_stride, plus_row_stride, ROWS, COLS, DESCRIPTORS
        ).to(tl.float32)
    else:
        sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for i in tl.range(0, tl.cdiv(depth, DEPTH), warp_specialize=SPECIALIZE):
        k = i * DEPTH
        a = load_tile(left, matrix, row, k, size, depth, left_matrix_stride, left_row_stride, ROWS, DEPTH, DESCRIPTORS)
        if OUTER:
            right_rows = load_tile(
                right, matrix, col, k, size, depth, right_matrix_stride, right_row_stride, COLS, DEPTH, DESCRIPTORS
            )
            b = right_rows.T
        else:
            b = load_tile(
                right, matrix, k, col, depth, size, right_matrix_stride, right_row_stride, DEPTH, COLS, DESCRIPTORS
            )
        sums = tl.dot(a, b, sums, input_precision="ieee")

    sums = alpha * sums
    if SHIFT:
        sums = shifted(sums, row, col, gamma, ROWS, COLS)
    value = sums.to(out.dtype if DESCRIPTORS else out.dtype.element_ty)
    store_triangle(
        out, value, matrix, row, col, size, size, out_matrix_stride, out_row_stride, ROWS, COLS, ROWS, DESCRIPTORS
    )


def symmetric_product(
    left: Tensor,
    right: Tensor | None,
    out: Tensor,
    tile: Tile,
    *,
    alpha: float = 1.0,
    plus: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> Launch:
    """Make the launch of out ← α left right + β plus + γ I, or with left leftᵀ where ``right`` is None; α is not 0.

    ``left`` is [b, k, d], with d = k if there is a ``right``; the others are [b, k, k]. All have unit last stride;
    ``out`` shares no memory with the others. γ is added before the result is rounded.
    """
    matrices, size, depth = left.shape
    programs = matrices * ceildiv(size, tile.rows) * ceildiv(size, tile.cols)
    if right is None:
        right_x, right_arg = left, operand(left, tile, tile.cols, tile.depth)
    else:
        right_x, right_arg = right, operand(right, tile, tile.depth, tile.cols)
    plus_arg = None if plus is None else operand(plus, tile, tile.rows, tile.cols)
    operands = operand(left, tile, tile.rows, tile.depth), right_arg, plus_arg, operand(out, tile, tile.rows, tile.rows)
    strides = [stride for x in (left, right_x, left if plus is None else plus, out) for stride in x.stride()[:2]]
    arguments = (*operands, size, depth, *strides, alpha, beta / alpha, gamma)
    settings = constants(tile, plus=plus is not None) | {"OUTER": right is None, "SHIFT": gamma != 0}
    return Launch(symmetric_kernel, programs, out, arguments, settings)
