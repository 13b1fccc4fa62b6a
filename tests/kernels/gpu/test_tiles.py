"""The tile tables, and the choice among their tiles."""

from __future__ import annotations

import pytest

from compile_muon.kernels.gpu.tiles import Table, Tile, choose, load_tables

LARGE = Tile(rows=128, cols=256, depth=64, group=8, stages=3, warps=8)
SMALL = Tile(rows=64, cols=64, depth=64, group=8, stages=3, warps=4)


def programs_with_work(tile: Tile, size: int) -> int:
    """Tiles that hold at least one entry of the lower triangle, one by one."""
    return sum(
        col < row + tile.rows for row in range(0, size, tile.rows) for col in range(0, size, tile.cols)
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 64, 100, 257, 1000, 2048, 4100])
@pytest.mark.parametrize("matrices", [1, 5])
def test_the_largest_tile_that_leaves_no_processor_idle(matrices, size):
    full = programs_with_work(LARGE, size) * matrices
    assert choose((LARGE, SMALL), size, size, matrices, full, triangle=True) == LARGE
    assert choose((LARGE, SMALL), size, size, matrices, full + 1, triangle=True) == SMALL


def test_a_general_product_counts_all_tiles():
    assert choose((LARGE, SMALL), 1024, 4096, 1, 128, triangle=False) == LARGE
    assert choose((LARGE, SMALL), 1024, 4096, 1, 129, triangle=False) == SMALL


@pytest.mark.parametrize("name", list(load_tables()))
def test_tables_are_well_formed(name):
    table = load_tables()[name]
    assert table.source
    for tiles in (table.symmetric, table.product):
        sizes = [tile.rows * tile.cols for tile in tiles]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
        for tile in tiles:
            assert all(n >= 16 and n & (n - 1) == 0 for n in (tile.rows, tile.cols, tile.depth))
            assert tile.descriptors == (name != "sm_80")
            assert not tile.specialize or name == "sm_100"


def test_small_matrices_are_left_to_cublas():
    table = Table("tests", smallest=1024, smallest_batched=512, batch=4, symmetric=(SMALL,), product=(SMALL,))
    assert table.serves(1, 1024) and not table.serves(1, 1023)
    assert table.serves(4, 512) and not table.serves(3, 512) and not table.serves(64, 511)
