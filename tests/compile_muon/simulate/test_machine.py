"""What the planner knows of a machine beside its costs, and what its file says."""

import json
import math
import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_muon.config.machine import READERS, load_costs, read_machine
from compile_muon.errors import ConfigError
from compile_muon.passes.costs import Costs, Link, Protocol
from compile_muon.simulate.cost import operations
from compile_muon.simulate.machine import Machine

#: two nodes' worth of eight ranks and more: 100 GB/s inside, 10 GB/s between
NODES = Machine(
    name="nodes", device="cuda", memory_bytes=10**10, memory_bandwidth=1e12, kernel_seconds=1e-6,
    rates={"bfloat16": ((64.0, 1e12), (1024.0, 16e12), (4096.0, 32e12)), "float32": ((64.0, 1e12),)},
    links=(Link(8, 1e11, 1e-6), Link(None, 1e10, 1e-5)), start_seconds=5e-6, collectives={"all_reduce": (2.0, 1.0)},
    product_starts={"float32": 2e-6},
)  # fmt: skip
#: two cores
CPU = replace(NODES, name="cores", device="cpu", links=(Link(None, 1e9, 1e-5),), cores=2, bandwidths=((1e6, 4e12),))


def without(record: dict, name: str) -> dict:
    return {key: value for key, value in record.items() if key != name}


def test_attention_that_was_measured_goes_by_its_sequence() -> None:
    known = replace(NODES, attention_fraction=0.25, attention_rates={"float32": ((64.0, 1e12), (256.0, 4e12))})
    assert [known.attention_rate(64, at, "float32") for at in (1, 64, 256, 4096)] == [1e12, 1e12, 4e12, 4e12]
    assert known.attention_rate(64, 128, "float32") == pytest.approx(2e12)
    assert known.attention_rate(64, 128, "float32", causal=False) == pytest.approx(1e12)
    assert known.attention_rate(64, 128, "bfloat16", causal=False) == 8e12
    assert read_machine(Machine, known.to_json()) == known


def test_who_copies_bytes_may_have_a_core_of_his_own() -> None:
    host = {"graph": 1.0, "parameter": 2.0, "collective": 3.0, "byte": 4.0}
    cores = replace(CPU, host_seconds=host, cores=4, function_seconds=1.0, late_seconds=0.5)
    assert cores.shared_by(2).host_seconds == without(host, "byte")
    assert cores.shared_by(4).host_seconds == host
    assert cores.shared_by(8).host_seconds == {kind: 2 * seconds for kind, seconds in host.items()}
    assert cores.shared_by(8).function_seconds == 2.0
    assert [cores.shared_by(ranks).late_seconds for ranks in (2, 4, 8)] == [0.5, 0.5, 1.0]
    assert read_machine(Machine, cores.to_json()) == cores


LL = Protocol("ring, LL", 1e-6, (1e-7, 1e-6), fraction=0.1)
TREE = Protocol("tree", 2e-6, (1e-7, 2e-6), fraction=0.5, tree=True)
WAYS = replace(NODES, protocols=(LL, TREE))


@pytest.mark.parametrize("machine", [NODES, CPU, WAYS])
def test_json_pickle_and_hash_keep_a_machine(machine: Machine) -> None:
    for again in (read_machine(Machine, machine.to_json()), pickle.loads(pickle.dumps(machine))):
        assert again == machine
        assert hash(again) == hash(machine)
    assert replace(machine, kernel_seconds=1.0) != machine


GOOD = CPU.to_json()
LINK = GOOD["links"][0]
WAY = {"name": "tree", "start_seconds": 1.0, "latencies": [1.0]}


