"""The parts of rehearse/ that need no device: vector clocks, lists of symbols, budgets."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "rehearse"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of rehearse/."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def log(order: Any, *, event: bool, writes: bool = True, start: int = 64) -> list[Any]:
    """A collective fills 64 bytes on stream 1; a kernel of stream 0 touches some, behind an event of it or not."""
    gather = order.Op("nccl", 1, "gather", clock=(0, 1), touches=(order.Access(64, 64, writes),))
    clock = (1, 1) if event else (1,)
    return [gather, order.Op("triton", 0, "read", clock=clock, touches=(order.Access(start, 8, False),))]


def test_what_an_event_orders_is_no_race(module) -> None:
    order = module("order")
    assert not list(order.unordered(log(order, event=True)))
    ((first, second),) = order.unordered(log(order, event=False))
    assert (first.name, second.name) == ("gather", "read")


def test_only_a_write_to_the_same_bytes_is_a_race(module) -> None:
    order = module("order")
    assert not list(order.unordered(log(order, event=False, writes=False)))
    assert not list(order.unordered(log(order, event=False, start=128)))
    assert list(order.unordered(log(order, event=False, start=60))), "the last four bytes of eight"


def test_operations_of_a_stream_and_those_ahead_are_ordered(module) -> None:
    order = module("order")
    first, second = log(order, event=False)
    assert order.ordered(first, replace(second, stream=1, clock=(0, 2)))
    assert order.ordered(replace(first, clock=(1, 1)), second), "the collective is the later one"


def test_symbols_that_nobody_defines_are_made(module) -> None:
    library = module("library")
    listing = "                 U cudaMalloc@libcudart.so.13\n0000000000001000 T ncclSend\n\n"
    assert library.symbols_of(listing) == {"cudaMalloc", "ncclSend"}
    source = "API cudaError_t cudaMalloc(void** p, size_t n) {"
    wanted = {"cudaMalloc", "cudaFree", "cuMemMap", "cuFileRead", "printf", "cublasDsyrk"}
    made = library.missing(wanted, {"cudaMalloc", "cudaFree"}, source)
    assert made == ["cuMemMap", "cuTensorMapEncodeIm2col", "cudaFree"], "the driver's all, others where they are served"


def test_a_torch_without_cuda_is_told(module, monkeypatch, tmp_path: Path) -> None:
    library = module("library")
    monkeypatch.setattr(library.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setattr(library.shutil, "which", lambda tool: tool)
    with pytest.raises(SystemExit, match="torch is no CUDA build"):
        library.build()
    monkeypatch.setattr(library.shutil, "which", lambda tool: None)
    with pytest.raises(SystemExit, match=r"needs g\+\+, gcc, nm"):
        library.build()


LIMITS = {"peak": 0.02, "slack": 1.3}
BUDGET = {"kernels": 100, "copies": 10, "of_plan": 1.0, "ratio": 1.5}


def test_what_is_over_its_budget_is_said(module) -> None:
    cases = module("cases")
    fine = cases.Figures({"copy": 1}, (), 100, 10, {}, 64, 64, 100, 100, host_ms=19.0, planned_ms=20.0, theirs_ms=10.0)
    assert not cases.over(fine, BUDGET, LIMITS, waits=1)
    wrong = {
        "waits for the device": {"waits": {"copy": 1, "item": 1}},
        "unordered: a and b": {"unordered": ("unordered: a and b",)},
        "kernels, budget 100": {"kernels": 101}, "copies, budget 10": {"copies": 11}, "traffic says 64": {"sent": 63},
        "1.030 of what is planned": {"peak": 103}, "of plain training's": {"host_ms": 20.0},
    }  # fmt: skip
    for said, change in wrong.items():
        (problem,) = cases.over(replace(fine, **change), BUDGET, LIMITS, waits=1)
        assert said in problem
    full = replace(fine, peak=2**30, planned=2**30)
    assert not cases.beyond(full, 1.0)
    for change in ({"peak": 2**30 + 1}, {"planned": 1.03 * 2**30}, {"unordered": ("a race",)}, {"sent": 63}):
        assert len(cases.beyond(replace(full, **change), 1.0)) == 1


def test_every_case_has_a_budget(module) -> None:
    cases = module("cases")
    known = json.loads(cases.BUDGETS.read_text())
    assert set(known["cases"]) == {case.name for case in cases.CASES}
    assert {case.waits for case in cases.CASES} == {0, 1, 3}


def test_bytes_of_collectives_are_those_of_rings(module) -> None:
    order, cases = module("order"), module("cases")
    calls = {
        "ncclAllGather": 300, "ncclReduceScatter": 75, "ncclAllReduce": 150, "ncclSend": 100, "ncclSend to itself": 0,
    }  # fmt: skip
    for name, sent in calls.items():
        assert cases.sent_bytes([order.Op("nccl", 1, name, amount=100, ranks=4)]) == sent


@pytest.mark.full
def test_numbers_are_made_up_in_what_a_program_imports() -> None:
    code = (
        "import orthogonalizers, yardsticks; from compile_muon.engine.step_checks import StepChecks;"
        "assert orthogonalizers.worst_block(None, None) == 0.0;"
        "assert StepChecks.wait.__module__ == StepChecks.each.__module__ == 'scripted'"
    )
    path = os.pathsep.join([str(FOLDER / "programs"), str(FOLDER.parent / "benchmarks")])
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert not ran.returncode, ran.stderr


def test_all_ranks_say_what_this_one_says(module) -> None:
    class StepChecks:
        group = SimpleNamespace(size=lambda: 4)

        def __init__(self) -> None:
            self._read = {"gradient": {"norm": None}, "ready": {"a": None}, "held": {"b": None}}

        def add_facts(self, what: str, found: Any) -> None: ...
        def wait(self) -> None: ...
        def found_inf(self) -> torch.Tensor:
            return torch.full((), 0.5)

    module("scripted").script(StepChecks)
    checks: Any = StepChecks()
    checks.add_facts("ready", {"a": 2.0})
    checks.wait()
    assert checks._read == {"gradient": {"norm": 0.25}, "ready": {"a": 8.0}, "held": {"b": 0.0}}
    assert checks.each("digest") == [(0.0,)] * 4
    assert checks.found_inf() == 0
