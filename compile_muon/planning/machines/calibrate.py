"""`python -m compile_muon calibrate --out FILE`: measure this machine and write its description."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Column, Table

from compile_muon.errors import config_error
from compile_muon.planning.machines.fit import Measured, completed, fit
from compile_muon.planning.machines.measure import cores, measure
from compile_muon.simulate.machine import Machine, load_machine

_TIMEOUT = timedelta(minutes=5)


def run(
    out: Path, ranks: int | None = None, quick: bool = False, disk: Path | None = None, base: str | None = None
) -> int:
    """Measure, print each measurement beside its prediction, write the description to `out`; return 0.

    The stem of `out` is the machine's name. Outside of torchrun `ranks` processes are spawned, by default as many as
    GPUs, or twice as many as cores, at most 4. Rank 0 prints and writes. `disk` is a folder on the disk that offload
    would use, None leaves the disk out. The machine `base` supplies numbers that are not measured; default: "h100" on
    GPUs, none on CPUs. Raises a ConfigError if `base` is no machine of this device type.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = base or ("h100" if device == "cuda" else None)
    base_machine = None if base is None else load_machine(base, "--base")
    if base_machine is not None and base_machine.device != device:
        raise config_error("--base", base, f"describes {base_machine.device!r}, and this is {device!r}", "name another")
    args = (device, out, quick, disk, base_machine)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _calibrate(int(os.environ["LOCAL_RANK"]), 0, None, *args)
        return 0
    world = ranks or (torch.cuda.device_count() if device == "cuda" else min(4, 2 * cores()))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_calibrate, (world, Path(folder, "store"), *args), nprocs=world)
    return 0


def _calibrate(
    local_rank: int, world: int, store: Path | None, device: str, out: Path, quick: bool, disk: Path | None,
    rest: Machine | None,
) -> None:  # fmt: skip
    """Run one rank of the measurement.

    Ranks meet at the file `store`; under torchrun it is None, and the environment says where.
    """
    console, started = Console(), time.perf_counter()
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    meeting = {"init_method": f"file://{store}", "rank": local_rank, "world_size": world}
    at_store: dict[str, Any] = meeting if store else {}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT, **at_store)
    try:
        first = dist.get_rank() == 0
        measured = measure(quick, console.print if first else lambda text: None, disk)
    finally:
        dist.destroy_process_group()
    if first:
        machine = fit(measured, out.stem)
        machine = machine if rest is None else completed(machine, rest)
        console.print(report(measured, machine), width=max(120, console.width), crop=False)
        write_machine(machine, out)
        console.print(f"{out} in {time.perf_counter() - started:.0f} s")


def report(measured: Measured, machine: Machine) -> Table:
    """Return a table of each sample, its prediction by the description, and the error, by group."""
    table = Table(Column("", no_wrap=True), "measured", "predicted", "error", title=f"machine {machine.name}")
    for group in dict.fromkeys(sample.group for sample in measured.samples):
        errors = []
        for sample in (sample for sample in measured.samples if sample.group == group):
            errors.append(abs(sample.error(machine)))
            seconds = [f"{value * 1e6:,.1f} µs" for value in (sample.seconds, sample.predicted(machine))]
            table.add_row(f"{group}: {sample}", *seconds, f"{errors[-1]:.0%}")
        worst = f"median {statistics.median(errors):.0%}, worst {max(errors):.0%}"
        table.add_row(f"{len(errors)} {group}", "", "", worst, end_section=True)
    return table


def write_machine(machine: Machine, out: Path) -> None:
    """Write a machine as JSON, a field on each line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in machine.to_json().items()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
