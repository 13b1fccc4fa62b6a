"""Time a training step: ours, DeepSpeed Muon, FSDP2 + AdamW, DDP + Muon, plain torch and bare compute, in one run.

    python benchmarks/train_step.py                                  # the record: 10 M parameters, 2 ranks
    python benchmarks/train_step.py --memory                         # peak memory, in a run of its own
    python benchmarks/train_step.py --preset tiny --stages 1 3       # a minute, to see that it works
    python benchmarks/train_step.py --preset 1b --device cuda --ranks 1 --stages 0 --dtype bfloat16    # one GPU
    python benchmarks/train_step.py --contenders ours-muon --earlier FOLDER    # beside another version of this package
    python benchmarks/train_step.py --preset small --stages 1 3 --links unlimited 1600mbit  # make bench LINK=1600mbit
    python benchmarks/train_step.py --contenders ours-muon --together  # stages beside each other, for simulator.py

Every contender trains the same GPT from the same weights on the same bytes, in rank processes of its own.
The contenders of a stage are started one after another, warmed up, and then take turns, a step each, in an
order shuffled anew every round, while the others wait. A slow minute of the machine hits all alike, and
ratios are medians over the rounds of two steps taken in the same round. The slowest rank's time counts.
"compile" is the first step's time over a median step's: cold with an empty Inductor cache, warm with
the cache of the first repeat. Bytes are the kernel's count of bytes sent by a rank's sockets. With --links every
round has a turn at each rate of the loopback, which all ranks share; it needs root and Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import random
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from contenders import ALL_STAGES, CONTENDERS, EARLIER, NO_STAGE, VARIANTS
from gpt import PRESETS, shape_of
from launch import RankFailed, Ranks, Trial, record_of
from links import UNLIMITED, bytes_per_second, enter, limit, problem
from report import as_json, draw, judge, judge_memory, over_compute, print_report, summarize, title_of
from rich.console import Console

T = TypeVar("T")
_RESULTS = Path(__file__).with_name("results")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--stages", type=int, nargs="+", default=list(ALL_STAGES), choices=ALL_STAGES)
    chosen = [name for name in CONTENDERS if name != EARLIER]
    usual = [name for name in chosen if name not in VARIANTS]
    parser.add_argument("--contenders", nargs="+", default=usual, choices=chosen)
    parser.add_argument("--earlier", type=Path, help="compare with the version in this folder (pip install --target)")
    parser.add_argument("--preset", default="full", choices=list(PRESETS))
    parser.add_argument("--layers", type=int, help="other than the preset's: few, to see that it works")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1, help="a rank's step is split into so many backwards")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights and activations")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a trial, a round each")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones; the first compiles")
    parser.add_argument("--repeats", type=int, default=2, help="times that all is started anew")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the steps in a round")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of a rank")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ns-method", default="standard", choices=["standard", "gram"], help="ours and DeepSpeed")
    parser.add_argument("--ns-dtype", default="auto", choices=["auto", "bfloat16"], help="ours; others: bfloat16")
    parser.add_argument("--keep-gathered", action="store_true", help="stage 3, ours and FSDP2: one gather, not two")
    parser.add_argument("--together", action="store_true", help="all stages take turns, not only those of one stage")
    parser.add_argument("--memory", action="store_true", help="weigh each alone; times are a slower allocator's")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one step")
    parser.add_argument("--caches", type=Path, help="Inductor's are kept in this folder; first steps are not cold then")
    parser.add_argument("--logs", type=Path, help="keep the ranks' logs in this folder")
    parser.add_argument(
        "--links", nargs="+", default=[UNLIMITED], help=f"rates of the loopback, 1600mbit or {UNLIMITED}"
    )
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/train_step_PRESET….json")
    parser.add_argument("--svg", type=Path, help="default: the JSON file's name with .svg")
    options = parser.parse_args(argv)
    for name in ("ranks", "micro_batches", "steps", "warmup", "repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1")
    if options.earlier:
        if not (options.earlier / "compile_muon" / "__init__.py").is_file():
            parser.error(f"--earlier {options.earlier}: holds no compile_muon; pip install --no-deps --target it first")
        options.contenders = [*options.contenders, EARLIER]
    try:
        limited = [link for link in options.links if bytes_per_second(link) < float("inf")]
    except ValueError as error:
        parser.error(f"--links: {error}")
    if limited and (why := problem()):
        parser.error(f"--links {' '.join(limited)}: {why}")
    if limited and (options.memory or options.device != "cpu"):
        parser.error("--links times ranks on CPU: leave out --memory, and --device")
    sequences = PRESETS[options.preset].batch
    if sequences % options.micro_batches:
        parser.error(f"--micro-batches {options.micro_batches} does not divide a rank's {sequences} sequences")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    variant = options.preset
    if options.micro_batches > 1:
        variant += f"_{options.micro_batches}_micro_batches"
    if options.dtype != "float32":
        variant += f"_{options.dtype}"
    if options.ns_dtype != "auto":
        variant += f"_ns_{options.ns_dtype}"
    if options.keep_gathered:
        variant += "_keep_gathered"
    if options.earlier:
        variant += "_earlier"
    if options.memory:
        variant += "_memory"
    if limited:
        variant += "_links"
    options.json = options.json or _RESULTS / f"train_step_{variant}.json"
    options.svg = options.svg or options.json.with_suffix(".svg")
    return options


def plan_heats(options: argparse.Namespace, console: Console) -> list[list[Trial]]:
    """List the trials that take turns: a repeat's at one stage, or at all. To measure memory, each runs alone."""
    runnable = []
    for name in options.contenders:
        missing = CONTENDERS[name].missing(getattr(torch, options.dtype), options.ranks)
        if missing:
            console.print(f"[yellow]skipping {name}[/yellow]: {missing}", soft_wrap=True)
        else:
            runnable.append(name)
    enough_gpus = options.device == "cuda" and torch.cuda.device_count() >= options.ranks
    together = [options.stages] if options.together else [[stage] for stage in options.stages]
    heats: list[list[Trial]] = []
    for repeat in range(options.repeats):
        for stages in together:
            trials = [
                Trial(
                    contender=name,
                    stage=stage,
                    heat=stages[0],
                    repeat=repeat,
                    ranks=options.ranks,
                    preset=options.preset,
                    layers=options.layers,
                    micro_batches=options.micro_batches,
                    dtype=options.dtype,
                    device=options.device,
                    backend="nccl" if enough_gpus else "gloo",
                    ns_method=options.ns_method,
                    ns_dtype=options.ns_dtype,
                    reshard_after_forward=not options.keep_gathered,
                    weigh=options.memory,
                    timeout_s=options.timeout,
                    package=str(options.earlier.resolve()) if name == EARLIER else None,
                )
                for name in runnable
                for stage in (*stages, NO_STAGE)
                if stage in CONTENDERS[name].stages
            ]
            heats += [[trial] for trial in trials] if options.memory else [trials]
    return [heat for heat in heats if heat]


