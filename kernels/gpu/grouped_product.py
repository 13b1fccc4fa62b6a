"""The general product of every matrix of a list, in one launch.

    C = L R + β P      for each shape (k, l): L [b, k, k], R, P, C [b, k, l], or all k × k (SQUARE)

as in ``product``: sums in float32, rounded once. Programs are persistent: each computes every width-th tile of a wave
(``model.waves``), in the order of ``tile_order.places``.
"""

import triton
import triton.language as tl

from .arena import Matrices
from .grouped_operands import first_tile, grouped_launch, last_tile, load_part, place_in_list, read_shape, source_of
from .launch import Launch
from .model import Tile
from .operands import store_pieces


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
):
    for shape in range(shapes):
        end, matrices, rows, cols, start_kk, pitch_kk, start_kl, pitch_kl = read_shape(table, shape, SQUARE)
        first = first_tile(table, shape, waves, width)
        end = min(end, last_tile(waves, width))
        if first < end:
            left_src = source_of(left + start_kk, matrices, rows, rows, pitch_kk, ROWS, DEPTH, DESCRIPTORS)
            right_src = source_of(right + start_kl, matrices, rows, cols, pitch_kl, DEPTH, COLS, DESCRIPTORS)
            if PLUS:
                plus_src = source_of(plus + start_kl, matrices, rows, cols, pitch_kl, ROWS, COLS, DESCRIPTORS)
            # As wide as the pitch: the padding is written, with zeros.
            out_dst = source_of(out + start_kl, matrices, rows, pitch_kl, pitch_kl, ROWS, WIDE, DESCRIPTORS)
            for tile in tl.range(first, end, width, flatten=FLATTEN):
                if not DESCRIPTORS:
                    _, _, rows, _, _, pitch_kk, _, pitch_kl = read_shape(table, shape, SQUARE)
                matrix, row, col = place_in_list(places, tile, ROWS, COLS)
                # The summand comes first, as in ``product``.
                if PLUS:
                    sums = beta * load_part(plus_src, matrix, row, col, rows, pitch_kl, ROWS, COLS, DESCRIPTORS).to(
                        tl.float32
                    )
                else:
                    sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
                for i in tl.range(0, tl.cdiv(rows, DEPTH), warp_specialize=SPECIALIZE):
                    k = i * DEPTH
                    a = load_part(left_src, matrix, row, k, rows, pitch_kk, ROWS, DEPTH, DESCRIPTORS)
                    b = load_part(right_src, matrix, k, col, rows, pitch_kl, DEPTH, COLS, DESCRIPTORS)
                    sums = tl.dot(a, b, sums, input_precision="ieee")

                value = sums.to(out.dtype.element_ty)
                if DESCRIPTORS:
                    store_pieces(out_dst, value, matrix, row, col, ROWS, COLS, WIDE)
                else:
                    _, _, rows, _, _, _, start_kl, pitch_kl = read_shape(table, shape, SQUARE)
                    matrix, row, col = place_in_list(places, tile, ROWS, COLS)
                    out_ptr = out + start_kl + (matrix.to(tl.int64) * rows + row) * pitch_kl + col
                    i = tl.arange(0, ROWS)[:, None]
                    j = tl.arange(0, COLS)[None, :]
                    mask = (row + i < rows) & (col + j < pitch_kl)
                    tl.store(out_ptr + i * pitch_kl + j, value, mask=mask)


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
    """Make the launch of out ← left right + β plus for every matrix.

    ``left``: an arena of a layout's k × k matrices. ``right``: of its k × l or its k × k ones. ``plus`` and ``out``:
    arenas like ``right``; ``out`` shares no memory with the others. ``processors``: multiprocessors of the device.
    """
    return grouped_launch(grouped_product_kernel, left, right, plus, out, (beta,), tile, processors, triangle=False)
