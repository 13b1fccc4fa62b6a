"""The symmetric product of every matrix of a list, in one launch.

    C = α X Xᵀ              for each shape (k, l): X [b, k, l], C [b, k, k]
    C = α L R + β P + γ I   L, R, P, C [b, k, k] (SQUARE)

as in ``symmetric``, which explains the order L R. Programs are persistent: each computes every width-th tile of a wave
(``model.waves``), in the order of ``tile_order.places``, which has no tile above a diagonal. A tile of two squares, of
which the right one is above the diagonal, is cut to the left one; such tiles come last, 8 of 72 in a triangle of 2048.

On 9.0 and 10.0 results are stored through descriptors too: beside the state of a persistent program, the addresses of
two stores, straight and mirrored, spilled 40 to 240 bytes a thread.
"""

import triton
import triton.language as tl

from .arena import Matrices
from .grouped_operands import first_tile, grouped_launch, last_tile, load_part, place_in_list, read_shape, source_of
from .launch import Launch
from .model import Tile
from .operands import shifted, store_triangle


@triton.jit
def _tiles_of_shapes(
    left,
    right,
    plus,
    out,
    table,
    places,
    begin,
    stop,
    waves,
    width,
    alpha,
    initial,
    gamma,
    SQUARE: tl.constexpr,
    PLUS: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
    FLATTEN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    """Compute this program's tiles, [ROWS, COLS], of the shapes in rows ``begin`` to ``stop`` of the table."""
    for shape in range(begin, stop):
        end, matrices, size, depth, start_kk, pitch_kk, start_kl, pitch_kl = read_shape(table, shape, SQUARE)
        first = first_tile(table, shape, waves, width)
        end = min(end, last_tile(waves, width))
        if first < end:
            left_src = source_of(left + start_kl, matrices, size, depth, pitch_kl, ROWS, DEPTH, DESCRIPTORS)
            if SQUARE:
                right_src = source_of(right + start_kl, matrices, depth, size, pitch_kl, DEPTH, COLS, DESCRIPTORS)
            else:
                right_src = source_of(right + start_kl, matrices, size, depth, pitch_kl, COLS, DEPTH, DESCRIPTORS)
            if PLUS:
                plus_src = source_of(plus + start_kk, matrices, size, size, pitch_kk, ROWS, COLS, DESCRIPTORS)
            # As wide as its pitch: the padding is written, with zeros.
            out_dst = source_of(out + start_kk, matrices, size, pitch_kk, pitch_kk, ROWS, WIDE, DESCRIPTORS)
            for tile in tl.range(first, end, width, flatten=FLATTEN):
                if not DESCRIPTORS:
                    _, _, size, depth, _, pitch_kk, _, pitch_kl = read_shape(table, shape, SQUARE)
                matrix, row, col = place_in_list(places, tile, ROWS, COLS)
                # The summand comes first, as in ``product``; initial = β / α.
                if PLUS:
                    sums = initial * load_part(plus_src, matrix, row, col, size, pitch_kk, ROWS, COLS, DESCRIPTORS).to(
                        tl.float32
                    )
                else:
                    sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
                for i in tl.range(0, tl.cdiv(depth, DEPTH), warp_specialize=SPECIALIZE):
                    k = i * DEPTH
                    a = load_part(left_src, matrix, row, k, size, pitch_kl, ROWS, DEPTH, DESCRIPTORS)
                    if SQUARE:
                        b = load_part(right_src, matrix, k, col, size, pitch_kl, DEPTH, COLS, DESCRIPTORS)
                    else:
                        b = load_part(right_src, matrix, col, k, size, pitch_kl, COLS, DEPTH, DESCRIPTORS).T
                    sums = tl.dot(a, b, sums, input_precision="ieee")

                sums = alpha * sums
                if SHIFT:
                    sums = shifted(sums, row, col, gamma, ROWS, COLS)
                value = sums.to(out.dtype.element_ty)
                if not DESCRIPTORS:
                    _, _, size, _, _, pitch_kk, _, _ = read_shape(table, shape, SQUARE)
                    matrix, row, col = place_in_list(places, tile, ROWS, COLS)
                matrix_stride = size.to(tl.int64) * pitch_kk
                store_triangle(
                    out_dst, value, matrix, row, col, size, pitch_kk, matrix_stride, pitch_kk,
                    ROWS, COLS, WIDE, DESCRIPTORS,
                )  # fmt: skip


@triton.jit
def grouped_symmetric_kernel(
    left,
    right,
    plus,
    out,
    table,
    places,
    shapes,
    waves,
    width,
    alpha: tl.float32,
    initial: tl.float32,
    gamma: tl.float32,
    SQUARE: tl.constexpr,
    PLUS: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
    FLATTEN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    _tiles_of_shapes(
        left, right, plus, out, table, places, 0, shapes, waves, width, alpha, initial, gamma,
        SQUARE, PLUS, SHIFT, ROWS, COLS, DEPTH, WIDE, FLATTEN, DESCRIPTORS, SPECIALIZE,
    )  # fmt: skip
    if COLS > ROWS:
        _tiles_of_shapes(
            left, right, plus, out, table, places, shapes, 2 * shapes, waves, width, alpha, initial, gamma,
            SQUARE, PLUS, SHIFT, ROWS, COLS // 2, DEPTH, WIDE, FLATTEN, DESCRIPTORS, SPECIALIZE,
        )  # fmt: skip


def grouped_symmetric(
    left: Matrices,
    right: Matrices,
    out: Matrices,
    tile: Tile,
    processors: int,
    *,
    alpha: float = 1.0,
    plus: Matrices | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> Launch:
    """Make the launch of out ← α left right + β plus + γ I for k × k matrices, or with α left leftᵀ for k × l ones.

    ``left`` and ``right``: arenas of one layout, k × k both, or the same k × l one. ``out`` and ``plus``: arenas of its
    k × k matrices; ``out`` shares no memory with the others. α is not 0. γ is added before results are rounded.
    """
    numbers, settings = (alpha, beta / alpha, gamma), {"SHIFT": gamma != 0}
    kernel = grouped_symmetric_kernel
    return grouped_launch(kernel, left, right, plus, out, numbers, tile, processors, triangle=True, **settings)
