"""The symmetric product of every matrix of a list, in one launch.

    C = α X Xᵀ            for each shape (k, l): X [b, k, l], C [b, k, k]
    C = α L R + β P + γ I   L, R, P, C [b, k, k]

as in ``symmetric``, which says why L R and not L Rᵀ. Programs are persistent: each goes through every width-th tile of
all triangles in the order of ``tile_order.places``, which has no tile above a diagonal. A tile of two squares whose
right one is above the diagonal has half the width and comes behind all others: 8 of the 72 in a triangle of 2048.

On 9.0 and 10.0 results leave through descriptors too: next to the state of a program that stays, the addresses of two
stores, straight and mirrored, spilled 40 to 240 bytes a thread.
"""

from dataclasses import replace

import triton
import triton.language as tl

from .arena import Matrices
from .grouped_operands import first_tile, grouped_launch, last_tile, load_part, place_in_list, read_shape, source_of
from .launch import Launch
from .model import Tile
from .operands import shifted, store_triangle

__all__ = ["grouped_symmetric", "grouped_symmetric_kernel"]


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
    WIDEN: tl.constexpr,
):
    """Compute this program's tiles of the shapes in rows ``begin`` to ``stop`` of the table, all of one width."""
    for shape in range(begin, stop):
        end, matrices, size, depth, square, square_pitch, wide, wide_pitch = read_shape(table, shape, SQUARE)
        first = first_tile(table, shape, waves, width)
        end = min(end, last_tile(waves, width))
        if first < end:
            lefts = source_of(left + wide, matrices, size, depth, wide_pitch, ROWS, DEPTH, DESCRIPTORS)
            if SQUARE:
                rights = source_of(right + wide, matrices, depth, size, wide_pitch, DEPTH, COLS, DESCRIPTORS)
            else:
                rights = source_of(right + wide, matrices, size, depth, wide_pitch, COLS, DEPTH, DESCRIPTORS)
            if PLUS:
                pluses = source_of(plus + square, matrices, size, size, square_pitch, ROWS, COLS, DESCRIPTORS)
            # As wide as its pitch: the padding is written, with zeros.
            target = source_of(out + square, matrices, size, square_pitch, square_pitch, ROWS, WIDE, DESCRIPTORS)
            for tile in tl.range(first, end, width, flatten=FLATTEN):
                if not DESCRIPTORS:
                    _, _, size, depth, _, square_pitch, _, wide_pitch = read_shape(table, shape, SQUARE)
                matrix, row, col = place_in_list(places, tile, ROWS, COLS)
                # The summand comes first: added at the end it would hold registers that the sums need, and spill.
                if PLUS:
                    sums = initial * load_part(
                        pluses, matrix, row, col, size, square_pitch, ROWS, COLS, DESCRIPTORS, WIDEN
                    ).to(tl.float32)
                else:
                    sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
                for i in tl.range(0, tl.cdiv(depth, DEPTH), warp_specialize=SPECIALIZE):
                    k = i * DEPTH
                    a = load_part(lefts, matrix, row, k, size, wide_pitch, ROWS, DEPTH, DESCRIPTORS, WIDEN)
                    if SQUARE:
                        b = load_part(rights, matrix, k, col, size, wide_pitch, DEPTH, COLS, DESCRIPTORS, WIDEN)
                    else:
                        b = load_part(rights, matrix, col, k, size, wide_pitch, COLS, DEPTH, DESCRIPTORS, WIDEN).T
                    sums = tl.dot(a, b, sums, input_precision="ieee")

                sums = alpha * sums
                if SHIFT:
                    sums = shifted(sums, row, col, gamma, ROWS, COLS)
                value = sums.to(out.dtype.element_ty)
                if not DESCRIPTORS:
                    _, _, size, _, _, square_pitch, _, _ = read_shape(table, shape, SQUARE)
                    matrix, row, col = place_in_list(places, tile, ROWS, COLS)
                stride = size.to(tl.int64) * square_pitch
                store_triangle(
                    target, value, matrix, row, col, size, square_pitch, stride, square_pitch,
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
    WIDEN: tl.constexpr,
):
    _tiles_of_shapes(
        left, right, plus, out, table, places, 0, shapes, waves, width, alpha, initial, gamma,
        SQUARE, PLUS, SHIFT, ROWS, COLS, DEPTH, WIDE, FLATTEN, DESCRIPTORS, SPECIALIZE, WIDEN,
    )  # fmt: skip
    if COLS > ROWS:
        _tiles_of_shapes(
            left, right, plus, out, table, places, shapes, 2 * shapes, waves, width, alpha, initial, gamma,
            SQUARE, PLUS, SHIFT, ROWS, COLS // 2, DEPTH, WIDE, FLATTEN, DESCRIPTORS, SPECIALIZE, WIDEN,
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
    """Launch out ← α left right + β plus + γ I for every k × k matrix, or with α left leftᵀ for every k × l one.

    ``left`` and ``right``: arenas of one layout, k × k both, or the same k × l one. ``out`` and ``plus``: arenas of its
    k × k matrices; ``out`` shares no memory with the others. α is not 0. γ is added before results are rounded.
    """
    numbers = (alpha, beta / alpha, gamma)
    launch = grouped_launch(
        grouped_symmetric_kernel, left, right, plus, out, numbers, left.square, tile, processors, triangle=True
    )
    return replace(launch, constants=launch.constants | {"SHIFT": gamma != 0})
