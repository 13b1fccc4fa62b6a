"""What this environment has, and what it lacks to train: `python -m compile_muon doctor [--config FILE --world N]`."""

from __future__ import annotations

import importlib
import importlib.metadata
import operator
import os
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Check", "Verdict", "diagnose", "run"]

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
#: of the latest release; README, the policy and the limits say the same, by a test
NEWEST_TESTED_TORCH = (2, 15)
BACKEND = "muon_zero"
_BOUNDS = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt}


class Verdict(Enum):
    """How a finding bears on training; only `FAIL` makes the command exit with 1."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One row of the report: `found` is what is there, `remedy` what to do about a note or a failure."""

    name: str
    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Python at least 3.10."""
    found = f"{dotted(version)} on {platform.system()} {platform.machine()}"
    if version < OLDEST_PYTHON:
        return Check("python", found, Verdict.FAIL, f"use Python {dotted(OLDEST_PYTHON)} or newer")
    return Check("python", found)


def check_torch(version: str = torch.__version__) -> Check:
    """torch from `OLDEST_TORCH` on; a newer minor version than the newest tested one is a note, not a failure."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return Check("torch", version, Verdict.FAIL, f"install torch {dotted(OLDEST_TORCH)} or newer")
    if numbers > NEWEST_TESTED_TORCH:
        tested = f"{dotted(OLDEST_TORCH)} to {dotted(NEWEST_TESTED_TORCH)}"
        return Check("torch", version, Verdict.NOTE, f"tested with {tested}; run the test suite on this one")
    if numbers < (2, 13):
        unseen = "torch._foreach_* on parameters themselves counts as no edit before 2.13: use their .data"
        return Check("torch", version, Verdict.NOTE, unseen)
    return Check("torch", version)


def asked_of(name: str) -> str:
    """What our installation asks of the versions of a package, as in `>=0.8,<1`; empty where it says nothing."""
    try:
        lines = importlib.metadata.requires("compile_muon") or ()
    except importlib.metadata.PackageNotFoundError:
        lines = ()
    for line in lines:
        wanted, _, marker = line.partition(";")
        if "extra" not in marker and (match := re.fullmatch(rf"{re.escape(name)}\s*\(?([^\[\]()]*)\)?\s*", wanted)):
            return match[1].replace(" ", "")
    return ""


def fits(version: str, asked: str) -> bool:
    """Whether a version is within bounds such as `>=0.8,<1`."""
    bounds = re.findall(r"(>=|<=|<|>)([\d.]+)", asked)
    return all(_BOUNDS[bound](_release(version), _release(limit)) for bound, limit in bounds)


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:  # 1.0 is 1
        numbers.pop()
    return tuple(numbers)


def check_package(name: str) -> Check:
    """A package that is required: imports, and its installed version is one that we ask for."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        return Check(name, f"does not import: {error}", Verdict.FAIL, f"pip install {name}")
    for found in importlib.metadata.distributions(name=name):
        # A build leaves metadata in the root of its checkout, too. Who starts there finds it, and nobody elsewhere.
        of_a_build = found.read_text("SOURCES.txt") is not None
        if not (of_a_build and Path(str(found.locate_file("pyproject.toml"))).exists()):
            return _within(name, found.version)
    return Check(name, "imported from a folder, not installed", Verdict.FAIL, "pip install -e .")


def _within(name: str, version: str) -> Check:
    if fits(version, asked := asked_of(name)):
        return Check(name, version)
    return Check(name, version, Verdict.FAIL, f"pip install '{name}{asked}'")


def check_triton() -> Check:
    """Triton: Inductor generates GPU code with it; a machine without a GPU does without."""
    try:
        return _within("triton", importlib.import_module("triton").__version__)
    except ImportError:
        if torch.cuda.is_available():
            return Check("triton", "missing", Verdict.FAIL, "pip install triton: Inductor needs it for GPU code")
        return Check("triton", "missing; not needed without a GPU")


def check_devices() -> Check:
    """Accelerators, else the processor."""
    if torch.cuda.is_available():
        gpus = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        return Check("devices", "\n".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus))
    return Check("devices", f"cpu, cores: {os.cpu_count()}, threads: {torch.get_num_threads()}")


def check_distributed() -> Check:
    """Process group backends: Gloo for CPUs, NCCL for GPUs. Without any, one process still trains."""
    dist = torch.distributed
    if not dist.is_available():
        return Check(
            "distributed", "not built into this torch", Verdict.NOTE, "one process only; install another build"
        )
    present = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    if torch.cuda.is_available() and "nccl" not in present:
        return Check("distributed", ", ".join(present), Verdict.NOTE, "no NCCL: GPUs would communicate through Gloo")
    return Check("distributed", ", ".join(present))


def check_compiler() -> Check:
    """A C++ compiler and Python's headers: Inductor builds its CPU code with them."""
    verdict = Verdict.NOTE if torch.cuda.is_available() else Verdict.FAIL
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        compiler = get_cpp_compiler()
    except Exception as error:  # Inductor raises its own types, which differ between versions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Check("C++ compiler", reason, verdict, "install g++ (or clang++) or name one in CXX")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return Check("C++ compiler", f"{compiler}, but no {header}", verdict, "install Python's development headers")
    return Check("C++ compiler", str(compiler))


