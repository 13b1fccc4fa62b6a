"""The formulas: the numbers that docs/exchange.md prints, and the facts that choices rest on."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from compile_muon.kernels.operations import gram_flops, standard_flops
from compile_muon.passes import costs

sizes = st.integers(1, 4096)
worlds = st.integers(2, 512)


@pytest.mark.parametrize("alpha", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("k", [1, 16, 768])
def test_operations_in_units_of_k_cubed(alpha, k):
    """docs/exchange.md: 20a + 10 and 8a + 28 operations, five steps, dense, one restart."""
    assert costs.standard_operations(k, alpha * k, steps=5) == (20 * alpha + 10) * k**3
    assert costs.gram_operations(k, alpha * k, steps=5) == (8 * alpha + 28) * k**3
    assert costs.gram_operations(alpha * k, k, steps=5) == (8 * alpha + 28) * k**3


def test_gram_wins_from_an_aspect_of_one_and_a_half():
    def gain(alpha: float) -> float:
        k = 64
        l = int(alpha * k)  # noqa: E741
        return costs.standard_operations(k, l, steps=5) - costs.gram_operations(k, l, steps=5)

    assert gain(1.25) < 0
    assert gain(1.5) == 0
    assert gain(1.75) > 0


@given(sizes, sizes, st.integers(1, 20))
def test_operations_are_those_the_kernels_count(rows, cols, steps):
    k, l = sorted((rows, cols))  # noqa: E741
    assert costs.standard_operations(rows, cols, steps=steps) == standard_flops(k, l, steps)
    assert costs.owner_work(rows, cols, steps=steps) * 2 == standard_flops(k, l, steps)
    assert costs.owner_work(rows, cols, steps=steps) == steps * k * k * (2 * l + k)
    if steps > 1:
        assert costs.gram_operations(rows, cols, steps=steps) == gram_flops(k, l, steps, 1)


@given(sizes, sizes, worlds, st.sampled_from([2, 4]))
def test_table_of_bytes(rows, cols, world, itemsize):
    """docs/exchange.md: sent bytes per rank and matrix of S bytes."""
    s = rows * cols * itemsize
    sent = {name: costs.bytes_sent(name, rows, cols, world=world, itemsize=itemsize) for name in costs.BYTES_SENT}
    assert sent["local"] == 0
    assert sent["replicate"] == pytest.approx(s * (world - 1) / world)
    assert sent["owner"] == pytest.approx(2 * s * (world - 1) / world**2)
    assert sent["owner_whole"] == pytest.approx(s * (world - 1) / world)
    assert sent["owner"] <= sent["replicate"] * (1 + 1e-12)  # equal at world 2, less from world 3
    gathered = costs.weight_bytes("all_gather", rows, cols, world=world, itemsize=itemsize)
    scattered = costs.weight_bytes("reduce_scatter", rows, cols, world=world, itemsize=itemsize)
    reduced = costs.weight_bytes("all_reduce", rows, cols, world=world, itemsize=itemsize)
    assert gathered == scattered == pytest.approx(s * (world - 1) / world)
    assert reduced == pytest.approx(gathered + scattered)


@given(sizes, sizes, st.integers(2, 32), st.integers(2, 32))
def test_table_of_bytes_of_a_mesh(rows, cols, shards, replicas):
    """docs/parallelism.md: state over all ranks sends no more bytes than state over shards."""
    s, world = rows * cols * 2, shards * replicas
    size = {"world": world, "replicas": replicas, "itemsize": 2}
    sent = {name: costs.bytes_sent(name, rows, cols, **size) for name in costs.BYTES_SENT}
    assert sent["local_over_all"] == 0 < sent["local"]
    assert sent["owner_over_all"] == pytest.approx(2 * s * (world - 1) / world**2)
    assert sent["replicate_over_all"] == pytest.approx(s * (world - 1) / world)
    reduced, slices = (
        costs.weight_bytes(name, rows, cols, **size) for name in ("reduce_scatter_over_all", "slice_gather")
    )
    assert reduced + slices == pytest.approx(costs.weight_bytes("reduce_scatter", rows, cols, **size))
    choice = costs.choose_exchange(rows, cols, world=world, replicas=replicas, state_over_all=True, steps=5, itemsize=2)
    assert choice in ("owner", "replicate")


def test_formulas_print_in_their_symbols():
    names = {
        str(symbol)
        for table in costs.BYTES_SENT.values()
        for formula in table.values()
        for symbol in formula.free_symbols
    }
    assert names == {"rows", "cols", "shards", "replicas", "itemsize"}
    assert {str(s) for s in costs.OWNER_WORK.free_symbols} == {"rows", "cols", "steps"}
    owner, replicate = costs.BYTES_SENT["owner"]["shard"], costs.BYTES_SENT["replicate"]["shard"]
    assert sympy.simplify(owner * costs.W / 2 - replicate) == 0


def test_one_process_exchanges_nothing():
    assert costs.choose_exchange(512, 512, world=1, steps=5, itemsize=2) == "local"


@given(sizes, sizes, worlds, st.integers(1, 10))
def test_choice_is_one_of_two_and_ignores_orientation(rows, cols, world, steps):
    choice = costs.choose_exchange(rows, cols, world=world, steps=steps, itemsize=2)
    assert choice in ("replicate", "owner")
    assert choice == costs.choose_exchange(cols, rows, world=world, steps=steps, itemsize=2)


@given(sizes, sizes, worlds, st.integers(1, 10), st.integers(1, 4))
def test_once_owner_pays_it_keeps_paying(rows, cols, world, steps, more):
    """Owner trades one more latency for less work and fewer bytes: more of either never turns it back."""
    if costs.choose_exchange(rows, cols, world=world, steps=steps, itemsize=2) == "owner":
        for larger in (
            {"rows": rows * more, "cols": cols * more, "world": world, "steps": steps},
            {"rows": rows, "cols": cols, "world": world * more, "steps": steps},
            {"rows": rows, "cols": cols, "world": world, "steps": steps * more},
        ):
            assert costs.choose_exchange(**larger, itemsize=2) == "owner", larger


@pytest.mark.parametrize("world", [2, 8, 64])
def test_ends_of_the_choice(world):
    assert costs.choose_exchange(8, 8, world=world, steps=5, itemsize=2) == "replicate"
    assert costs.choose_exchange(2048, 8192, world=world, steps=5, itemsize=2) == "owner"
