"""Ranges stay where they were put, in eager and generated code; NVTX and torch.profiler see the same ones."""

import re
import sys
from dataclasses import dataclass

import pytest
import torch
from torch.profiler import profile

from compile_muon import ConfigError, MuonZero, NonFiniteError
from compile_muon.config import CompileConfig, FrameOptions
from compile_muon.passes import ranges
from compile_muon.passes.ranges import COLORS, DOMAIN, ranged


def recorded(body):
    """What torch.profiler sees of `body()`, in order."""
    with profile() as found:
        body()
    return sorted(found.events(), key=lambda event: (event.time_range.start, -event.time_range.end))


COLLECTIVES = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}


@dataclass(frozen=True)
class Range:
    """One range; `parents` are the names of those around it, outermost first."""

    category: str
    payload: int
    name: str
    parents: tuple[str, ...]


class Domain:
    """Of NVTX, as the package `nvtx` has it: notes ranges, and hands them on where it is installed."""

    def __init__(self):
        self.real, self.found, self.open = ranges._domain(), [], []

    def get_event_attributes(self, name, color, category, payload):
        real = self.real and self.real.get_event_attributes(name, color, category, payload)
        assert COLORS[category or ""] == color
        return Range(category or "", payload, name, tuple(outer.name for outer, _ in self.open)), real

    def push_range(self, attributes):
        self.found.append(attributes[0])
        self.open.append(attributes)
        if self.real:
            self.real.push_range(attributes[1])

    def pop_range(self):
        self.open.pop()
        if self.real:
            self.real.pop_range()


@pytest.fixture
def domain(monkeypatch):
    found = Domain()
    monkeypatch.setattr(ranges, "_domain", lambda: found)
    yield found
    assert not found.open


def check(found):
    """Categories are those that names say, and frames and steps are around what belongs to them."""
    for each in found:
        assert each.category == next((word for word in each.name.split() if word in COLORS), "")
        frame = re.match(r"frame\d+\.(forward|backward)", each.name)
        if frame is not None:
            outer = () if each.name == frame[0] else (frame[0],)
        elif each.name == "step":
            outer = ()
        else:
            outer = ("step", "step directions") if re.match(r"step\d+\.step ", each.name) else ("step",)
        assert each.parents == outer


def inside(events, name):
    """Operators in the one range of this name."""
    (own,) = (event.time_range for event in events if event.name == f"{DOMAIN} {name}")
    return [
        event.name.split("::")[-1]
        for event in events
        if "::" in event.name and own.start <= event.time_range.start and event.time_range.end <= own.end
    ]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_ranges_of_a_step(codegen, domain):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = MuonZero(model, update="step")
    optimizer.engine.ledger.options = FrameOptions(codegen=codegen, nvtx=True)

    def step(scale=1.0):
        (model(torch.ones(2, 6)).sum() * scale).backward()
        optimizer.step()

    step()
    domain.found.clear()
    events = recorded(step)
    found = domain.found[:]
    check(found)
    assert [event.name for event in events if event.name.startswith(f"{DOMAIN} ")] == [
        f"{DOMAIN} {r.name}" for r in found
    ]
    assert not [event for event in events if "_record_function" in event.name]  # it would lie across the range
    (newton_schulz,) = [each for each in found if each.category == "newton_schulz"]
    assert newton_schulz.payload == 2 and "newton_schulz" in inside(events, newton_schulz.name)
    parts = [each.name for each in found if each.parents == ("step",)]
    assert parts[-1] == "step commit adamw" and set(parts) >= {"step wait", "step commit muon"}
    domain.found.clear()
    with pytest.raises(NonFiniteError):
        step(float("nan"))
    assert [each.name for each in domain.found][-1] == "step wait" and not domain.open, "a refused step closes its own"


def test_collectives_are_launched_and_waited_for_inside_ranges_that_say_their_bytes(world, domain):
    with world(0, 2):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
        optimizer = MuonZero(model, stage=3, ns_dtype="float32")
        options = {"codegen": "eager", "nvtx": True, "bucket_mb": 2**-12}  # a bucket for each matrix
        run = torch.compile(model, backend="muon_zero", options=options)
        run(torch.ones(2, 8)).sum().backward()
        before = optimizer.traffic
        domain.found.clear()
        events = recorded(lambda: run(torch.ones(2, 8)).sum().backward())
        sent = optimizer.traffic.bytes_sent - before.bytes_sent
    found = domain.found
    check(found)
    launches = [each for each in found if each.name.endswith(" launch")]
    assert sum(each.payload for each in launches) == sent > 0
    assert {each.category for each in launches} == {"gather", "reduce", "exchange"}
    names = [each.name for each in found]
    for launch in launches:
        wait = launch.name.replace(" launch", " wait")
        assert names.index(launch.name) < names.index(wait) and inside(events, wait) == ["wait_tensor"]
        assert len(set(inside(events, launch.name)) & COLLECTIVES) == 1


def test_ranges_that_an_error_left_open_are_closed_and_off_means_no_range(domain):
    with pytest.raises(RuntimeError, match="on purpose"), ranged("outer"):
        ranges.RANGE_PUSH([torch.empty(0)], "inner", "reduce", 7)
        raise RuntimeError("on purpose")
    with ranged("after"):
        pass
    assert domain.found == [
        Range("", 0, "outer", ()),
        Range("reduce", 7, "inner", ("outer",)),
        Range("", 0, "after", ()),
    ]
    domain.found.clear()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = MuonZero(model, update="step")
    torch.compile(model, backend="muon_zero", options={"codegen": "eager"})(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert domain.found == []


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
        ConfigError, match=r"nvtx = True: .* is not installed; pip install '.\[profile\]' in the checkout"
    ):
        CompileConfig(nvtx=True)