def check_entry_point(name: str = BACKEND) -> Check:
    """`torch.compile(backend=...)` finds and imports our backend by name, without `import compile_muon`."""
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        remedy = "pip install compile_muon (in a checkout: pip install -e .)"
        return Check("entry point", f"torch.compile does not know {name!r}", Verdict.FAIL, remedy)
    try:
        backend = torch._dynamo.lookup_backend(name)
    except Exception as error:  # whatever the import of the backend raises
        found = f"{name} fails to import: {type(error).__name__}: {error}"
        return Check("entry point", found, Verdict.FAIL, "reinstall compile_muon together with this torch")
    module = getattr(backend, "__module__", type(backend).__module__)
    return Check("entry point", f"{name} → {module}")


def check_config(path: Path, world: int) -> Check:
    """A config can be read, and its axes make up so many ranks."""
    from compile_muon.config import load_config
    from compile_muon.errors import MuonZeroError
    from compile_muon.mesh import axis_sizes

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = load_config(path)
        axes = axis_sizes(config, world)
    except MuonZeroError as error:
        return Check("config", str(path), Verdict.FAIL, str(error))
    found = f"stage {config.zero.stage} on {world} ranks: " if world > 1 else f"stage {config.zero.stage}, one rank"
    found += " x ".join(f"{name} {size}" for name, size in axes.items())
    notes = "; ".join(str(warning.message) for warning in caught)
    return Check("config", found, Verdict.NOTE if notes else Verdict.OK, notes)


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_torch,
    check_triton,
    *(partial(check_package, name) for name in ("sympy", "rich", "safetensors", "numpy", "compile_muon")),
    check_devices,
    check_distributed,
    check_compiler,
    check_entry_point,
)


def diagnose(checks: tuple[Callable[[], Check], ...] = CHECKS) -> list[Check]:
    """Run every check; none changes anything."""
    return [check() for check in checks]


def report(findings: list[Check]) -> Table:
    """The findings as a table, remedies in the last column where there are any."""
    colors = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAIL: "bold red"}
    table = Table("", "found", "", title="compile_muon doctor")
    for finding in findings:
        verdict = Text(finding.verdict.value, style=colors[finding.verdict])
        found = Text("\n".join(filter(None, (finding.found, finding.remedy and f"→ {finding.remedy}"))))
        table.add_row(finding.name, found, verdict)
    return table


def run(console: Console | None = None, config: Path | None = None, world: int = 1) -> int:
    """Print the report; 0 when this environment can train, 1 when something is missing.

    Args:
        config: of a training on ``world`` ranks, to look at as well.
    """
    findings = diagnose() + ([check_config(config, world)] if config is not None else [])
    console = console or Console()
    console.print(report(findings))
    failures = [finding.name for finding in findings if finding.verdict is Verdict.FAIL]
    console.print(f"Not ready: {', '.join(failures)}." if failures else "Ready to train.", highlight=False)
    return 1 if failures else 0


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
