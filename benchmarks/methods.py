"""Methods from the same start: the loss over the steps of each, at the best rate of one grid.

    python benchmarks/methods.py                     each method at six rates, 300 steps
    python benchmarks/methods.py --steps 40          a first look

A small GPT on the bytes of Python's standard library, one process, the same batches for all. The rate of the matrices
is tuned over the grid, AdamW's of the rest is the same for all. What is said here is said of this model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from gpt import GPT, PRESETS, losses_of
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

import compile_muon
from compile_muon.passes.methods import MatrixMethod, method_names

SHAPE = PRESETS["tiny"]
RATES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
LAST = 20  # steps that a run is judged by
_RESULTS = Path(__file__).parent / "results"


def train(method: str, rate: float, steps: int) -> list[float]:
    """The loss of every step, in nats a byte."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    # AdaMuon's own scale is a fifth of sqrt(width), Muon's is 1: the same grid serves both by one scale.
    # Muown's gains have the same rate as its directions, which its own scale is made for.
    scale = None if method == "muown" else "original"
    optimizer = compile_muon.MuonZero(
        model, lr=rate, adamw_lr=3e-3, weight_decay=0.01, adjust_lr=scale, method=method, stage=0, update="step"
    )
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - 0.9 * step / steps))
    return losses_of(model, SHAPE, optimizer, steps, 1, schedule)


def draw(best: dict[str, tuple[float, list[float]]], title: str, path: Path) -> None:
    """A curve a method, over means of 10 steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for method, (rate, losses) in best.items():
        means = [statistics.fmean(losses[i : i + 10]) for i in range(0, len(losses), 10)]
        axes.plot(range(10, 10 * len(means) + 1, 10), means, label=f"{method}, lr {rate:g}: {losses_end(losses):.3f}")
    ends = [losses_end(losses) for _, losses in best.values()]
    axes.set(xlabel="steps", ylabel="loss (nats a byte)", ylim=(min(ends) - 0.1, min(ends) + 1.2), title=title)
    axes.title.set_fontsize(9)
    axes.legend(title=f"mean of the last {LAST} steps")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def losses_end(losses: list[float]) -> float:
    """What a run is judged by."""
    return statistics.fmean(losses[-LAST:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, default=_RESULTS / "methods.json")
    parser.add_argument("--png", type=Path, help="default: the JSON file's name with .png")
    options = parser.parse_args(argv)
    if options.steps < LAST:
        parser.error(f"--steps is {options.steps}, but must be at least {LAST}")
    png = options.png or options.json.with_suffix(".png")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120)
    runs: dict[str, dict[float, list[float]]] = {}
    for method in method_names(MatrixMethod):
        if method == "heavy_ball":  # at a constant momentum it is Muon
            continue
        for rate in RATES:
            began = time.perf_counter()
            losses = train(method, rate, options.steps)
            runs.setdefault(method, {})[rate] = losses
            seconds = time.perf_counter() - began
            console.print(f"{method:12} lr {rate:<6g} {losses_end(losses):.4f} ({seconds:.0f} s)", highlight=False)
    best = {m: min(of.items(), key=lambda entry: losses_end(entry[1])) for m, of in runs.items()}
    title = f"{SHAPE.layers}-layer GPT, width {SHAPE.width}, rates out of {', '.join(map(str, RATES))}, CPU"
    record = {
        "command": shlex.join(["python", "benchmarks/methods.py", *(argv if argv is not None else sys.argv[1:])]),
        "torch": torch.__version__,
        "shape": vars(SHAPE),
        "steps": options.steps,
        "ends": {m: {str(rate): round(losses_end(losses), 5) for rate, losses in of.items()} for m, of in runs.items()},
        "curves": {m: [round(x, 4) for x in losses] for m, (_, losses) in best.items()},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    draw(best, title, png)
    console.print(f"losses: {options.json}\nchart:  {png}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
