"""The tile tables, and the choice among their tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_muon.kernels.gpu.tiles import Table, Tile, choose, load_tables, work

LARGE = Tile(rows=128, cols=256, depth=64, group=8, stages=3, warps=8)
MIDDLE = Tile(rows=128, cols=128, depth=64, group=8, stages=4, warps=4, rate=0.85)
SMALL = Tile(rows=64, cols=64, depth=64, group=8, stages=3, warps=4, rate=0.5)


def busiest(tile: Tile, rows: int, cols: int, matrices: int, processors: int, triangle: bool) -> int:
    """Entries that the first processor makes when tiles are dealt out one by one."""
    tiles = [
        (matrix, row, col)
        for matrix in range(matrices) for row in range(0, rows, tile.rows) for col in range(0, cols, tile.cols)
        if not triangle or col < row + tile.rows
    ]  # fmt: skip
    return len(tiles[::processors]) * tile.rows * tile.cols


@pytest.mark.parametrize("tile", [LARGE, MIDDLE, SMALL])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (64, 64), (257, 257), (1000, 3000), (2048, 2048), (4100, 4100)])
@pytest.mark.parametrize("matrices", [1, 5])
def test_work_is_that_of_the_busiest_processor(matrices, rows, cols, tile):
    for processors in (1, 7, 132):
        expected = busiest(tile, rows, cols, matrices, processors, triangle=False)
        assert work(tile, rows, cols, matrices, processors, triangle=False) == expected
        if rows == cols:
            expected = busiest(tile, rows, cols, matrices, processors, triangle=True)
            assert work(tile, rows, cols, matrices, processors, triangle=True) == expected


def test_the_tile_that_is_done_first():
    choice = (LARGE, MIDDLE, SMALL)
    assert choose(choice, 64, 64, 1, 132, triangle=False) == SMALL  # one program whichever is taken: the least work
    assert choose(choice, 2048, 2048, 1, 132, triangle=False) == LARGE  # 128 programs, all at once
    assert choose(choice, 4096, 4096, 1, 132, triangle=True) == MIDDLE  # 528, four each; LARGE has three of twice that
    assert choose(choice, 8192, 8192, 1, 132, triangle=True) == LARGE  # what counts is the rate
    assert choose((LARGE, replace(LARGE, warps=4)), 512, 512, 1, 132, triangle=False) == LARGE  # the first of equals


@pytest.mark.parametrize("name", list(load_tables()))
def test_tables_are_well_formed(name):
    table = load_tables()[name]
    assert table.source
    assert all(tile.cols in (tile.rows, 2 * tile.rows) for tile in table.symmetric)
    for tiles in (table.symmetric, table.product):
        assert max(tile.rate for tile in tiles) == 1
        sizes = [tile.rows * tile.cols for tile in tiles]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
        for tile in tiles:
            assert all(n >= 16 and n & (n - 1) == 0 for n in (tile.rows, tile.cols, tile.depth))
            assert 0 < tile.rate <= 1
            assert tile.descriptors == (name != "sm_80")
            assert not tile.specialize or name == "sm_100"


def test_small_matrices_are_left_to_cublas():
    table = Table("tests", smallest=1024, smallest_batched=512, batch=4, symmetric=(SMALL,), product=(SMALL,))
    assert table.serves(1, 1024) and not table.serves(1, 1023)
    assert table.serves(4, 512) and not table.serves(3, 512) and not table.serves(64, 511)
