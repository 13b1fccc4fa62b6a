"""A step whose optimizer state is offloaded: ours beside DeepSpeed's ``offload_optimizer``, in turns.

    python benchmarks/offload_beside.py                           two ranks, stages 1 to 3; no device, cpu, nvme
    python benchmarks/offload_beside.py --stages 3 --devices nvme --nvme-path /mnt/disk

Each contender has processes of its own for its ranks. At one stage and device ours, DeepSpeed and DeepSpeed with
``engine.compile()`` take turns; a turn is an untimed step and a timed one, so that no contender's writes fall into
another's time. All train the same GPT on the same batches in the same dtype, with Newton-Schulz in bfloat16. A failure
is recorded with its last lines. DeepSpeed's "nvme" is a disk at stage 3 only; at stages 1 and 2 its state stays in host
memory, as the column of bytes on the disk shows. At stage 3 DeepSpeed needs libaio-dev: outside the system's folders,
name it in CPATH, LIBRARY_PATH, LD_LIBRARY_PATH, CFLAGS and LDFLAGS. Its operators are built at the first start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import PRESETS
from launch import RankFailed, Ranks, Trial, record_of
from rich.console import Console
from rich.table import Table

_RESULTS = Path(__file__).parent / "results"
OURS, EAGER, COMPILED = CONTENDERS = ("ours-muon", "deepspeed-muon", "deepspeed-muon-compiled")


def trials_of(args: argparse.Namespace, stage: int, offload: dict[str, Any] | None) -> list[Trial]:
    """Make the trials of the contenders that take turns; each has a folder of its own on the disk."""
    trials = []
    for name in CONTENDERS:
        settings = dict(offload) if offload else None
        if settings and settings["device"] == "nvme":
            settings["nvme_path"] = tempfile.mkdtemp(dir=args.nvme_path, prefix=f"{name}-")
        trials.append(
            Trial(
                contender=name,
                stage=stage,
                heat=stage,
                repeat=0,
                ranks=args.ranks,
                preset=args.preset,
                micro_batches=1,
                dtype=args.dtype,
                device="cpu",
                backend="gloo",
                ns_method="standard",
                ns_dtype="bfloat16",
                reshard_after_forward=True,
                weigh=False,
                timeout_s=args.timeout,
                offload=settings,
            )
        )
    return trials


def heat(trials: list[Trial], args: argparse.Namespace, work: Path, order: random.Random) -> list[dict[str, Any]]:
    """Warm up all trials, run their rounds in turns, and return a record of each."""
    records: dict[str, dict[str, Any]] = {}
    alive: list[Ranks] = []

    def attempt(ranks: Ranks, action: Callable[[Ranks], Any]) -> Any:
        try:
            return action(ranks)
        except RankFailed as failure:
            ranks.close(grace_s=0)
            alive.remove(ranks)
            records[ranks.trial.contender] = record_of(ranks.trial) | {"error": str(failure), "log": failure.log}

    with contextlib.ExitStack() as stack:
        for trial in trials:
            ranks = Ranks(trial, work / trial.contender, work.parent / "inductor" / trial.contender, args.threads)
            alive.append(stack.enter_context(ranks))
            attempt(ranks, lambda ranks: [ranks.step() for _ in range(args.warm)])
        for _ in range(args.rounds):
            for ranks in order.sample(alive, len(alive)):
                attempt(ranks, Ranks.turn)
        for ranks in list(alive):
            if record := attempt(ranks, lambda ranks: ranks.record(args.warm)):
                records[ranks.trial.contender] = record
    return list(records.values())


def outcome_of(records: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Compare medians and first losses of ours with the faster of DeepSpeed's two."""
    ran = {record["contender"]: record for record in records if not record["error"]}
    seconds = {name: statistics.median(record["step_s"]) for name, record in ran.items()}
    losses = {name: record["losses"] for name, record in ran.items()}
    faster = min((name for name in (EAGER, COMPILED) if name in ran), key=seconds.__getitem__, default=None)
    outcome: dict[str, Any] = {"seconds": seconds, "faster_deepspeed": faster}
    if OURS in ran and faster:
        steps = zip(ran[OURS]["step_s"], ran[faster]["step_s"], strict=True)
        firsts = zip(losses[OURS][: args.warm], losses[faster][: args.warm], strict=True)
        outcome |= {
            "ours_of_deepspeed": seconds[OURS] / seconds[faster],
            # Ratios within a round hold also if the host slows down meanwhile.
            "in_a_round": statistics.median(a / b for a, b in steps),
            "losses_differ_by": max(abs(a - b) for a, b in firsts),
        }
    outcome["loss_goes_down"] = {name: curve[-1] < curve[0] for name, curve in losses.items()}
    outcome["disk_mb"] = {name: (record["disk_bytes_per_step"] or 0) / 1e6 for name, record in ran.items()}
    outcome["errors"] = {r["contender"]: {"error": r["error"], "log": r["log"]} for r in records if r["error"]}
    return outcome


def row_of(outcome: dict[str, Any]) -> list[str]:
    """Make the cells of a table row after stage and device."""
    seconds, disk = outcome["seconds"], outcome["disk_mb"]
    times = (f"{seconds[name] * 1e3:.0f}" if name in seconds else "failed" for name in CONTENDERS)
    if "ours_of_deepspeed" not in outcome:
        return [*times, "", "", "", ""]
    moved = f"{disk[OURS]:.1f} / {disk[outcome['faster_deepspeed']]:.1f}"
    ratios = (f"{outcome[name]:.2f}" for name in ("ours_of_deepspeed", "in_a_round"))
    return [*times, *ratios, f"{outcome['losses_differ_by']:.4f}", moved]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=sorted(PRESETS))
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--devices", nargs="+", default=["none", "cpu", "nvme"], choices=["none", "cpu", "nvme"])
    parser.add_argument("--nvme-path", type=Path, help="folder on the disk; default: a temporary one in this")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm", type=int, default=5, help="steps that are not counted, whose losses are compared")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of a rank")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one step")
    parser.add_argument("--json", type=Path, default=_RESULTS / "offload_deepspeed.json")
    args = parser.parse_args()
    console, order, cells = Console(width=120), random.Random(0), []
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args.nvme_path = stack.enter_context(tempfile.TemporaryDirectory(dir=args.nvme_path or Path.cwd()))
        table = Table(title=f"{args.ranks} ranks, {args.preset}, {args.dtype}; ms a step, medians")
        times = ("ours", "DeepSpeed", "compiled", "ours / faster", "in a round")
        for column in ("stage", "device", *times, "losses differ", "disk MB"):
            table.add_column(column)
        for stage in args.stages:
            for device in args.devices:
                offload = None if device == "none" else {"device": device}
                records = heat(trials_of(args, stage, offload), args, work / f"{stage}-{device}", order)
                outcome = outcome_of(records, args)
                cells.append({"stage": stage, "device": device, **outcome, "records": records})
                table.add_row(str(stage), device, *row_of(outcome))
                console.print(f"stage {stage}, {device}: {', '.join(row_of(outcome))}", highlight=False)
                for name, failure in outcome["errors"].items():
                    console.print(f"{name}: {failure['error']}\n", *failure["log"][-3:], markup=False, soft_wrap=True)
    console.print(table)
    result = {"command": shlex.join(sys.argv), "torch": torch.__version__, "ranks": args.ranks, "dtype": args.dtype}
    result |= {"shape": vars(PRESETS[args.preset]), "rounds": args.rounds, "cells": cells}
    args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
