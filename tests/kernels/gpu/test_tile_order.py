"""The tables of the grouped kernels, against brute force over plain integers; no kernel runs."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from compile_muon.kernels.gpu.arena import Layout  # noqa: E402
from compile_muon.kernels.gpu.model import Tile, programs  # noqa: E402
from compile_muon.kernels.gpu.tile_order import dealt, packed, places, tables  # noqa: E402

CPU = torch.device("cpu")
SQUARE = Tile(rows=16, cols=16, depth=16, group=3, stages=1, warps=1)
DOUBLE = Tile(rows=16, cols=32, depth=16, group=2, stages=1, warps=1)
ONE_ROW = Tile(rows=16, cols=16, depth=16, group=1, stages=1, warps=1)
LAYOUT = Layout(((2, 37, 90), (1, 64, 64), (3, 1, 50), (1, 48, 33 + 15)))


def in_order(rows: int, cols: int, tile: Tile, triangle: bool) -> list[tuple[int, int]]:
    """Column by column within groups of rows, of every tile with an entry that counts."""
    down, across = -(-rows // tile.rows), -(-cols // tile.cols)
    return [
        (r, c)
        for first in range(0, down, tile.group)
        for c in range(across)
        for r in range(first, min(first + tile.group, down))
        if not triangle or c * tile.cols <= (r + 1) * tile.rows - 1  # its last row reaches the diagonal
    ]


@pytest.mark.parametrize("tile", [SQUARE, DOUBLE, ONE_ROW])
@pytest.mark.parametrize("matrices", [1, 3])
def test_places_of_every_size(matrices, tile):
    for size in range(1, 170):
        found = places(matrices, size, size, tile, triangle=True)
        expected = [(m, r, c) for m in range(matrices) for r, c in in_order(size, size, tile, True)]
        assert found.dtype == torch.int32 and [tuple(t) for t in found.tolist()] == expected
        assert len(expected) == matrices * programs(tile, size, size, triangle=True)
    for rows, cols in ((1, 1), (16, 33), (100, 17), (15, 129), (129, 130)):
        found = places(matrices, rows, cols, tile, triangle=False)
        expected = [(m, r, c) for m in range(matrices) for r, c in in_order(rows, cols, tile, False)]
        assert [tuple(t) for t in found.tolist()] == expected
        assert len(expected) == matrices * programs(tile, rows, cols, triangle=False)


@pytest.mark.parametrize("triangle", [True, False])
@pytest.mark.parametrize("square", [True, False])
def test_a_table_row_is_where_the_arena_has_the_shape(square, triangle):
    found = tables(LAYOUT, DOUBLE, CPU, triangle=triangle, square=square)
    shapes = len(LAYOUT.shapes)
    assert found.shapes.shape == (shapes * (2 if triangle else 1), 8) and found.shapes.dtype == torch.int64
    arenas = [LAYOUT.new(torch.float16, CPU, square=which) for which in (True, False)]
    before = 0
    for row in range(len(found.shapes)):
        i, halves = row % shapes, row >= shapes
        b, k, l = LAYOUT.shapes[i]  # noqa: E741
        end, *rest = found.shapes[row].tolist()
        squares, wides = (arena.views[i] for arena in arenas)
        assert rest == [b, k, l, squares.storage_offset(), squares.stride(1), wides.storage_offset(), wides.stride(1)]
        cols = k if triangle or square else l
        expected = places(b, k, cols, DOUBLE, triangle=triangle)
        if triangle:  # those whose right square is above the diagonal come behind all others, in squares
            on = expected[:, 2] * 2 == expected[:, 1]
            expected = expected[on] * torch.tensor([1, 1, 2]) if halves else expected[~on]
        assert torch.equal(found.places[before:end], packed(expected))
        before = end
    assert before == found.tiles == len(found.places)
    assert not triangle or tables(LAYOUT, SQUARE, CPU, triangle=True, square=square).shapes.shape == (shapes, 8)
    assert found is tables(LAYOUT, DOUBLE, CPU, triangle=triangle, square=square)


@pytest.mark.parametrize("shared", [False, True])
def test_every_tile_is_of_one_program(shared):
    for tiles, width in ((1, 4), (3, 4), (4, 4), (5, 4), (100, 7)):
        deal = dealt(tiles, width, CPU, shared=shared)
        starts = deal.waves.tolist()
        made = [
            t
            for p in range(deal.programs)
            for t in range(starts[p // width] + p % width, starts[p // width + 1], deal.width)
        ]
        assert sorted(made) == list(range(tiles))
        assert shared or deal.programs == min(tiles, width)


def test_an_arena_has_room_for_every_matrix_and_nothing_overlaps():
    for square in (True, False):
        arena = LAYOUT.new(torch.float16, CPU, square=square)
        arena.flat.zero_()
        for number, view in enumerate(arena.views, 1):
            assert view.storage_offset() % 64 == 0 and view.stride(1) % 16 == 0 and view.stride(2) == 1
            assert view.stride(0) == view.shape[1] * view.stride(1)
            view += number
        assert arena.flat.sum() == sum(n * view.numel() for n, view in enumerate(arena.views, 1))


def test_padding_is_zero_where_it_is_asked_for():
    odd, even = Layout(((1, 3, 5),)), Layout(((2, 16, 32),))
    assert torch.equal(odd.new(torch.float16, CPU, square=False, zero=True).flat, torch.zeros(64, dtype=torch.float16))
    assert even.new(torch.float16, CPU, square=False, zero=True).flat.numel() == 2 * 16 * 32


def test_parts_follow_the_tensors_of_each_shape():
    layout = Layout(((3, 4, 9), (2, 2, 5)))
    arena = layout.new(torch.float16, CPU, square=False)
    arena.flat.copy_(torch.arange(arena.flat.numel()) % 1000)
    tensors = tuple(torch.empty(shape) for shape in ((1, 4, 9), (2, 4, 9), (2, 2, 5)))
    first, second, third = arena.parts(tensors)
    assert torch.equal(torch.cat([first, second]), arena.views[0]) and torch.equal(third, arena.views[1])
