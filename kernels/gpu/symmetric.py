"""Symmetric products: one triangle is computed, the other is its mirror image.

    C = α L Rᵀ + β P      L, R [b, k, d], P, C [b, k, k]

where L Rᵀ is symmetric up to rounding: X Xᵀ and A A (L = R), and in the gram form R Z and Z S. Accumulated in float32,
rounded once. C is bitwise symmetric whatever the inputs: the lower triangle is what is computed, of P too.
"""

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .operands import constants, load_tile, operand, place_of
from .tiles import Tile, ceildiv, choose

__all__ = ["symmetric_kernel", "symmetric_product"]


@triton.jit
def _store(start, value, row, col, size, row_stride, SIDE: tl.constexpr):
    """A square of the result, and its mirror image; nothing above the diagonal.

    No mask here differs from entry to entry: that would make every store two bytes wide.
    """
    if col <= row:
        i = tl.arange(0, SIDE)[:, None]
        j = tl.arange(0, SIDE)[None, :]
        inside = (row + i < size) & (col + j < size)
        if col == row:
            value = tl.where(i >= j, value, value.T)
        # Within a square 32 bits are enough, and half the registers.
        straight = start + row.to(tl.int64) * row_stride + col
        mirrored = start + col.to(tl.int64) * row_stride + row
        tl.store(straight + i * row_stride + j, value, mask=inside)
        tl.store(mirrored + j * row_stride + i, value, mask=inside)


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
    PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    matrix, row, col = place_of(size, size, ROWS, COLS, GROUP)
    if col >= row + ROWS:  # nothing of the lower triangle
        return

    # The summand comes first: added at the end it would hold registers that the sums need, and spill.
    if PLUS:
        sums = initial * load_tile(
            plus, matrix, row, col, size, size, plus_matrix_stride, plus_row_stride, ROWS, COLS, DESCRIPTORS, WIDEN
        ).to(tl.float32)
    else:
        sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for i in tl.range(0, tl.cdiv(depth, DEPTH), warp_specialize=SPECIALIZE):
        k = i * DEPTH
        a = load_tile(
            left, matrix, row, k, size, depth, left_matrix_stride, left_row_stride, ROWS, DEPTH, DESCRIPTORS, WIDEN
        )
        b = load_tile(
            right, matrix, col, k, size, depth, right_matrix_stride, right_row_stride, COLS, DEPTH, DESCRIPTORS, WIDEN
        )
        sums = tl.dot(a, b.T, sums, input_precision="ieee")

    value = (alpha * sums).to(out.dtype.element_ty)
    start = out + matrix.to(tl.int64) * out_matrix_stride
    if COLS == ROWS:
        _store(start, value, row, col, size, out_row_stride, ROWS)
    else:
        tl.static_assert(COLS == 2 * ROWS, "tiles of a symmetric result are squares, or two side by side")
        first, second = tl.split(value.reshape(ROWS, 2, ROWS).permute(0, 2, 1))
        _store(start, first, row, col, size, out_row_stride, ROWS)
        _store(start, second, row, col + ROWS, size, out_row_stride, ROWS)


def symmetric_product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    tiles: tuple[Tile, ...],
    processors: int,
    *,
    alpha: float = 1.0,
    plus: Tensor | None = None,
    beta: float = 0.0,
) -> Launch:
    """out ← α left rightᵀ + β plus.

    Args:
        left, right: [b, k, d] with unit last strides.
        out: [b, k, k] with unit last stride; shares no memory with the others.
        tiles: to choose from.
        processors: of the device.
        alpha: not 0.
        plus: [b, k, k] with unit last stride, or None.
        beta: multiplies ``plus``.
    """
    matrices, size, depth = left.shape
    tile = choose(tiles, size, size, matrices, processors, triangle=True)
    summand = left if plus is None else plus
    return Launch(
        symmetric_kernel,
        matrices * ceildiv(size, tile.rows) * ceildiv(size, tile.cols),
        out,
        (
            operand(left, tile, tile.rows, tile.depth),
            operand(right, tile, tile.cols, tile.depth),
            None if plus is None else operand(plus, tile, tile.rows, tile.cols),
            out,
            size,
            depth,
            *left.stride()[:2],
            *right.stride()[:2],
            *summand.stride()[:2],
            *out.stride()[:2],
            alpha,
            beta / alpha,
        ),
        constants(tile, plus=plus is not None),
    )