class Heat:
    """A heat: contenders that take turns. One that fails drops out, and its record says why."""

    def __init__(self, options: argparse.Namespace, console: Console, work: Path):
        self._options = options
        self._console = console
        self._work = work
        self._alive: list[Ranks] = []
        self._records: list[dict] = []

    def run(self, trials: list[Trial], order: random.Random) -> list[dict]:
        """Warm up each of `trials` alone, step all in rounds, and return their records."""
        with contextlib.ExitStack() as stack:
            for trial in trials:
                slug = _name(trial).replace(" ", "-")
                folder = self._work / f"heat-{trial.heat}-{trial.repeat}" / slug
                caches = (self._options.caches or self._work / "inductor").resolve()
                ranks = Ranks(trial, folder, caches / slug, self._options.threads)
                self._alive.append(stack.enter_context(ranks))
                self._attempt(ranks, self._warm_up)
            links = self._options.links
            for number in range(1, self._options.steps + 1):
                for link in links:
                    if len(links) > 1 or link != UNLIMITED:
                        limit(link)
                    turns = order.sample(self._alive, len(self._alive))
                    action = Ranks.step if links == [UNLIMITED] else Ranks.turn
                    seconds = {_name(ranks.trial): self._attempt(ranks, action) for ranks in turns}
                    texts = [f"{name} {value:.3f} s" for name, value in sorted(seconds.items()) if value is not None]
                    where = f", {link}" if len(links) > 1 else ""
                    self._console.print(f"  round {number}{where}: {', '.join(texts)}", highlight=False, soft_wrap=True)
            if links != [UNLIMITED]:
                limit(UNLIMITED)
            for ranks in list(self._alive):
                record = self._attempt(ranks, lambda ranks: ranks.record(self._options.warmup))
                if record is not None:
                    self._records += by_link(record, links)
        return self._records

    def _warm_up(self, ranks: Ranks) -> None:
        first, *_ = [ranks.step() for _ in range(self._options.warmup)]
        self._console.print(f"{_name(ranks.trial)}: first step {first:.1f} s", highlight=False)

    def _attempt(self, ranks: Ranks, action: Callable[[Ranks], T]) -> T | None:
        try:
            return action(ranks)
        except RankFailed as failure:
            ranks.close(grace_s=0)
            self._alive.remove(ranks)
            self._records.append(record_of(ranks.trial) | {"error": str(failure), "log": failure.log})
            self._console.print(f"[red]{_name(ranks.trial)} failed: {failure}[/red]", soft_wrap=True)
            self._console.print("\n".join(failure.log), markup=False, soft_wrap=True)
            return None


