"""A report of what this environment has and lacks: `python -m compile_muon doctor [--config FILE --world N]`."""

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

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
#: minor version of the newest tested torch; a test compares README, the policy and the limits with it
NEWEST_TESTED_TORCH = (2, 15)
BACKEND = "muon_zero"
_BOUNDS = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt}


class Verdict(Enum):
    """A finding's bearing on training; only `FAIL` makes the command exit with 1."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One row of the report: `found` describes the environment, `remedy` the action for a note or a failure."""

    name: str
    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Check that Python is at least 3.10."""
    text = f"{dotted(version)} on {platform.system()} {platform.machine()}"
    if version < OLDEST_PYTHON:
        return Check("python", text, Verdict.FAIL, f"use Python {dotted(OLDEST_PYTHON)} or newer")
    return Check("python", text)


def check_torch(version: str = torch.__version__) -> Check:
    """Check that torch is at least `OLDEST_TORCH`; a minor version above the newest tested one is a note."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return Check("torch", version, Verdict.FAIL, f"install torch {dotted(OLDEST_TORCH)} or newer")
    if numbers > NEWEST_TESTED_TORCH:
        tested = f"{dotted(OLDEST_TORCH)} to {dotted(NEWEST_TESTED_TORCH)}"
        return Check("torch", version, Verdict.NOTE, f"tested with {tested}; run the test suite on this one")
    return Check("torch", version)


def asked_of(name: str) -> str:
    """Return the bounds that our installation sets on a package, such as `>=0.8,<1`; empty without any."""
    try:
        lines = importlib.metadata.requires("compile_muon") or ()
    except importlib.metadata.PackageNotFoundError:
        lines = ()
    for line in lines:
        spec, _, marker = line.partition(";")
        if "extra" not in marker and (match := re.fullmatch(rf"{re.escape(name)}\s*\(?([^\[\]()]*)\)?\s*", spec)):
            return match[1].replace(" ", "")
    return ""


def fits(version: str, asked: str) -> bool:
    """Return whether a version is within bounds such as `>=0.8,<1`."""
    bounds = re.findall(r"(>=|<=|<|>)([\d.]+)", asked)
    return all(_BOUNDS[bound](_release(version), _release(limit)) for bound, limit in bounds)


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:  # 1.0 is 1
        numbers.pop()
    return tuple(numbers)


def check_package(name: str) -> Check:
    """Check that a required package imports and is installed in a version within our bounds."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        return Check(name, f"does not import: {error}", Verdict.FAIL, f"pip install {name}")
    for distribution in importlib.metadata.distributions(name=name):
        # A build leaves metadata in its checkout's root, which only a Python started there finds: no installation.
        of_a_build = distribution.read_text("SOURCES.txt") is not None
        if not (of_a_build and Path(str(distribution.locate_file("pyproject.toml"))).exists()):
            return _within(name, distribution.version)
    return Check(name, "imported from a folder, not installed", Verdict.FAIL, "pip install -e .")


def _within(name: str, version: str) -> Check:
    if fits(version, bounds := asked_of(name)):
        return Check(name, version)
    return Check(name, version, Verdict.FAIL, f"pip install '{name}{bounds}'")


def check_triton() -> Check:
    """Check Triton, with which Inductor generates GPU code; a machine without a GPU needs none."""
    try:
        return _within("triton", importlib.import_module("triton").__version__)
    except ImportError:
        if torch.cuda.is_available():
            return Check("triton", "missing", Verdict.FAIL, "pip install triton: Inductor needs it for GPU code")
        return Check("triton", "missing; not needed without a GPU")


def check_devices() -> Check:
    """List the accelerators, or else the processor."""
    if torch.cuda.is_available():
        gpus = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        return Check("devices", "\n".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus))
    return Check("devices", f"cpu, cores: {os.cpu_count()}, threads: {torch.get_num_threads()}")


def check_distributed() -> Check:
    """Check process group backends: Gloo for CPUs, NCCL for GPUs. One process trains without any."""
    dist = torch.distributed
    if not dist.is_available():
        return Check(
            "distributed", "not built into this torch", Verdict.NOTE, "one process only; install another build"
        )
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    if torch.cuda.is_available() and "nccl" not in backends:
        return Check("distributed", ", ".join(backends), Verdict.NOTE, "no NCCL: GPUs would communicate through Gloo")
    return Check("distributed", ", ".join(backends))


def check_compiler() -> Check:
    """Check for a C++ compiler and Python's headers, with which Inductor builds CPU code."""
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
    """Check that `torch.compile(backend=...)` finds and imports the backend by name, without `import compile_muon`."""
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        remedy = "pip install compile_muon (in a checkout: pip install -e .)"
        return Check("entry point", f"torch.compile does not know {name!r}", Verdict.FAIL, remedy)
    try:
        backend = torch._dynamo.lookup_backend(name)
    except Exception as error:  # whatever the import of the backend raises
        text = f"{name} fails to import: {type(error).__name__}: {error}"
        return Check("entry point", text, Verdict.FAIL, "reinstall compile_muon together with this torch")
    module = getattr(backend, "__module__", type(backend).__module__)
    return Check("entry point", f"{name} → {module}")


def check_config(path: Path, world: int) -> Check:
    """Check that a config can be read, and that its axes make up ``world`` ranks."""
    from compile_muon.config import load_config
    from compile_muon.errors import MuonZeroError
    from compile_muon.mesh import axis_sizes

    try:
        with warnings.catch_warnings(record=True) as config_warnings:
            warnings.simplefilter("always")
            config = load_config(path)
        axes = axis_sizes(config, world)
    except MuonZeroError as error:
        return Check("config", str(path), Verdict.FAIL, str(error))
    text = f"stage {config.zero.stage} on {world} ranks: " if world > 1 else f"stage {config.zero.stage}, one rank"
    text += " x ".join(f"{name} {size}" for name, size in axes.items())
    notes = "; ".join(str(warning.message) for warning in config_warnings)
    return Check("config", text, Verdict.NOTE if notes else Verdict.OK, notes)


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
    """Return the findings as a table, with remedies below them."""
    colors = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAIL: "bold red"}
    table = Table("", "found", "", title="compile_muon doctor")
    for finding in findings:
        verdict = Text(finding.verdict.value, style=colors[finding.verdict])
        text = Text("\n".join(filter(None, (finding.found, finding.remedy and f"→ {finding.remedy}"))))
        table.add_row(finding.name, text, verdict)
    return table


def run(console: Console | None = None, config: Path | None = None, world: int = 1) -> int:
    """Print the report, of a config for ``world`` ranks too if given; 0 if this environment can train, else 1."""
    findings = diagnose() + ([check_config(config, world)] if config is not None else [])
    console = console or Console()
    console.print(report(findings))
    failures = [finding.name for finding in findings if finding.verdict is Verdict.FAIL]
    console.print(f"Not ready: {', '.join(failures)}." if failures else "Ready to train.", highlight=False)
    return 1 if failures else 0


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
