"""`python -m compile_muon calibrate --out FILE`: measures the machine it runs on, and writes its description."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Column, Table

from compile_muon.errors import config_error
from compile_muon.planning.machine import Machine, load_machine
from compile_muon.planning.machines.fit import completed, fit
from compile_muon.planning.machines.measure import Measured, cores, measure, plan_for

__all__ = ["run", "write_machine"]

_TIMEOUT = timedelta(minutes=5)


def run(
    out: Path,
    ranks: int | None = None,
    quick: bool = False,
    disk: Path | None = None,
    console: Console | None = None,
    base: str | None = None,
) -> int:
    """Measure, print what was measured beside what the description says, write it; 0.

    Under torchrun the ranks are those that it started, and the first one prints and writes. Else they are started here.

    Args:
        out: file to write; its name without the suffix is the machine's.
        ranks: None for as many as there are GPUs, or twice as many as cores and no more than 4.
        disk: a folder on the disk that offload would use; None to leave it out.
        base: the machine, by name or file, that has what is not measured; None for "h100" on GPUs, none on CPUs.
    Raises:
        ConfigError: ``base`` is no machine, or one of the other kind of device.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = base or ("h100" if device == "cuda" else None)
    rest = None if base is None else load_machine(base, "--base")
    if rest is not None and rest.device != device:
        raise config_error("--base", base, f"describes {rest.device!r}, and this is {device!r}", "name another")
    console = console or Console()
    started = time.perf_counter()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        measured = _as_rank(quick, disk, console.print, int(os.environ["LOCAL_RANK"]))
    else:
        usual = torch.cuda.device_count() if torch.cuda.is_available() else min(4, 2 * cores())
        measured = _with_ranks(ranks or usual, quick, disk, console)
    if measured is None:
        return 0
    machine = fit(measured, out.stem)
    if rest is not None:
        machine = completed(machine, rest)
    console.print(report(measured, machine), width=max(120, console.width), crop=False)
    write_machine(machine, out)
    console.print(f"{out} in {time.perf_counter() - started:.0f} s")
    return 0


def _as_rank(
    quick: bool, disk: Path | None, note: Callable[[str], None], local_rank: int, **group: Any
) -> Measured | None:
    """What rank 0 measured, on rank 0, which tells ``note`` what comes next.

    Args:
        group: of :func:`torch.distributed.init_process_group`; torchrun says it by environment variables.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT, **group)
    try:
        first = dist.get_rank() == 0
        measured = measure(plan_for(device, quick), note if first else lambda text: None, disk)
        return measured if first else None
    finally:
        dist.destroy_process_group()


def _with_ranks(ranks: int, quick: bool, disk: Path | None, console: Console) -> Measured:
    queue = mp.get_context("spawn").SimpleQueue()
    measured = None
    with tempfile.TemporaryDirectory() as folder, console.status("starting ranks") as status:
        given = (ranks, str(Path(folder, "store")), quick, disk, queue)
        context = mp.spawn(_rank, given, nprocs=ranks, join=False)
        finished = False
        while not finished or not queue.empty():
            finished = finished or context.join(timeout=0.1)
            while not queue.empty():
                item = queue.get()
                if isinstance(item, str):
                    status.update(item)
                else:
                    measured = item
    assert measured is not None
    return measured


def _rank(rank: int, world: int, store: str, quick: bool, disk: Path | None, queue: SimpleQueue[Any]) -> None:
    group = {"store": dist.FileStore(store, world), "rank": rank, "world_size": world}
    measured = _as_rank(quick, disk, queue.put, rank, **group)
    if measured is not None:
        queue.put(measured)


def report(measured: Measured, machine: Machine) -> Table:
    """Each sample with what the description says of it, and how far off that is, by group, held-out samples apart."""
    table = Table(Column("", no_wrap=True), "measured", "predicted", "error", "", title=f"machine {machine.name}")
    for group in dict.fromkeys(sample.group for sample in measured.samples):
        for held_out in (False, True):
            samples = [s for s in measured.samples if s.group == group and s.held_out == held_out]
            errors = [abs(sample.error(machine)) for sample in samples]
            for sample, error in zip(samples, errors, strict=True):
                seconds = [f"{value * 1e6:,.1f} µs" for value in (sample.seconds, sample.predicted(machine))]
                table.add_row(str(sample), *seconds, f"{error:.0%}", "held out" if held_out else "")
            if errors:
                title = f"{group}, {'held out' if held_out else 'fitted'}: {len(errors)}"
                table.add_row(title, "", "", f"median {statistics.median(errors):.0%}", f"worst {max(errors):.0%}")
        table.add_section()
    return table


def write_machine(machine: Machine, out: Path) -> None:
    """As JSON, a field on a line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in machine.to_json().items()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