def by_link(record: dict, links: list[str]) -> list[dict]:
    """Split the record of steps that took turns over ``links`` into a record for each link."""
    split = ("step_s", "cpu_s")
    return [
        record | {"link": link} | {key: record[key][place :: len(links)] for key in split}
        for place, link in enumerate(links)
    ]


def _name(trial: Trial) -> str:
    return trial.contender if trial.stage == NO_STAGE else f"{trial.contender} stage {trial.stage}"


def run_all(heats: list[list[Trial]], options: argparse.Namespace, console: Console, work: Path) -> list[dict]:
    """Run the heats in order; a contender that fails at a stage is not tried there again."""
    order = random.Random(options.seed)
    records: list[dict] = []
    for number, trials in enumerate(heats, start=1):
        failed = {(record["contender"], record["stage"]) for record in records if record["error"]}
        trials = [trial for trial in trials if (trial.contender, trial.stage) not in failed]
        if trials:
            console.rule(f"{number} of {len(heats)}")
            records += Heat(options, console, work).run(trials, order)
    return records


def describe(options: argparse.Namespace) -> dict:
    """Describe the machine, the versions and the options, to judge or repeat the numbers."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "compile_muon", "deepspeed"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "shape": vars(shape_of(options.preset, options.layers)),
        # Paths concern one machine only.
        "options": {k: v for k, v in vars(options).items() if k not in ("caches", "earlier", "json", "logs", "svg")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the ranks are stopped too
    if options.links != [UNLIMITED]:
        enter([__file__, *(sys.argv[1:] if argv is None else argv)])
    console = Console(width=None if sys.stdout.isatty() else 170)
    heats = plan_heats(options, console)
    if not heats:
        console.print("[red]nothing to run: no chosen contender is available at a chosen stage[/red]")
        return 1
    about = describe(options)
    with tempfile.TemporaryDirectory(prefix="train_step_") as scratch:
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=options.logs)) if options.logs else Path(scratch)
        records = run_all(heats, options, console, work)
    shape = shape_of(options.preset, options.layers)
    rows = summarize(records, shape.context * shape.batch * options.ranks)
    verdicts = judge_memory(rows) if options.memory else judge(rows, records, options.ranks, about["cores"])
    remainders = over_compute(records)
    result = about | as_json(rows, verdicts, remainders) | {"samples": records}
    print_report(console, rows, verdicts, remainders, title_of(result))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"samples: {options.json}", soft_wrap=True)
    if rows:
        draw(result, options.svg)
        console.print(f"chart:   {options.svg}", soft_wrap=True)
    return 1 if any(record["error"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
