"""Machines by name and from files, and the measurement of this one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from compile_muon import __main__ as cli
from compile_muon import config
from compile_muon.config.machine import costs_for, known_machines, load_costs, read_machine
from compile_muon.errors import ConfigError
from compile_muon.passes.costs import COLLECTIVES, Link
from compile_muon.planning.machines.calibrate import write_machine
from compile_muon.planning.machines.fit import Measured, Sample, completed, fit
from compile_muon.simulate.machine import Machine, load_machine

H100 = load_machine("h100")


@pytest.mark.parametrize("name", ["b200", "cpu", "h100", "h200"])
def test_each_says_its_name_and_sources_and_is_read_as_it_is_written(tmp_path: Path, name: str) -> None:
    """Every figure of a GPU has a source."""
    machine = load_machine(name)
    assert name in known_machines() and machine.name == name
    assert (machine.device == "cpu") == (name == "cpu")
    assert {"float32", "bfloat16"} <= machine.rates.keys()
    given = json.loads((Path(config.__file__).parent / "machines" / f"{name}.json").read_text())
    figures = given.keys() - {"name", "device", "links", "sources"}
    figures |= {f"links[{place}].{key}" for place in range(2) for key in ("bandwidth", "fraction", "latency")}
    assert machine.sources and (name == "cpu" or machine.sources.keys() == figures)
    write_machine(machine, tmp_path / "folder" / "again.json")
    assert load_machine(tmp_path / "folder" / "again.json") == machine


def test_machines_by_type_of_device_where_none_is_named() -> None:
    assert costs_for(None, "cuda") == load_costs("h100")
    assert costs_for(None, "cpu") == load_costs("cpu")
    assert costs_for("b200", "cpu") == load_costs("b200")


@pytest.mark.parametrize("name", ["h1000", "no/such/file", "missing.json"])
def test_an_unknown_name_tells_the_known_ones_and_how_to_measure(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_machine(name)
    assert caught.value.field == "machine"
    for word in (name, *known_machines(), "python -m compile_muon calibrate"):
        assert word in str(caught.value)


@pytest.mark.parametrize("given", [b"", b"{", b"\xff\xfe\x00", None])
def test_what_is_no_json_is_an_error(tmp_path: Path, given: bytes | None) -> None:
    path = tmp_path if given is None else tmp_path / "bad.json"
    if given is not None:
        path.write_bytes(given)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_machine(path)


TRUTH = Machine(
    name="truth",
    device="cpu",
    memory_bytes=10**10,
    memory_bandwidth=2e10,
    kernel_seconds=1e-6,
    rates={"float32": ((16.0, 5e10), (128.0, 1e11)), "bfloat16": ((16.0, 2e11), (128.0, 4e11))},
    links=(Link(None, 1e9, 8e-5),),
    product_starts={"bfloat16": 1e-5},
    attention_rates={"float32": ((64.0, 2e10), (256.0, 4e10))},
    function_seconds=1e-9,
    host_seconds={"graph": 3e-4, "parameter": 4e-5, "collective": 5e-4, "byte": 1e-9},
    bandwidths=((1e6, 1e11), (1e7, 2e10)),
    start_seconds=3e-5,
    late_seconds=1.5e-3,
    collectives={"reduce_scatter": (1.5, 1.25), "all_reduce": (3.0, 0.5)},
    cores=2,
)


def of_the_truth() -> list[Sample]:
    """What would be measured of a machine that is as its description says."""
    samples = [
        Sample(
            "products", 1, 2.0 * batch * m * size**3, {"m": m * size, "n": size, "k": size, "batch": batch, "dtype": t}
        )
        for t in TRUTH.rates
        for size in (16, 32, 64, 128, 256)
        for m, batch in ((1, 1), (4, 1), (1, 4))
    ]
    samples += [Sample("kernels", 1, 10**power) for power in (4, 5, 6, 7, 8)]
    samples += [
        Sample("collectives", 1, 4.0**power, {"kind": kind, "ranks": ranks})
        for kind in ("all_to_all", "reduce_scatter", "all_reduce")
        for power in range(6, 13)
        for ranks in (2, 4)
    ]
    samples += [Sample("copies", 1, 4.0**power) for power in range(10, 13)]
    samples += [
        Sample("attention", 1, 56.0 * sequence**2 * width, {"sequence": sequence, "width": width, "dtype": "float32"})
        for sequence in (64, 256)
        for width in (32, 64)
    ]
    samples += [Sample("functions", 1, 3 * entries, {"entries": entries}) for entries in (2**10, 2**20)]
    samples += [Sample("late ranks", 1, 0, {"ranks": ranks}) for ranks in (2, 4)]
    samples += [
        Sample("steps", 1, 2 * layers, {"ranks": ranks, "collectives": (ranks > 1) * 6 * layers})
        for layers in (2, 8)
        for ranks in (1, 2)
    ]
    return [replace(sample, seconds=sample.predicted(TRUTH)) for sample in samples]


def test_the_fit_finds_what_made_the_samples() -> None:
    samples = of_the_truth()
    found = fit(Measured("cpu", 1e-6, 2, 4, 10**10, tuple(samples)), "found")
    assert max(abs(sample.error(found)) for sample in samples if sample.group == "collectives") < 0.01
    assert max(abs(sample.error(found)) for sample in samples if sample.group == "kernels") < 0.15
    assert max(abs(sample.error(found)) for sample in samples if sample.group == "products") < 0.35
    assert found.links[0].latency == pytest.approx(8e-5, rel=0.01)
    assert found.links[0].bandwidth == pytest.approx(1e9, rel=0.01)
    assert found.start_seconds == pytest.approx(3e-5, rel=0.05)
    assert found.late_seconds == pytest.approx(1.5e-3)
    assert found.collectives["all_reduce"] == pytest.approx((3.0, 0.5), rel=0.01)
    assert found.memory_bandwidth == pytest.approx(2e10)
    assert found.host_seconds == pytest.approx(TRUTH.host_seconds, rel=0.01)
    assert dict(found.attention_rates["float32"]) == pytest.approx(dict(TRUTH.attention_rates["float32"]), rel=0.01)
    assert found.function_seconds == pytest.approx(1e-9, rel=0.15)
    assert (found.name, found.device, found.cores) == ("found", "cpu", 2)


def test_a_disk_serves_both_ways_together_and_a_link_each() -> None:
    given = [
        Sample("offload", 3.0, (1 + (way == "disk_bandwidth")) * 6e8, {"way": way, "ranks": 2})
        for way in ("host_bandwidth", "disk_bandwidth", "host_memory_bandwidth")
    ]
    found = fit(Measured("cpu", 1e-6, 2, 4, 10**10, (*of_the_truth(), *given)), "found")
    assert found.host_bandwidth == found.host_memory_bandwidth == 2e8
    assert found.shared_by(2).disk_bandwidth == 4e8
    assert [sample.predicted(found) for sample in given] == [3.0, 3.0, 3.0]


def test_products_that_are_all_large_start_as_the_least_kernel_does() -> None:
    """Nothing is to be seen of their start; a file with 0 would be refused."""
    large = [s for s in of_the_truth() if s.group != "products" or s.of["k"] >= 256]
    found = fit(Measured("cpu", 1e-6, 2, 4, 10**10, tuple(large)), "large")
    assert set(found.product_starts.values()) == {1e-6}
    assert read_machine(Machine, found.to_json()) == found


def test_what_was_not_measured_of_a_gpu_is_as_the_base_has_it() -> None:
    """One GPU has met nobody, and its host was not timed; several of a node know the link inside it."""
    samples = [s for s in of_the_truth() if s.group not in ("steps", "late ranks", "copies")]
    alone = [s for s in samples if s.group != "collectives"]
    found = completed(fit(Measured("cuda", 2e-6, 0, 1, 10**10, tuple(alone)), "one"), H100)
    assert (found.links, found.protocols, found.collectives) == (H100.links, H100.protocols, H100.collectives)
    assert found.host_seconds == H100.host_seconds and found.fill_entries == H100.fill_entries
    assert found.tiles == H100.tiles and found.kernel_seconds == 2e-6
    assert found.rates.keys() == TRUTH.rates.keys()
    assert read_machine(Machine, found.to_json()) == found
    several = completed(fit(Measured("cuda", 2e-6, 0, 8, 10**10, tuple(samples)), "node"), H100)
    assert [link.within for link in several.links] == [8, None]
    assert several.links[0].bandwidth == pytest.approx(1e9, rel=0.2) and several.links[1] == H100.links[1]
    assert not several.protocols and several.collectives["all_reduce"] != H100.collectives["all_reduce"]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_calibrate_writes_a_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: int) -> None:
    out = tmp_path / "here.json"
    assert cli.main(["calibrate", "--out", str(out), "--ranks", str(ranks), "--quick", "--disk", str(tmp_path)]) == 0
    machine = load_machine(out)
    assert machine.disk_bandwidth > 0 and machine.host_bandwidth == 0
    assert (machine.name, machine.device) == ("here", "cpu")
    assert machine.rates.keys() == {"float32", "bfloat16"}
    printed = capfd.readouterr().out
    assert all(f"{count} {group} " in printed for count, group in ((20, "products"), (2, "kernels"), (1, "offload")))
    assert ("collectives: " in printed) == (ranks > 1)
    if ranks > 1:
        assert all(machine.collective_seconds(kind, 1e6, range(2)) > 1e-6 for kind in COLLECTIVES)
