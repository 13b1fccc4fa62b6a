"""A reliability campaign: injected faults, the outcome of each, and the command that repeats it.

    python benchmarks/faults.py                          # all campaigns; docs/reference/reliability.md has the results
    python benchmarks/faults.py --quick                  # a part of each, under three minutes on two cores
    python benchmarks/faults.py kills --runs 20          # SIGKILL at random moments; resumed runs are equal to the bit
    python benchmarks/faults.py damage                   # damaged checkpoints
    python benchmarks/faults.py resharding               # every world and stage loads what every other saved
    python benchmarks/faults.py soak                     # thousands of steps: memory, threads and handles stay flat
    python benchmarks/faults.py elastic                  # ranks and nodes of the example under torchrun
    python benchmarks/faults.py ranks --stages 3 --only "killed in forward"    # one rank does something else

Everything runs on the CPU over Gloo, in forks of this process ("elastic": in processes of torchrun). The exit code is 1
if an outcome is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

# Before torch is imported, which counts threads, and warns of each connection that a killed rank leaves.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from reliability.outcome import Request, Row
from reliability.processes import warm
from rich.console import Console
from rich.table import Table

CAMPAIGNS = ("kills", "ranks", "damage", "resharding", "soak", "elastic")
_RESULTS = Path(__file__).with_name("results") / "faults.json"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of {', '.join(CAMPAIGNS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a part of each")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn: moments, ranks, bytes")
    parser.add_argument("--runs", type=int, help="how often, or how many steps, instead of the campaign's own number")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), help="ranks: ZeRO stages")
    parser.add_argument("--world", type=int, choices=(2, 3), help="ranks: how many")
    parser.add_argument("--arguments", type=json.loads, default={}, help="ranks: of MuonZero on every rank, JSON")
    parser.add_argument("--jobs", type=int, default=3, help="ranks: runs at a time; most of a run is waiting")
    parser.add_argument(
        "--json", type=Path, help=f"default: benchmarks/results/{_RESULTS.name}, if all of a campaign ran"
    )
    options = parser.parse_args(argv)
    for name in options.campaigns:
        if name not in CAMPAIGNS:
            parser.error(f"CAMPAIGN {name!r}: there are {', '.join(CAMPAIGNS)}")
    for name in ("runs", "jobs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least 1")
    return options


def print_rows(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for heading, style in (
        ("fault", {}),
        ("tried", {"justify": "right"}),
        ("what happened", {}),
        ("longest s", {"justify": "right"}),
    ):
        table.add_column(heading, **style)
    for row in rows:
        happened = ", ".join(f"{outcome}: {count}" for outcome, count in row.outcomes.items())
        longest = "-" if row.longest_s is None else f"{row.longest_s:.1f}"
        table.add_row(row.fault, str(row.tried), happened, longest, style="red" if row.wrong else None)
    console.print(table)


def main(argv: list[str]) -> int:
    options = parse(argv)
    console = Console()
    stages = options.stages and tuple(options.stages)
    chosen = (options.only, stages, options.world)
    request = Request(options.seed, options.quick, options.runs, *chosen, options.jobs, options.arguments)
    logging.disable(logging.ERROR)  # torch logs the traceback of every damaged file that it reads
    warm()
    results = {}
    for name in options.campaigns or CAMPAIGNS:
        campaign: Callable[[Request], Iterator[Row]] = import_module(f"reliability.{name}").campaign
        start, rows = time.monotonic(), []
        for row in campaign(request):
            rows.append(row)
            if not console.is_terminal:
                print(f"{name}: {row.fault}: {row.outcomes}", flush=True)
        seconds = time.monotonic() - start
        print_rows(console, f"{name}, {seconds:.0f} s", rows)
        results[name] = {
            "command": shlex.join(["python", "benchmarks/faults.py", *argv]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "seconds": round(seconds, 1),
            "tried": sum(row.tried for row in rows),
            "wrong": sum(row.wrong for row in rows),
            "rows": [asdict(row) for row in rows],
        }
    write(options, results)
    wrong = {name: result["wrong"] for name, result in results.items() if result["wrong"]}
    for name, count in wrong.items():
        console.print(f"[red]{name}: {count} that should not have happened[/red]")
    return 1 if wrong else 0


def write(options: argparse.Namespace, results: dict) -> None:
    """Write results to ``--json``, or if whole campaigns ran replace these in the record."""
    path = options.json
    if path is None:
        if any((options.quick, options.only, options.runs, options.stages, options.world, options.arguments)):
            return
        path = _RESULTS
        earlier = json.loads(path.read_text()) if path.exists() else {}
        results = {name: (earlier | results)[name] for name in CAMPAIGNS if name in (earlier | results)}
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
