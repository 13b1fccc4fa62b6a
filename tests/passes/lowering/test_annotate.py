"""Ranges stay where they were put, in eager and generated code; NVTX and torch.profiler see the same ones."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from compile_muon import ConfigError, MuonZero
from compile_muon.config import CompileConfig, FrameOptions
from compile_muon.passes import ranges
from compile_muon.passes.ranges import COLORS, DOMAIN, ranged

HERE = Path(__file__).parent


def recorded(body):
    """What torch.profiler sees of `body()`, in order."""
    with profile() as found:
        body()
    return sorted(found.events(), key=lambda event: (event.time_range.start, -event.time_range.end))


def lies_in(inner, outer):
    return outer.time_range.start <= inner.time_range.start and inner.time_range.end <= outer.time_range.end


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_ranges_surround_newton_schulz(codegen):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = MuonZero(model, update="step")
    optimizer.engine.ledger.runs(FrameOptions(codegen=codegen, nvtx=True))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()  # compiles
    model(torch.ones(2, 6)).sum().backward()
    events = recorded(optimizer.step)
    (newton_schulz,) = [event for event in events if event.name == "muon_zero::newton_schulz"]
    (found,) = [event for event in events if event.name == "muon_zero step0.step newton_schulz 0"]
    assert lies_in(newton_schulz, found)
    assert not [event for event in events if "_record_function" in event.name]  # it would lie across the range


# --- what tools see ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """One range of a log; `parents` are the names of those around it, outermost first."""

    domain: str
    category: str
    payload: int
    name: str
    parents: tuple[str, ...]


class Seen:
    """What one rank of ranges_program.py left: ranges by case from NVTX, and what torch.profiler saw."""

    def __init__(self, log, result):
        self.results = json.loads(result.read_text())
        self.ranges, case, open_ranges = {}, None, []
        for line in log.read_text().splitlines():
            kind, domain, category, payload, name = line.split("\t")
            if kind == "mark":
                assert not open_ranges, f"open at the end of {case!r}: {open_ranges}"
                case = name
                assert case not in self.ranges or not case
                self.ranges.setdefault(case, [])
            elif kind == "push":
                found = Range(domain, category, int(payload), name, tuple(outer.name for outer in open_ranges))
                open_ranges.append(found)
                if case:
                    self.ranges[case].append(found)
            else:
                assert open_ranges.pop().domain == domain
        assert not open_ranges

    def annotations(self, case):
        """(name, start, end) of ranges and of ops, each in order."""
        events = sorted(self.results[case]["events"], key=lambda event: (event[1], -event[2]))
        ours = [event for event in events if event[0].startswith(f"{DOMAIN} ")]
        return ours, [event for event in events if event not in ours]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """`seen[world][rank]` of real processes with a tool attached."""
    if find_spec("nvtx") is None:
        pytest.skip("the package nvtx is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the tool that NVTX loads")
    folder = tmp_path_factory.mktemp("nvtx")
    library = folder / "nvtx_log.so"
    build = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(HERE / "nvtx_log.c")]
    subprocess.run(build, check=True)
    running = {}
    for world, rank in ((1, 0), (2, 0), (2, 1)):
        paths = folder / f"store{world}", folder / f"{world}_{rank}.json"
        environment = os.environ | {
            "NVTX_INJECTION64_PATH": str(library),
            "NVTX_LOG": str(folder / f"{world}_{rank}.log"),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        command = [sys.executable, str(HERE / "ranges_program.py"), str(rank), str(world), *map(str, paths)]
        output = (folder / f"{world}_{rank}.txt").open("w")
        running[world, rank] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        for (world, rank), process in running.items():
            code = process.wait(timeout=600)
            assert code == 0, (folder / f"{world}_{rank}.txt").read_text()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return {
        world: [Seen(folder / f"{world}_{rank}.log", folder / f"{world}_{rank}.json") for rank in range(world)]
        for world in (1, 2)
    }


CASES = [(1, "eager"), (1, "inductor"), (2, "eager"), (2, "inductor"), (2, "refresh")]


def kind(name):
    """The category that a name says; "" for frames and parts of a step."""
    return next((word for word in name.split() if word in COLORS), "")


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), CASES)
def test_ranges_of_a_step(seen, world, case):
    """Domain, category, what they are in, and a payload that the optimizer counts."""
    for rank in seen[world]:
        ranges = rank.ranges[case]
        assert {found.domain for found in ranges} == {"muon_zero"}
        assert [found.category for found in ranges] == [kind(found.name) for found in ranges]
        assert sum(r.payload for r in ranges if r.name.endswith(" launch")) == rank.results[case]["sent"]
        assert sum(r.payload for r in ranges if r.category == "newton_schulz") == rank.results[case]["matrices"]
        assert (rank.results[case]["sent"] > 0) == (world > 1)
        assert [found.payload for found in ranges if found.name == "step"] == [2]
        forward = next(r.name for r in ranges if r.name.endswith(".forward"))
        for found in ranges:
            frame = re.match(r"frame\d+\.(forward|backward)", found.name)
            if frame is not None:
                outer = () if found.name == frame[0] else (frame[0],)
            elif re.match(r"refresh \d+ wait", found.name):
                outer = (forward,)
            elif found.name == "step":
                outer = ()
            else:
                outer = ("step", "step directions") if re.match(r"step\d+\.step ", found.name) else ("step",)
            assert found.parents == outer
        parts = [found.name for found in ranges if found.parents == ("step",)]
        assert parts[-1] == ("refresh 0 launch" if case == "refresh" else "step commit adamw")
        assert set(parts) >= {"step wait", "step commit muon", "step commit adamw"}
        # A refused step closes its ranges: the log says at every mark that none is open.
        names = [found.name for found in rank.ranges[f"{case} refused"]]
        assert names[-1] == "step wait" and "step" in names
    assert sum(rank.results[case]["matrices"] for rank in seen[world]) == 2


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), CASES)
def test_the_profiler_sees_the_same_and_what_a_range_names_happens_inside_it(seen, world, case):
    for rank in seen[world]:
        ours, ops = rank.annotations(case)
        assert [name for name, _, _ in ours] == [f"muon_zero {found.name}" for found in rank.ranges[case]]
        for name, start, end in ours:
            inside = [op.split("::")[-1] for op, first, last in ops if start <= first and last <= end]
            if name.endswith(" wait") and name != "muon_zero step wait" and " refresh " not in name:
                assert inside == ["wait_tensor"]
            elif " newton_schulz " in name:
                assert inside == ["newton_schulz"]


@pytest.mark.full
def test_ranges_that_an_error_left_open_are_closed_and_off_means_no_range(seen):
    for rank in (*seen[1], *seen[2]):
        assert [(found.name, found.category, found.payload, found.parents) for found in rank.ranges["left open"]] == [
            ("outer", "", 0, ()),
            ("inner", "reduce", 7, ("outer",)),
            ("after", "", 0, ()),
        ]
    for case in ("off", "off refused"):
        assert seen[1][0].ranges[case] == []
        assert not [name for name, _, _ in seen[1][0].annotations("off")[0]]


# --- the package nvtx -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_nvtx(monkeypatch):
    """As if the package were not installed."""
    monkeypatch.setitem(sys.modules, "nvtx", None)
    ranges._domain.cache_clear()
    yield
    ranges._domain.cache_clear()


def test_without_the_package_the_profiler_still_sees_ranges(no_nvtx, monkeypatch):
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert CompileConfig(nvtx=True).nvtx

    def body():
        with ranged("here"):
            torch.ones(1)

    assert "muon_zero here" in [event.name for event in recorded(body)]


def test_without_the_package_a_tool_that_listens_is_an_error(no_nvtx, monkeypatch):
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")
    assert not CompileConfig(nvtx=False).nvtx
    with pytest.raises(
        ConfigError, match=r"nvtx = True: .* is not installed; pip install '.\[profile\]' in compile_muon's checkout"
    ):
        CompileConfig(nvtx=True)
