"""Muon beside AdamW: one GPT, one start, the same batches, each at the best rate of a stated grid; loss over time.

    python benchmarks/convergence.py                    # 1.3 M parameters, for a CPU
    python benchmarks/convergence.py --preset 124m      # GPT-2 small, for a GPU of 80 GB
    python benchmarks/convergence.py --data FOLDER      # text of your own instead of this machine's Python sources

The rate of each is the one with the least held-out loss after short runs, which have weights and batches of their own;
while the best is at an edge of its grid, the grid grows by a factor of two, up to five rates. AdamW's rate is chosen
first, and is also the rate of the parameters that Muon leaves to AdamW, so Muon has one rate to choose, too. Then both
train from the same weights on the same batches with the same warm-up, decline and decay, and take turns, so that other
work on this machine slows both. The clock runs for training alone, not for compiling and validation. A single thread on
a CPU is timed in CPU seconds, which other work does not stretch.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, VOCABULARY, Shape, training
from pictures import write_svg
from rich.console import Console
from text import Text, batches
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import compile_muon

_RESULTS = Path(__file__).with_name("results")
TURNS = ("AdamW", "Muon")
MOST_RATES = 5
VALIDATED = 8  # held-out batches of a validation, always the same
DECAY, BETAS = 0.1, [0.9, 0.95]

Curve = list[list[float]]  # points (tokens, seconds of training, held-out loss), the first before the first step


@dataclass(frozen=True)
class Preset:
    """A model, the length of its runs, and the grids of rates."""

    shape: Shape
    steps: int  # of a run
    short: int  # steps of a run that chooses a rate
    points: int  # of a curve, after the first
    rates: dict[str, tuple[float, ...]]  # grid of each algorithm, rising by factors of two
    text: int = 4 << 20  # bytes of text, at most


PRESETS = {
    "small": Preset(
        Shape(layers=6, width=128, heads=4, context=128, batch=16),
        steps=240, short=60, points=16, rates={"AdamW": (0.002, 0.004, 0.008), "Muon": (0.01, 0.02, 0.04)},
    ),
    # 28 TFLOP a step: 71 ms at 40 % of 989 TFLOP/s. Four runs and 6 to 10 short ones, 3,300 to 3,900 steps, take 4 to 5
    # minutes, or 7 at 25 %, beside compiling and half a minute of counting words.
    "124m": Preset(
        Shape(layers=12, width=768, heads=12, context=1024, batch=32, vocabulary=50304, tied=True),
        steps=600, short=150, points=20, rates={"AdamW": (0.0005, 0.001, 0.002), "Muon": (0.01, 0.02, 0.04)},
        text=96 << 20,
    ),
}  # fmt: skip


class Model(GPT):
    """A GPT with its loss in float32: curves differ by less than bfloat16 would round a loss."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).float().flatten(0, 1), targets.flatten())


