"""What a machine costs: products, kernels, collectives, and what the core decides by."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from compile_muon.config.machine import load_costs
from compile_muon.kernels import resolve_coefficients
from compile_muon.kernels.operations import gram_flops, standard_flops
from compile_muon.passes.costs import COLLECTIVES, Costs, Link, Protocol, gather_start, owned_work, reduce_start
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec

#: two nodes' worth of eight ranks and more: 100 GB/s inside, 10 GB/s between
NODES = Costs(
    memory_bandwidth=1e12,
    kernel_seconds=1e-6,
    rates={"bfloat16": ((64.0, 1e12), (1024.0, 16e12), (4096.0, 32e12)), "float32": ((64.0, 1e12),)},
    links=(Link(8, 1e11, 1e-6), Link(None, 1e10, 1e-5)),
    start_seconds=5e-6,
    collectives={"all_reduce": (2.0, 1.0)},
    product_starts={"float32": 2e-6},
)
#: two cores
CPU = replace(NODES, links=(Link(None, 1e9, 1e-5),), cores=2, bandwidths=((1e6, 4e12),))
LL = Protocol("ring, LL", 1e-6, (1e-7, 1e-6), fraction=0.1)
TREE = Protocol("tree", 2e-6, (1e-7, 2e-6), fraction=0.5, tree=True)
WAYS = replace(NODES, protocols=(LL, TREE))
H100 = load_costs("h100")


def test_rates_are_those_of_the_table_and_lines_of_logarithms_between() -> None:
    assert [NODES.rate(size, "bfloat16") for size in (1, 64, 1024, 4096, 10**6)] == [1e12, 1e12, 16e12, 32e12, 32e12]
    assert NODES.rate(256, "bfloat16") == pytest.approx(4e12)
    assert replace(NODES, rate_fractions=((1.0, 0.5),)).rate(256, "bfloat16") == pytest.approx(2e12)


def test_products_are_bound_by_operations_or_by_memory() -> None:
    square = NODES.product_seconds(4096, 4096, 4096, dtype="bfloat16")
    assert square == pytest.approx(1e-6 + 2 * 4096**3 / 32e12)
    thin = NODES.product_seconds(2**20, 2**10, 1, dtype="bfloat16")
    assert thin == NODES.move_seconds(2 * (2**20 + 2**10 + 2**30))
    assert NODES.product_seconds(64, 64, 64, batch=3, dtype="float32") == pytest.approx(2e-6 + 3 * 2 * 64**3 / 1e12)


def test_kernels_that_caches_serve_are_faster() -> None:
    assert CPU.move_seconds(1e6) == pytest.approx(1e-6 + 1e6 / 4e12)
    assert CPU.move_seconds(1e8) == pytest.approx(1e-6 + 1e8 / 1e12)
    assert replace(CPU, memory_fraction=0.5).move_seconds(1e8) == pytest.approx(1e-6 + 1e8 / 5e11)


def test_ranks_on_one_core_share_it_and_the_memory() -> None:
    two, four = CPU.shared_by(2), CPU.shared_by(4)
    for work in (
        lambda machine: machine.product_seconds(512, 512, 512, dtype="bfloat16"),
        lambda machine: machine.product_seconds(64, 64, 64, dtype="float32"),
        lambda machine: machine.move_seconds(1e4),
        lambda machine: machine.move_seconds(1e9),
        lambda machine: machine.collective_seconds("all_reduce", 0, range(2)),
    ):
        assert work(CPU) == work(two)
        assert work(four) == pytest.approx(2 * work(two))
    sent = [machine.collective_seconds("all_to_all", 1e12, range(2)) for machine in (two, four)]
    assert sent == pytest.approx([1e3, 1e3], rel=1e-4)
    way = replace(CPU, protocols=(Protocol("tree", 1.0, (2.0,), tree=True),)).shared_by(4).protocols[0]
    assert (way.start_seconds, way.latencies) == (2.0, (4.0,))
    assert NODES.shared_by(64) is NODES


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_take_a_start_hops_and_bytes(kind: str) -> None:
    hops = 2 if kind == "all_reduce" else 1
    for ranks in (range(2), range(8), range(8, 16), [1, 3, 6]):
        expected = 5e-6 + hops * (len(ranks) - 1) * 1e-6 + 1e8 / 1e11
        assert NODES.collective_seconds(kind, 1e8, ranks) == pytest.approx(expected)
    between = 5e-6 + hops * 3 * 1e-5 + 1e8 / 1e10
    assert NODES.collective_seconds(kind, 1e8, [0, 8, 16, 24]) == pytest.approx(between)


def test_a_ring_leaves_a_node_once_through_all_its_links_and_an_all_to_all_through_each_rank_s_own() -> None:
    hops = 5e-6 + 14 * 1e-6 + 1e-5
    assert NODES.collective_seconds("all_gather", 1e9, range(16)) == pytest.approx(hops + 1e9 / (8 * 1e10))
    assert NODES.collective_seconds("all_to_all", 1.5e9, range(16)) == pytest.approx(hops + 8e8 / 1e10)
    slow_inside = replace(NODES, links=(Link(8, 1e9, 1e-6), NODES.links[1]))
    assert slow_inside.collective_seconds("all_gather", 1e9, range(16)) == pytest.approx(hops + 1e9 / 1e9)


def test_bandwidths_of_a_link_may_depend_on_the_size() -> None:
    link = Link(None, 1e9, 0.0, fraction=0.5, bandwidths=((1e4, 4e9), (1e6, 2e9)))
    seconds = [link.transfer_seconds(nbytes) for nbytes in (1e3, 1e4, 1e6, 1e7)]
    assert seconds == pytest.approx([1e3 / 2e9, 1e4 / 2e9, 1e6 / 1e9, 1e7 / 5e8])
    assert replace(NODES, links=(link,), start_seconds=0).collective_seconds("all_gather", 1e7, range(4)) == seconds[-1]


def test_a_collective_goes_the_fastest_way_there_is() -> None:
    """A start and hops of its own, and a part of the bandwidth: small ones start sooner, large ones are as before."""
    ranks = range(64)  # 8 nodes
    assert WAYS.collective_parts("all_gather", 8e3, ranks) == pytest.approx((1e-6 + 56e-7 + 7e-6, 1e3 / 1e10 / 0.1))
    assert WAYS.collective_parts("all_gather", 8e9, ranks) == NODES.collective_parts("all_gather", 8e9, ranks)
    # up and down: 7 hops inside of a node, and 3 between 8 of them
    assert WAYS.collective_parts("all_reduce", 8e3, ranks) == pytest.approx((2e-6 + 14e-7 + 12e-6, 1e3 / 1e10 / 0.5))
    of_each_node = WAYS.collective_parts("all_reduce", 1e3, range(0, 64, 8))
    assert of_each_node == pytest.approx((2e-6 + 12e-6, 1e3 / 1e10 / 0.5))
    inside = WAYS.collective_parts("all_reduce", 1e3, range(8))
    assert inside == pytest.approx((1e-6 + 14e-7, 1e3 / 1e11 / 0.1))
    for kind, nbytes in (("all_to_all", 1e3), ("all_to_all", 1e9), ("all_reduce", 1e12)):
        assert WAYS.collective_seconds(kind, nbytes, ranks) == NODES.collective_seconds(kind, nbytes, ranks)


def test_only_known_kinds() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        NODES.collective_seconds("broadcast", 1.0, range(2))


def matrix(method: str, rows: int) -> MuonSpec:
    chosen = resolve_coefficients("polar_express", 5)
    steps = tuple(value for triple in chosen.steps for value in triple)
    return MuonSpec(3, rows, 1024, True, method, steps, 1.0, (2,), "bfloat16", 1e-7, "owner")


@pytest.mark.parametrize("rows", [4096, 1024])
@pytest.mark.parametrize(
    ("method", "flops", "products"),
    [("standard", standard_flops, 15), ("gram", lambda *size: gram_flops(*size, 1), 18)],
)
def test_an_owner_takes_what_the_products_of_its_matrices_take(
    method: str, flops: Callable[[int, int, int], int], products: int, rows: int
) -> None:
    """At a rate and a start that are the same for all of them; also where all of them are square."""
    flat = Costs(rates={"bfloat16": ((1.0, 1e12),)}, product_starts={"bfloat16": 1e-6})
    seconds = flops(1024, rows, 5) / 1e12 + products * 1e-6
    assert owned_work(matrix(method, rows), flat, matrix(method, rows).matrices) == pytest.approx(
        3 * seconds * 1e9, rel=1e-6
    )


def test_starts_in_bytes_of_whole_weights() -> None:
    """Over the axis where they are most; ranks of an axis have those of the axes of model parallelism between them."""
    axes = Axis("shard", 8, 0, "s"), Axis("replicate", 4, 0, "r"), Axis("all", 32, 0, "a")
    shard = H100.start_bytes("reduce_scatter", range(8)) * 8 / 7
    replicate = H100.start_bytes("all_reduce", range(0, 32, 8)) * 8 * 4 / 6
    assert reduce_start(Layout((64, 32), 2, *axes), H100) == pytest.approx(max(shard, replicate), rel=1e-6)
    apart = Layout((64, 32), 2, axes[0], tensor=Axis("tensor", 4, 0, "t"))
    assert gather_start(apart, H100) == pytest.approx(H100.start_bytes("all_gather", range(0, 32, 4)) * 8 / 7, rel=1e-6)
    assert gather_start(Layout((64, 32), 0, axes[0]), H100) == 0


def test_starting_takes_as_long_as_sending_that_much() -> None:
    """The way that large ones go: there is a faster one for what is small."""
    for kind, ranks in itertools.product(COLLECTIVES, (range(2), range(64), range(0, 64, 8))):
        start, transfer = H100.collective_parts(kind, 2**28, ranks)
        assert H100.start_bytes(kind, ranks) * transfer / 2**28 == pytest.approx(start, rel=1e-6)
        assert H100.start_bytes(kind, range(1)) == 0
