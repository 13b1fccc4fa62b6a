"""Methods from the same weights: the loss over steps of each, at the best rate of its grid.

    python benchmarks/methods.py                     each method at six rates or more, 300 steps
    python benchmarks/methods.py --methods soap      one of them; the file keeps the others
    python benchmarks/methods.py --steps 40          a first look

A small GPT trains on the bytes of Python's standard library, in one process, on the same batches for all. The rate of
the matrices is tuned over a grid that grows until the best is inside; AdamW's rate of the other parameters is the same
for all. Runs from two more seeds at the best rate show how much losses have to differ. The results hold for this model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, PRESETS, losses_of, muon_names
from pictures import write_svg
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

import compile_muon
from compile_muon.passes.methods import MatrixMethod, method_names

SHAPE = PRESETS["tiny"]
RATES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
MOST_RATES = 9
REST = 3e-3  # AdamW's rate of the parameters that are not matrices
SEEDS = 3
LAST = 20  # steps that a run is judged by
BLOCKS = 4  # of a matrix, for MuonBP: what four ranks would hold
# Without heavy_ball, which is Muon at a constant momentum; and AdamW for the matrices, to compare with.
TRAINED = (*(name for name in method_names(MatrixMethod) if name != "heavy_ball"), "adamw")
_RESULTS = Path(__file__).parent / "results"


def train(method: str, rate: float, steps: int, seed: int = 0) -> list[float]:
    """Train; return the loss of every step, in nats a byte."""
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    matrices = muon_names(model)
    if method == "adamw":
        groups = {name: {"method": "adamw", "lr": rate, "weight_decay": 0.01} for name in matrices}
        config = {
            "optimizer": {"type": "AdamW", "params": {"lr": REST}, "groups": groups},
            "zero_optimization": {"stage": 0},
        }
        optimizer = compile_muon.initialize(model, config)[1]
    else:
        # AdaMuon's own scale is a fifth of sqrt(width), Muon's is 1: with one scale the same grid serves both.
        # Muown keeps its own scale, because its gains and its directions share a rate.
        scale = None if method == "muown" else "original"
        views = {name: {"heads": BLOCKS} for name in matrices} if method == "muonbp" else {}
        optimizer = compile_muon.MuonZero(
            model, lr=rate, adamw_lr=REST, weight_decay=0.01, adjust_lr=scale, method=method, muon_views=views, stage=0,
            update="step",
        )  # fmt: skip
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - 0.9 * step / steps))
    return losses_of(model, SHAPE, optimizer, steps, seed + 1, schedule)


def tune(method: str, steps: int, say: Any) -> dict[str, Any]:
    """Tune the rate; return the last loss at each rate, the best curve, and the best rate's last losses by seed."""
    runs: dict[float, list[float]] = {}
    rates = list(RATES)
    while True:
        for rate in rates:
            if rate not in runs:
                start = time.perf_counter()
                runs[rate] = train(method, rate, steps)
                seconds = time.perf_counter() - start
                say(f"{method:12} lr {rate:<8g} {losses_end(runs[rate]):.4f} ({seconds:.0f} s)")
        rates = sorted(runs)
        best = min(rates, key=lambda rate: losses_end(runs[rate]))
        if best not in (rates[0], rates[-1]) or len(rates) >= MOST_RATES:
            break
        rates.append(best / 2 if best == rates[0] else 2 * best)
    seeds = [runs[best], *(train(method, best, steps, seed) for seed in range(1, SEEDS))]
    ends = [round(losses_end(losses), 5) for losses in seeds]
    say(f"{method:12} lr {best:<8g} from {SEEDS} seeds {ends}")
    return {
        "ends": {f"{rate:g}": round(losses_end(runs[rate]), 5) for rate in rates},
        "seeds": ends,
        "curve": [round(x, 4) for x in runs[best]],
    }


def best_rate(found: dict[str, Any]) -> str:
    return min(found["ends"], key=found["ends"].__getitem__)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw a curve a method, over means of 10 steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes, last = figure.subplots(), []
    for method, result in sorted(record["methods"].items(), key=lambda entry: statistics.fmean(entry[1]["seeds"])):
        means = [statistics.fmean(result["curve"][i : i + 10]) for i in range(0, len(result["curve"]), 10)]
        last.append(statistics.fmean(result["seeds"]))
        label = f"{method}, lr {best_rate(result)}: {last[-1]:.3f}"
        style = "k--" if method == "adamw" else "-"
        axes.plot(range(10, 10 * len(means) + 1, 10), means, style, label=label, linewidth=1.2)
    shape = record["shape"]
    title = f"{shape['layers']}-layer GPT, width {shape['width']}, each at the best rate of its grid, CPU"
    axes.set(xlabel="steps", ylabel="loss (nats a byte)", ylim=(min(last) - 0.1, min(last) + 1.2), title=title)
    axes.title.set_fontsize(9)
    axes.legend(title=f"mean of the last {LAST} steps, {SEEDS} seeds", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    write_svg(figure, path)


def losses_end(losses: list[float]) -> float:
    """Return the result of a run: the mean loss of its last steps."""
    return statistics.fmean(losses[-LAST:])


def begun(path: Path, methods: list[str], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the record to write these methods into, with the file's other methods; ValueError if facts differ."""
    other_methods = json.loads(path.read_text())["methods"] if path.exists() and set(methods) < set(TRAINED) else {}
    other_methods = {name: result for name, result in other_methods.items() if name not in methods}
    if other_methods and (before := {key: json.loads(path.read_text())[key] for key in facts}) != facts:
        raise ValueError(
            f"{path} has {', '.join(other_methods)} of {before}, but this is {facts}: run all, or use --json"
        )
    return facts | {"methods": other_methods}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--methods", nargs="+", choices=TRAINED, default=list(TRAINED), metavar="METHOD")
    parser.add_argument("--json", type=Path, default=_RESULTS / "methods.json")
    parser.add_argument("--svg", type=Path, help="default: the JSON file's name with .svg")
    options = parser.parse_args(argv)
    if options.steps < LAST:
        parser.error(f"--steps is {options.steps}, but must be at least {LAST}")
    try:
        record = begun(
            options.json,
            options.methods,
            {"torch": torch.__version__, "shape": vars(SHAPE), "steps": options.steps},
        )
    except ValueError as problem:
        parser.error(str(problem))
    svg = options.svg or options.json.with_suffix(".svg")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for method in options.methods:
        results = record["methods"] | {
            method: tune(method, options.steps, lambda text: console.print(text, highlight=False))
        }
        record["methods"] = {name: results[name] for name in TRAINED if name in results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    draw(record, svg)
    console.print(f"losses: {options.json}\nchart:  {svg}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