class Trainee:
    """A model under one algorithm, compiled once; each of its runs begins with new weights and new state."""

    def __init__(self, algorithm: str, preset: Preset, text: Text, device: torch.device, codegen: str):
        self.algorithm, self._shape, self._text, self._device = algorithm, preset.shape, text, device
        with device:
            model = Model(preset.shape)
        self._model, self._optimizer = compile_muon.initialize(
            model,
            {
                "compile": {"codegen": codegen},
                "optimizer": {"type": algorithm, "params": {"weight_decay": DECAY, "betas": BETAS}},
                "zero_optimization": {"stage": 0},
                "bf16": {"enabled": device.type == "cuda"},
            },
        )
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if alone else time.perf_counter
        self._new = copy.deepcopy(self._optimizer.state_dict())
        self.summary = self._optimizer.summary()
        start = time.perf_counter()
        for _ in self.run(0, steps=1, points=1, rate=0.0, rest=0.0):
            pass
        self.first_s = time.perf_counter() - start

    def run(self, seed: int, steps: int, points: int, rate: float, rest: float) -> Iterator[list[float]]:
        """Train, and yield the points of the curve; it ends early if a number is not finite.

        `rate` is AdamW's, or that of Muon's matrices; `rest` is that of the parameters that Muon leaves to AdamW.
        """
        torch.manual_seed(seed)
        with self._device:
            compile_muon.load_full_state_dict(self._model, Model(self._shape).state_dict())
        self._optimizer.load_state_dict(copy.deepcopy(self._new))
        for group in self._optimizer.param_groups:
            group["lr"] = rate if group["algorithm"] == self.algorithm.lower() else rest
        warm = max(1, steps // 20)
        schedule = LambdaLR(self._optimizer, lambda step: min((step + 1) / warm, 1 - 0.9 * step / steps))
        train_batches = batches(self._text.train, self._shape, steps, 1000 + seed)
        losses, trained, seconds = training(self._model, train_batches, self._optimizer, schedule), 0, 0.0
        for point in range(points + 1):
            count = steps * point // points - trained
            start = self.clock()
            try:
                for loss in islice(losses, count):
                    last = loss
            except compile_muon.NonFiniteError:
                return
            if count:
                last.item()  # waits for the device
            seconds += self.clock() - start
            trained += count
            yield [trained * self._shape.batch * self._shape.context, round(seconds, 3), self._validate()]

    @torch.no_grad()
    def _validate(self) -> float:
        held_out = batches(self._text.held, self._shape, VALIDATED, 0)
        return round(statistics.fmean(self._model(*batch).item() for batch in held_out), 5)


def end(curve: Curve, points: int) -> float | None:
    """Return the last loss of a complete curve, or None."""
    complete = len(curve) == points + 1 and math.isfinite(curve[-1][2])
    return curve[-1][2] if complete else None


def choose(trainee: Trainee, preset: Preset, seed: int, rest: float, say: Any) -> dict[str, Any]:
    """Choose the rate with the least loss after short runs; `at_edge`: at an edge of a grid that may grow no more."""
    losses: dict[float, float | None] = {}
    rates = list(preset.rates[trainee.algorithm])
    while True:
        for rate in rates:
            if rate not in losses:
                curve = list(trainee.run(seed, preset.short, 1, rate, rest))
                losses[rate] = end(curve, 1)
                say(f"{trainee.algorithm} at {rate:g}, {preset.short} steps: {losses[rate]}")
        rates = sorted(losses)
        best = min(rates, key=lambda rate: math.inf if losses[rate] is None else losses[rate])
        at_edge = best in (rates[0], rates[-1])
        if not at_edge or len(rates) >= MOST_RATES:
            return {"best": best, "at_edge": at_edge, "losses": {f"{rate:g}": losses[rate] for rate in rates}}
        rates.append(best / 2 if best == rates[0] else 2 * best)


def reached(curve: Curve, loss: float) -> list[float] | None:
    """Return the tokens and seconds after which a curve first reaches `loss`, interpolating linearly; None if never."""
    for (*before, higher), (*after, lower) in pairwise(curve):
        if lower <= loss <= higher:
            part = (higher - loss) / (higher - lower) if higher > lower else 0.0
            return [a + part * (b - a) for a, b in zip(before, after, strict=True)]
    return None


def compare(runs: list[dict[str, Any]], points: int) -> list[dict[str, Any]]:
    """Make a row a seed: both last losses; tokens and seconds until Muon reaches AdamW's last loss, over AdamW's."""
    rows = []
    for seed in dict.fromkeys(run["seed"] for run in runs):
        adamw, muon = (next(r["curve"] for r in runs if (r["seed"], r["algorithm"]) == (seed, a)) for a in TURNS)
        row: dict[str, Any] = {"seed": seed, "adamw": end(adamw, points), "muon": end(muon, points)}
        point = reached(muon, row["adamw"]) if row["adamw"] is not None and adamw[-1][1] else None
        row |= {name: point and point[unit] / adamw[-1][unit] for unit, name in enumerate(("tokens", "seconds"))}
        rows.append(row | {"step": None if None in row.values() else muon[-1][1] / adamw[-1][1]})
    return rows


def tables(record: dict[str, Any]) -> str:
    """Write the grids and the comparison in Markdown, as the page of docs/ has them."""

    def shown(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = []
    for algorithm, grid in record["grids"].items():
        losses = {rate: shown(loss, 3) for rate, loss in grid["losses"].items()}
        best = f"{grid['best']:g}"
        losses[best] = f"**{losses[best]}**"
        edge = ", at the edge" if grid["at_edge"] else ""
        lines += [f"| {algorithm}{edge} | {' | '.join(losses)} |", f"|{'---|' * (len(losses) + 1)}"]
        lines += [f"| | {' | '.join(losses.values())} |", ""]
    lines += [
        "| seed | AdamW's last loss | Muon's | tokens until there | seconds until there | Muon's step / AdamW's |"
    ]
    lines += [f"|{'---|' * 6}"]
    for row in record["rows"]:
        last = (shown(row[name], 3) for name in ("adamw", "muon"))
        ratios = (shown(row[name], 2) for name in ("tokens", "seconds", "step"))
        lines.append(f"| {row['seed']} | {' | '.join((*last, *ratios))} |")
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw held-out loss over tokens and over seconds, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    clock = "CPU seconds" if record["clock"] == "process_time" else "seconds"
    for axes, unit in zip(figure.subplots(1, 2, sharey=True), ("tokens", f"{clock} of training"), strict=True):
        for run in record["runs"]:
            tokens, seconds, losses = zip(*run["curve"], strict=True)
            color, style = f"C{TURNS.index(run['algorithm'])}", ("-", "--", ":")[run["seed"] % 3]
            label = f"{run['algorithm']}, lr {run['lr']:g}, seed {run['seed']}"
            axes.plot(tokens if unit == "tokens" else seconds, losses, color + style, label=label)
        ends = [run["curve"][-1][2] for run in record["runs"] if math.isfinite(run["curve"][-1][2])] or [0.0]
        axes.set(xlabel=unit, ylim=(min(ends) - 0.1, max(ends) + 1.5))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"held-out loss (nats a {record['token']})")
    figure.axes[0].legend()
    figure.suptitle(f"GPT of {record['parameters'] / 1e6:.1f} M parameters, {record['device']}", fontsize=10)
    write_svg(figure, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--data", type=Path, help="a text file, or a folder of text files")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of a run, short ones take a quarter; default: the preset's")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--json", type=Path, help="default: convergence_PRESET.json in benchmarks/results")
    options = parser.parse_args(argv)
    for name, least in (("seeds", 1), ("steps", 4)):
        if (value := getattr(options, name)) is not None and value < least:
            parser.error(f"--{name} is {value}, but must be at least {least}")
    options.json = options.json or _RESULTS / f"convergence_{options.preset}.json"
    return options


def main(argv: list[str] | None = None) -> int:
    start, options, console = time.perf_counter(), parse(argv), Console(soft_wrap=True, highlight=False)
    preset, device = PRESETS[options.preset], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.steps:
        preset = replace(preset, steps=options.steps, short=options.steps // 4)
    text = Text(preset.shape.vocabulary, preset.shape.context, preset.text, options.data, device)
    trainees = {algorithm: Trainee(algorithm, preset, text, device, options.codegen) for algorithm in TURNS}
    summary = trainees["Muon"].summary
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python", "benchmarks/convergence.py", *(sys.argv[1:] if argv is None else argv)]),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "clock": trainees["Muon"].clock.__name__,
        "preset": asdict(preset),
        "parameters": summary.muon_parameters + summary.adamw_parameters,
        "muon_parameters": summary.muon_parameters,
        "token": "byte" if preset.shape.vocabulary == VOCABULARY else "token",
        "bytes": text.bytes,
        "tokens": text.tokens,
        "first_s": {algorithm: round(trainee.first_s, 1) for algorithm, trainee in trainees.items()},
        "grids": {},
        "rows": [],
        "runs": [],
    }  # fmt: skip

    def keep() -> None:  # after each part, so that an interrupted run leaves its finished parts
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record["seconds"] = round(time.perf_counter() - start)
        options.json.write_text(json.dumps(record, indent=1) + "\n")

    console.print(f"{record['parameters']:,} parameters, {record['device']}; first steps, s: {record['first_s']}")
    rest = 0.0
    for algorithm, trainee in trainees.items():
        record["grids"][algorithm] = choose(trainee, preset, options.seeds, rest, console.print)
        rest = record["grids"]["AdamW"]["best"]
        keep()
    for seed in range(options.seeds):
        rates = {algorithm: grid["best"] for algorithm, grid in record["grids"].items()}
        runs = [trainees[a].run(seed, preset.steps, preset.points, rate, rest) for a, rate in rates.items()]
        curves = zip(*zip_longest(*runs), strict=True)  # zip_longest advances the runs in turns, a point each
        for (algorithm, rate), curve in zip(rates.items(), curves, strict=True):
            record["runs"].append({"algorithm": algorithm, "seed": seed, "lr": rate, "curve": [p for p in curve if p]})
        record["rows"] = compare(record["runs"], preset.points)
        console.print(f"seed {seed}: {record['rows'][-1]}")
        keep()
    draw(record, options.json.with_suffix(".svg"))
    console.print(f"\n{tables(record)}\n\n{record['seconds']} s in all; {options.json} and .svg", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
