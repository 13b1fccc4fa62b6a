"""The tile tables, the model of a launch, and the choice among tiles that follows from it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from compile_muon.kernels import dispatch
from compile_muon.kernels.gpu.model import HALF, Device, Tile, busiest, programs, seconds, seconds_beside, waves
from compile_muon.kernels.gpu.tiles import INTERPRETER, load_tables, served

LARGE = Tile(rows=128, cols=256, depth=64, group=8, stages=3, warps=8)


@pytest.mark.parametrize("processors", [1, 5, 132])
def test_load_of_the_busiest_processor_over_a_list(processors):
    tile, results = Tile(rows=16, cols=32, depth=16), [(2, 100, 300, 40), (1, 64, 64, 17), (3, 20, 33, 100)]
    loads, count = [0] * processors, 0
    for matrices, rows, cols, depth in results:
        for _ in range(matrices * -(-rows // 16) * -(-cols // 32)):
            loads[count % processors] += 2 * 16 * 32 * depth
            count += 1
    assert busiest(tile, results, processors, triangle=False) == (max(loads), -(-count // processors))


def test_blocks_side_by_side_hide_what_a_block_alone_waits_for():
    device = Device(rate=1.0, solo=0.5, overhead=1e5, launch=1e3)
    tile = Tile(rows=16, cols=16, resident=3)
    work = 2 * 16 * 16 * 100

    def of(matrices: int) -> float:
        return seconds(tile, device, [(matrices, 16, 16, 100)], 1, triangle=False) - 1e3

    assert of(1) == pytest.approx(work / 0.5 + 1e5)
    assert of(2) == pytest.approx(2 * work / 0.75 + 1e5)
    assert of(3) == pytest.approx(3 * work + 1e5)
    assert of(4) == pytest.approx(4 * work + 2e5)


def test_a_list_pays_for_what_is_between_its_tiles():
    device = Device(rate=1.0, overhead=1.0, between=1e5, between_flattened=1e4)
    tile = replace(LARGE, descriptors=True)

    def of(tile: Tile, *, summand: bool, triangle: bool = False) -> float:
        return seconds(tile, device, [(2, 256, 256, 50)], 1, triangle=triangle, summand=summand)

    work = 2 * 128 * 256 * 50
    assert of(tile, summand=False) == 4 * (work + 1)
    assert of(tile.in_list, summand=True) == 4 * (work + 1e5) == of(LARGE.in_list, summand=False)
    assert of(tile.in_list, summand=False) == 4 * (work + 1e4)
    # Of the two tiles of a triangle one holds nothing of it in its right half.
    assert of(tile.in_list, summand=False, triangle=True) == pytest.approx(4e4 + 2 * work + 2 * int(HALF * work))


@pytest.mark.parametrize("tiles", [1, 131, 132, 133, 1452, 7680])
def test_every_tile_is_in_one_wave(tiles):
    alone, shared = (waves(tiles, 132, shared=shared) for shared in (False, True))
    assert alone == [0, tiles] and shared[0] == 0 and shared[-1] == tiles
    lengths = [-(-(stop - start) // 132) for start, stop in zip(shared, shared[1:], strict=False)]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] == 1 and len(lengths) <= 2 + tiles.bit_length()


@pytest.mark.parametrize("held", [0, 8, 16, 32])
def test_multiprocessors_that_others_hold_cost_their_share_and_not_twice_the_time(held):
    """The first X of a layer of 2048; expected of a list: at most 1.1 times what is fair."""
    table = load_tables()["sm_90"]
    tile, results = table.product[0].in_list, [(5, 2048, 8192, 2048), (5, 2048, 2048, 2048)]
    tiles = sum(b * programs(tile, rows, cols, triangle=False) for b, rows, cols, _ in results)

    def beside(held: int, *, shared: bool) -> tuple[float, float]:
        starts = waves(tiles, 132, shared=shared)
        how = {"triangle": False, "summand": False}
        return seconds_beside(tile, table.device, results, 132 - held, starts, 132, **how)

    alone, longest = beside(0, shared=False)
    assert alone == pytest.approx(seconds(tile, table.device, results, 132, triangle=False, summand=False), rel=0.01)
    waved, waits = beside(held, shared=True)
    assert alone * 132 / (132 - held) * 0.99 <= waved <= 1.1 * alone * 132 / (132 - held) and waits < 0.6 * longest
    if held:
        assert beside(held, shared=False)[0] > 1.9 * alone


@pytest.mark.parametrize("name", list(load_tables()))
def test_tables_are_well_formed(name):
    table = load_tables()[name]
    assert table.source
    assert 1e12 < table.device.rate < 1e14 and 0 < table.device.solo <= 1
    assert 0 < table.device.overhead < 1e-4 and 0 < table.device.launch < 1e-4
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


@pytest.mark.parametrize("name", list(load_tables()))
def test_cublas_keeps_what_leaves_multiprocessors_idle(name):
    table = replace(load_tables()[name], measured=True)

    def alone(*shape: int) -> bool:
        return served(table, (shape,), 132)[0]

    assert alone(1, 8192, 8192) and alone(64, 4096, 14336)
    assert not alone(1, 256, 256) and not alone(1, 512, 512)  # 36 tiles of 64 × 64 in a triangle, 64 in a square
    # An owner's list fills what one matrix leaves idle, but a tiny one is no better off in it.
    assert served(table, ((32, 1024, 1024), (1, 64, 64)), 132) == (True, False)
    faster = replace(table, cublas=tuple(replace(tile, rate=100.0) for tile in table.cublas))
    assert served(faster, ((1, 8192, 8192), (64, 4096, 4096)), 132) == (False, False)
    assert served(INTERPRETER, ((1, 1, 1),), 1) == (True,)


@pytest.mark.parametrize("measured", [True, False])
def test_by_itself_only_measured_tiles_are_taken(measured, monkeypatch):
    table = replace(load_tables()["sm_100"], measured=measured)
    products = SimpleNamespace(table=table)
    monkeypatch.setattr(dispatch, "triton_kernels", lambda: SimpleNamespace(products_on=lambda _: products))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert served(table, ((64, 4096, 14336), (1, 64, 64)), 132) == (measured, False)
    assert dispatch.symmetric_kernels(torch.float16, "cuda", "auto") == measured
    assert dispatch.symmetric_kernels(torch.float16, "cuda", "triton")
    assert all(t.measured == ("never timed" not in t.source) for t in load_tables().values())
