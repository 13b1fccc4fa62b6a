"""The general product of every matrix of a list, in one launch.

    C = L R + β P      for each shape (k, l): L [b, k, k], R, P, C [b, k, d] with d = l or k

as in ``product``: accumulated in float32, rounded once. Programs are persistent: each goes through every width-th tile
of all results in the order of ``tile_order.places``.
"""

import triton
import triton.language as tl

from .arena import Matrices
from .grouped_operands import first_tile, grouped_launch, last_tile, load_part, place_in_list, read_shape, source_of
from .launch import Launch
from .model import Tile
from .operands import store_pieces

__all__ = ["grouped_product", "grouped_product_kernel"]


@triton.jit
def grouped_product_kernel(
    left,
    right,
    plus,
    out,
    table,
    places,
    shapes,
    waves,
    width,
    beta: tl.float32,
    SQUARE: tl.constexpr,
    PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
    FLATTEN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    for shape in range(shapes):
        end, matrices, rows, cols, square, square_pitch, wide, pitch = read_shape(table, shape, SQUARE)
        first = first_tile(table, shape, waves, width)
        end = min(end, last_tile(waves, width))
        if first < end:
            lefts = source_of(left + square, matrices, rows, rows, square_pitch, ROWS, DEPTH, DESCRIPTORS)
            rights = source_of(right + wide, matrices, rows, cols, pitch, DEPTH, COLS, DESCRIPTORS)
            if PLUS:
                pluses = source_of(plus + wide, matrices, rows, cols, pitch, ROWS, COLS, DESCRIPTORS)
            # As wide as the pitch: the padding is written, with zeros.
            target = source_of(out + wide, matrices, rows, pitch, pitch, ROWS, WIDE, DESCRIPTORS)
            for tile in tl.range(first, end, width, flatten=FLATTEN):
                if not DESCRIPTORS:
                    _, _, rows, _, _, square_pitch, _, pitch = read_shape(table, shape, SQUARE)
                matrix, row, col = place_in_list(places, tile, ROWS, COLS)
                # The summand comes first: added at the end it would hold registers that the sums need, and spill.
                if PLUS:
                    sums = beta * load_part(pluses, matrix, row, col, rows, pitch, ROWS, COLS, DESCRIPTORS, WIDEN).to(
                        tl.float32
                    )
                else:
                    sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
                for i in tl.range(0, tl.cdiv(rows, DEPTH), warp_specialize=SPECIALIZE):
                    k = i * DEPTH
                    a = load_part(lefts, matrix, row, k, rows, square_pitch, ROWS, DEPTH, DESCRIPTORS, WIDEN)
                    b = load_part(rights, matrix, k, col, rows, pitch, DEPTH, COLS, DESCRIPTORS, WIDEN)
                    sums = tl.dot(a, b, sums, input_precision="ieee")

                value = sums.to(out.dtype.element_ty)
                if DESCRIPTORS:
                    store_pieces(target, value, matrix, row, col, ROWS, COLS, WIDE)
                else:
                    _, _, rows, _, _, _, wide, pitch = read_shape(table, shape, SQUARE)
                    matrix, row, col = place_in_list(places, tile, ROWS, COLS)
                    start = out + wide + (matrix.to(tl.int64) * rows + row) * pitch + col
                    i = tl.arange(0, ROWS)[:, None]
                    j = tl.arange(0, COLS)[None, :]
                    inside = (row + i < rows) & (col + j < pitch)
                    tl.store(start + i * pitch + j, value, mask=inside)


def grouped_product(
    left: Matrices,
    right: Matrices,
    out: Matrices,
    tile: Tile,
    processors: int,
    *,
    plus: Matrices | None = None,
    beta: float = 0.0,
) -> Launch:
    """out ← left right + β plus of every matrix.

    Args:
        left: an arena of a layout's k × k matrices.
        right: an arena of its k × l or its k × k matrices.
        out: an arena like ``right``; shares no memory with the others.
        tile: of all results.
        processors: of the device.
        plus: an arena like ``right``, or None.
        beta: multiplies ``plus``.
    """
    return grouped_launch(
        grouped_product_kernel, left, right, plus, out, (beta,), right.square, tile, processors, triangle=False
    )