#: what no number of a description is, by what it must be
NUMBERS = {
    "memory_bytes": (1.5, True, 0), "cores": (-1, False), "memory_fraction": (1.1, 0), "attention_fraction": (1.5,),
    **{name: (-1.0, "fast", None, True, math.nan, math.inf) for name in ("memory_bandwidth", "kernel_seconds")},
    **{name: (-1,) for name in ("function_seconds", "start_seconds")},
}  # fmt: skip
#: what is wrong in a field, and where in it
PARTS = {
    "name": [("", ""), (3, "")],
    "device": [("tpu", "")],
    "bandwidths": [([[2, 1], [1, 1]], "[1]"), ([[1, 1], [1, 1]], "[1]"), ([[1]], "[0]"), (7, "")],
    "rate_fractions": [([[1, 2]], "[0][1]")],
    "rates": [({}, ""), ({"bfloat17": [[1, 1]]}, ".bfloat17"), ({"bfloat16": []}, ".bfloat16"),
              ({"bfloat16": [[1, 0]]}, ".bfloat16[0][1]")],
    "attention_rates": [({"bfloat17": [[1, 1]]}, ".bfloat17"), ({"bfloat16": []}, ".bfloat16")],
    "host_seconds": [({"python": 1}, ".python"), ({"graph": -1}, ".graph")],
    "product_starts": [({"bfloat17": 1}, ".bfloat17"), ({"bfloat16": 0}, ".bfloat16")],
    "links": [
        ([], ""), ({}, ""), ([LINK | {"within": 8}], ""), ([LINK | {"within": 0}], "[0].within"),
        ([LINK, LINK], "[1].within"), ([LINK | {"within": 8}, LINK | {"within": 12}, LINK], "[1].within"),
        ([LINK | {"bandwidth": 0}], "[0].bandwidth"), ([LINK | {"latency": -1}], "[0].latency"),
        ([LINK | {"fraction": 2}], "[0].fraction"), ([without(LINK, "latency")], "[0].latency"),
        ([LINK | {"width": 2}], "[0].width"), ([LINK | {"bandwidths": [[2, 1], [1, 1]]}], "[0].bandwidths[1]"),
    ],
    "protocols": [
        ({}, ""), ([WAY | {"latencies": [1, 1]}], "[0].latencies"), ([WAY | {"latencies": [-1]}], "[0].latencies[0]"),
        ([WAY, WAY | {"fraction": 2}], "[1].fraction"), ([WAY | {"tree": 1}], "[0].tree"),
        ([without(WAY, "start_seconds")], "[0].start_seconds"), ([WAY | {"chain": True}], "[0].chain"),
    ],
    "collectives": [({"broadcast": [1, 1]}, ".broadcast"), ({"all_reduce": [1]}, ".all_reduce"),
                    ({"all_reduce": [1, -1]}, ".all_reduce[1]")],
    "sources": [({"rates": 1}, ".rates")],
}  # fmt: skip
WRONG = [
    ([], ""), (GOOD | {"colour": 1}, "colour"), *((without(GOOD, name), name) for name in ("rates", "kernel_seconds")),
    *((GOOD | {name: value}, name) for name, values in NUMBERS.items() for value in values),
    *((GOOD | {name: value}, name + place) for name, values in PARTS.items() for value, place in values),
]  # fmt: skip


@pytest.mark.parametrize(("record", "field"), WRONG)
def test_what_is_wrong_in_a_description_is_named(record: object, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_machine(Machine, record)
    assert caught.value.field == (f"machine: {field}" if field else "machine")


def test_the_core_reads_its_part_and_names_what_nobody_reads(tmp_path: Path) -> None:
    """The planner's fields are no business of a training run, but a mistyped one is."""
    core = {field.name for field in fields(Costs)}
    planned = {field.name for field in fields(Machine)} - core
    assert READERS.keys() == planned | core
    file = tmp_path / "ours.json"
    file.write_text(json.dumps(GOOD | dict.fromkeys(planned, "whatever")))
    assert load_costs(file) == Costs(**{name: getattr(CPU, name) for name in core})
    file.write_text(json.dumps(GOOD | {"protocol": []}))
    with pytest.raises(ConfigError, match="ours.json: protocol = .*is not a field"):
        load_costs(file)


def test_operations_of_nodes_are_those_of_the_flop_counter() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm((a @ b).relu()[None], b.T[None])

    graph = make_fx(function, tracing_mode="fake")(torch.ones(3, 4), torch.ones(4, 5)).graph
    found = {node.name: operations(node) for node in graph.nodes if operations(node)}
    assert found == {"mm": 2 * 3 * 4 * 5, "bmm": 2 * 3 * 5 * 4}
