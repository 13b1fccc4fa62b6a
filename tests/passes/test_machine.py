"""What a description of a machine says of products, kernels and collectives."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from compile_muon.passes.errors import DescriptionError
from compile_muon.passes.machine import COLLECTIVES, Link, Machine, Protocol
from compile_muon.passes.operations import operations

#: two nodes' worth of eight ranks and more: 100 GB/s inside, 10 GB/s between
NODES = Machine(
    name="nodes",
    device="cuda",
    memory_bytes=10**10,
    memory_bandwidth=1e12,
    kernel_seconds=1e-6,
    rates={"bfloat16": ((64.0, 1e12), (1024.0, 16e12), (4096.0, 32e12)), "float32": ((64.0, 1e12),)},
    links=(Link(8, 1e11, 1e-6), Link(None, 1e10, 1e-5)),
    start_seconds=5e-6,
    collectives={"all_reduce": (2.0, 1.0)},
    product_starts={"float32": 2e-6},
)
#: two cores
CPU = replace(NODES, name="cores", device="cpu", links=(Link(None, 1e9, 1e-5),), cores=2, bandwidths=((1e6, 4e12),))

sizes = st.integers(1, 8192)


def without(record: dict, name: str) -> dict:
    return {key: value for key, value in record.items() if key != name}


# ---------------------------------------------------------------------------------------------------------- products


@given(sizes, sizes)
def test_rates_rise_with_the_size_as_their_table_does(a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert NODES.rate(low, "bfloat16") <= NODES.rate(high, "bfloat16") * (1 + 1e-12)


def test_rates_are_those_of_the_table_and_lines_of_logarithms_between() -> None:
    assert [NODES.rate(size, "bfloat16") for size in (1, 64, 1024, 4096, 10**6)] == [1e12, 1e12, 16e12, 32e12, 32e12]
    assert NODES.rate(256, "bfloat16") == pytest.approx(4e12)
    assert replace(NODES, rate_fractions=((1.0, 0.5),)).rate(256, "bfloat16") == pytest.approx(2e12)


def test_fused_attention_has_a_rate_of_its_own_in_half_precision() -> None:
    fused = replace(NODES, attention_fraction=0.25, rate_fractions=((1.0, 0.5),))
    assert [fused.attention_rate(size, 512, "bfloat16") for size in (1, 64, 4096)] == [8e12] * 3
    assert fused.attention_rate(64, 512, "float32") == fused.rate(64, "float32")
    assert NODES.attention_rate(64, 512, "bfloat16") == NODES.rate(64, "bfloat16")
    assert Machine.from_json(fused.to_json()) == fused


def test_attention_that_was_measured_goes_by_its_sequence() -> None:
    known = replace(NODES, attention_fraction=0.25, attention_rates={"float32": ((64.0, 1e12), (256.0, 4e12))})
    assert [known.attention_rate(64, at, "float32") for at in (1, 64, 256, 4096)] == [1e12, 1e12, 4e12, 4e12]
    assert known.attention_rate(64, 128, "float32") == pytest.approx(2e12)
    assert known.attention_rate(64, 128, "bfloat16") == 8e12
    assert Machine.from_json(known.to_json()) == known


def test_who_copies_bytes_may_have_a_core_of_his_own() -> None:
    host = {"graph": 1.0, "parameter": 2.0, "collective": 3.0, "byte": 4.0}
    cores = replace(CPU, host_seconds=host, cores=4, function_seconds=1.0, late_seconds=0.5)
    assert cores.shared_by(2).host_seconds == without(host, "byte")
    assert cores.shared_by(4).host_seconds == host
    assert cores.shared_by(8).host_seconds == {kind: 2 * seconds for kind, seconds in host.items()}
    assert cores.shared_by(8).function_seconds == 2.0
    assert [cores.shared_by(ranks).late_seconds for ranks in (2, 4, 8)] == [0.5, 0.5, 1.0]
    assert Machine.from_json(cores.to_json()) == cores


def test_a_dtype_without_rates_takes_those_of_its_size() -> None:
    assert NODES.rate(1024, "float16") == NODES.rate(1024, "bfloat16")
    assert NODES.rate(1024, "float64") == NODES.rate(1024, "float32") / 2
    assert NODES.rate(1024, "float8_e4m3fn") == NODES.rate(1024, "bfloat16")


@given(sizes, sizes, sizes, st.integers(1, 8), st.integers(1, 4))
def test_more_to_multiply_never_takes_less(m: int, n: int, k: int, batch: int, more: int) -> None:
    seconds = NODES.product_seconds(m, n, k, batch=batch, dtype="bfloat16")
    assert seconds >= NODES.kernel_seconds
    larger = [(m * more, n, k, batch), (m, n, k * more, batch), (m, n, k, batch * more)]
    for *shape, count in larger:
        assert NODES.product_seconds(*shape, batch=count, dtype="bfloat16") >= seconds * (1 - 1e-12)


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
    assert four.memory_bytes == CPU.memory_bytes // 4
    way = replace(CPU, protocols=(Protocol("tree", 1.0, (2.0,), tree=True),)).shared_by(4).protocols[0]
    assert (way.start_seconds, way.latencies) == (2.0, (4.0,))
    assert NODES.shared_by(64) is NODES


# ------------------------------------------------------------------------------------------------------- collectives


def test_one_rank_sends_nothing() -> None:
    assert NODES.collective_seconds("all_gather", 0.0, [3]) == 0


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


@given(st.sampled_from(COLLECTIVES), st.floats(0, 1e12), st.floats(1, 4), st.integers(2, 64))
def test_more_bytes_take_longer(kind: str, nbytes: float, more: float, ranks: int) -> None:
    seconds = NODES.collective_seconds(kind, nbytes, range(ranks))
    assert NODES.collective_seconds(kind, nbytes * more, range(ranks)) >= seconds
    assert NODES.collective_seconds(kind, nbytes, range(ranks + 1)) > seconds - nbytes / 1e10


def test_bandwidths_of_a_link_may_depend_on_the_size() -> None:
    link = Link(None, 1e9, 0.0, fraction=0.5, bandwidths=((1e4, 4e9), (1e6, 2e9)))
    seconds = [link.transfer_seconds(nbytes) for nbytes in (1e3, 1e4, 1e6, 1e7)]
    assert seconds == pytest.approx([1e3 / 2e9, 1e4 / 2e9, 1e6 / 1e9, 1e7 / 5e8])
    assert replace(NODES, links=(link,), start_seconds=0).collective_seconds("all_gather", 1e7, range(4)) == seconds[-1]


LL = Protocol("ring, LL", 1e-6, (1e-7, 1e-6), fraction=0.1)
TREE = Protocol("tree", 2e-6, (1e-7, 2e-6), fraction=0.5, tree=True)
WAYS = replace(NODES, protocols=(LL, TREE))


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


@given(st.sampled_from(COLLECTIVES), st.floats(0, 1e10), st.integers(2, 64))
def test_another_way_never_makes_a_collective_slower(kind: str, nbytes: float, count: int) -> None:
    assert WAYS.collective_seconds(kind, nbytes, range(count)) <= NODES.collective_seconds(kind, nbytes, range(count))


def test_only_known_kinds() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        NODES.collective_seconds("broadcast", 1.0, range(2))


# ----------------------------------------------------------------------------------------------------------- as JSON


@pytest.mark.parametrize("machine", [NODES, CPU, WAYS])
def test_json_pickle_and_hash_keep_a_machine(machine: Machine) -> None:
    for again in (Machine.from_json(machine.to_json()), pickle.loads(pickle.dumps(machine))):
        assert again == machine
        assert hash(again) == hash(machine)
    assert replace(machine, kernel_seconds=1.0) != machine
    with pytest.raises(TypeError):
        machine.rates["float32"] = ()  # type: ignore[index]


GOOD = CPU.to_json()
LINK = GOOD["links"][0]
WAY = {"name": "tree", "start_seconds": 1.0, "latencies": [1.0]}


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ([], "machine"),
        (GOOD | {"colour": 1}, "colour"),
        (without(GOOD, "rates"), "rates"),
        (without(GOOD, "kernel_seconds"), "kernel_seconds"),
        (GOOD | {"name": ""}, "name"),
        (GOOD | {"name": 3}, "name"),
        (GOOD | {"device": "tpu"}, "device"),
        (GOOD | {"memory_bytes": 1.5}, "memory_bytes"),
        (GOOD | {"memory_bytes": True}, "memory_bytes"),
        (GOOD | {"memory_bytes": 0}, "memory_bytes"),
        (GOOD | {"memory_bandwidth": -1.0}, "memory_bandwidth"),
        (GOOD | {"memory_bandwidth": "fast"}, "memory_bandwidth"),
        (GOOD | {"memory_bandwidth": None}, "memory_bandwidth"),
        (GOOD | {"memory_bandwidth": True}, "memory_bandwidth"),
        (GOOD | {"kernel_seconds": math.nan}, "kernel_seconds"),
        (GOOD | {"kernel_seconds": math.inf}, "kernel_seconds"),
        (GOOD | {"kernel_seconds": False}, "kernel_seconds"),
        (GOOD | {"memory_fraction": 1.1}, "memory_fraction"),
        (GOOD | {"memory_fraction": 0}, "memory_fraction"),
        (GOOD | {"attention_fraction": 1.5}, "attention_fraction"),
        (GOOD | {"attention_rates": {"bfloat17": [[1, 1]]}}, "attention_rates.bfloat17"),
        (GOOD | {"attention_rates": {"bfloat16": []}}, "attention_rates.bfloat16"),
        (GOOD | {"function_seconds": -1}, "function_seconds"),
        (GOOD | {"host_seconds": {"python": 1}}, "host_seconds.python"),
        (GOOD | {"host_seconds": {"graph": -1}}, "host_seconds.graph"),
        (GOOD | {"rate_fractions": [[1, 2]]}, "rate_fractions[0][1]"),
        (GOOD | {"bandwidths": [[2, 1], [1, 1]]}, "bandwidths[1]"),
        (GOOD | {"bandwidths": [[1, 1], [1, 1]]}, "bandwidths[1]"),
        (GOOD | {"bandwidths": [[1]]}, "bandwidths[0]"),
        (GOOD | {"bandwidths": 7}, "bandwidths"),
        (GOOD | {"start_seconds": -1}, "start_seconds"),
        (GOOD | {"cores": -1}, "cores"),
        (GOOD | {"product_starts": {"bfloat17": 1}}, "product_starts.bfloat17"),
        (GOOD | {"product_starts": {"bfloat16": 0}}, "product_starts.bfloat16"),
        (GOOD | {"links": [LINK | {"bandwidths": [[2, 1], [1, 1]]}]}, "links[0].bandwidths[1]"),
        (GOOD | {"cores": False}, "cores"),
        (GOOD | {"rates": {}}, "rates"),
        (GOOD | {"rates": {"bfloat17": [[1, 1]]}}, "rates.bfloat17"),
        (GOOD | {"rates": {"bfloat16": []}}, "rates.bfloat16"),
        (GOOD | {"rates": {"bfloat16": [[1, 0]]}}, "rates.bfloat16[0][1]"),
        (GOOD | {"links": []}, "links"),
        (GOOD | {"links": {}}, "links"),
        (GOOD | {"links": [LINK | {"within": 8}]}, "links"),
        (GOOD | {"links": [LINK | {"within": 0}]}, "links[0].within"),
        (GOOD | {"links": [LINK, LINK]}, "links[1].within"),
        (GOOD | {"links": [LINK | {"within": 8}, LINK | {"within": 12}, LINK]}, "links[1].within"),
        (GOOD | {"links": [LINK | {"bandwidth": 0}]}, "links[0].bandwidth"),
        (GOOD | {"links": [LINK | {"latency": -1}]}, "links[0].latency"),
        (GOOD | {"links": [LINK | {"fraction": 2}]}, "links[0].fraction"),
        (GOOD | {"links": [without(LINK, "latency")]}, "links[0].latency"),
        (GOOD | {"links": [LINK | {"width": 2}]}, "links[0].width"),
        (GOOD | {"protocols": {}}, "protocols"),
        (GOOD | {"protocols": [WAY | {"latencies": [1, 1]}]}, "protocols[0].latencies"),
        (GOOD | {"protocols": [WAY | {"latencies": [-1]}]}, "protocols[0].latencies[0]"),
        (GOOD | {"protocols": [WAY, WAY | {"fraction": 2}]}, "protocols[1].fraction"),
        (GOOD | {"protocols": [WAY | {"tree": 1}]}, "protocols[0].tree"),
        (GOOD | {"protocols": [without(WAY, "start_seconds")]}, "protocols[0].start_seconds"),
        (GOOD | {"protocols": [WAY | {"chain": True}]}, "protocols[0].chain"),
        (GOOD | {"collectives": {"broadcast": [1, 1]}}, "collectives.broadcast"),
        (GOOD | {"collectives": {"all_reduce": [1]}}, "collectives.all_reduce"),
        (GOOD | {"collectives": {"all_reduce": [1, -1]}}, "collectives.all_reduce[1]"),
        (GOOD | {"sources": {"rates": 1}}, "sources.rates"),
    ],
)
def test_what_is_wrong_in_a_description_is_named(record: object, field: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        Machine.from_json(record)
    assert caught.value.field == field
    assert caught.value.problem in str(caught.value) and caught.value.remedy in str(caught.value)


def test_fields_with_a_default_may_be_left_out() -> None:
    needed = ("name", "device", "memory_bytes", "memory_bandwidth", "kernel_seconds", "rates", "links")
    machine = Machine.from_json({name: GOOD[name] for name in needed})
    assert (machine.cores, machine.bandwidths, machine.start_seconds, machine.memory_fraction) == (0, (), 0, 1)
    assert dict(machine.collectives) == {}
    assert machine.protocols == ()


# -------------------------------------------------------------------------------------------------------- operations


def test_operations_of_nodes_are_those_of_the_flop_counter() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm((a @ b).relu()[None], b.T[None])

    graph = make_fx(function, tracing_mode="fake")(torch.ones(3, 4), torch.ones(4, 5)).graph
    found = {node.name: operations(node) for node in graph.nodes if operations(node)}
    assert found == {"mm": 2 * 3 * 4 * 5, "bmm": 2 * 3 * 5 * 4}
