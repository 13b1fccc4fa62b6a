"""Symmetric products: one triangle is computed, the other is its mirror image.

    C = α X Xᵀ              X [b, k, d], C [b, k, k]
    C = α L R + β P + γ I   L, R, P, C [b, k, k]

where L R is symmetric up to rounding: in ``iterations`` R R, R Z and Z S. Sums are in float32, rounded once. Square
tiles below the diagonal are computed, with the summand's tile at the same place, and stored there and mirrored. A
square on the diagonal is stored as computed, symmetric up to rounding: mirroring it in registers would double the
instructions behind the loop. So the order of factors matters there (see ``iterations``): Z Sᵀ in place of Z S, with
S = R Z, would make these squares Z² R in place of Z R Z. In small matrices, half of which they are, errors would
double.
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
    left_BKD: Tensor,
    right_BKK: Tensor | None,
    out_BKK: Tensor,
    tile: Tile,
    *,
    alpha: float = 1.0,
    plus: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> Launch:
    """Make the launch of out ← α left right + β plus + γ I, or with left leftᵀ where ``right_BKK`` is None; α is not 0.

    D = K if there is a ``right_BKK``; ``plus`` is like ``out_BKK``, which shares no memory with the others. All have
    unit last stride. γ is added before the result is rounded.
    """
    matrices, size, depth = left_BKD.shape
    programs = matrices * ceildiv(size, tile.rows) * ceildiv(size, tile.cols)
    outer = right_BKK is None
    right = left_BKD if right_BKK is None else right_BKK
    operands = (
        operand(left_BKD, tile, tile.rows, tile.depth),
        operand(right, tile, *((tile.cols, tile.depth) if outer else (tile.depth, tile.cols))),
        None if plus is None else operand(plus, tile, tile.rows, tile.cols),
        operand(out_BKK, tile, tile.rows, tile.rows),  # a store writes squares
    )
    strides = [s for x in (left_BKD, right, left_BKD if plus is None else plus, out_BKK) for s in x.stride()[:2]]
    arguments = (*operands, size, depth, *strides, alpha, beta / alpha, gamma)
    settings = constants(tile, plus=plus is not None) | {"OUTER": outer, "SHIFT": gamma != 0}
    return Launch(symmetric_kernel, programs, out_BKK, arguments, settings)
