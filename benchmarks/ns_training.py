"""The effect of Newton–Schulz's form and dtype on the loss: one small GPT, each choice, some seeds.

    python benchmarks/ns_training.py                          # the record: 12 choices, 3 seeds, 500 steps
    python benchmarks/ns_training.py --seeds 1 --steps 20     # a minute, to see that it works
    python benchmarks/ns_training.py --only "jordan, gram, float16" "you, gram, float16"    # these choices alone

All choices of a seed start from the same weights and see the same bytes in the same order, so the difference of two
losses is the effect of the choice; the difference between seeds is the noise. One process, not compiled, because only
losses are read. Half-precision products run on aten, which rounds each result once, as tensor cores do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpt import GPT, Shape, losses_of, muon_names
from pictures import write_svg
from rich.console import Console
from rich.table import Table
from torch.optim.lr_scheduler import LambdaLR

import compile_muon

_RESULTS = Path(__file__).with_name("results")
LAST = 50  # steps whose mean loss is a run's result

# Width 96 has matrices of 288 × 96, 96 × 96, 384 × 96 and 96 × 384; "auto" takes gram for all but the square ones.
SHAPE = Shape(layers=2, width=96, heads=4, context=64, batch=8)


@dataclass(frozen=True)
class Choice:
    """The settings of Newton–Schulz in one run."""

    coefficients: str
    method: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.coefficients}, {self.method}, {self.dtype}"


# The first choice of a set of coefficients is the reference of the others, jordan's that of four_steps. Gram in float32
# differs from it by rounding only, a few millionths: the difference of their losses is chance.
CHOICES = (
    Choice("jordan", "standard", "float32"),
    Choice("jordan", "gram", "float32"),
    Choice("jordan", "standard", "bfloat16"),
    Choice("jordan", "gram", "bfloat16"),
    Choice("jordan", "gram", "float16"),
    Choice("jordan", "standard", "float16"),
    Choice("you", "standard", "bfloat16"),
    Choice("you", "gram", "float16"),
    Choice("polar_express", "standard", "bfloat16"),
    Choice("polar_express", "gram", "float16"),
    Choice("four_steps", "standard", "bfloat16"),
    Choice("four_steps", "gram", "float16"),
)
COMPARED = {"four_steps": "jordan"}


def train(choice: Choice, seed: int, steps: int) -> list[float]:
    """Train; return the loss of every step, in nats a byte."""
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    matrices = len(muon_names(model))
    optimizer = compile_muon.MuonZero(
        model,
        lr=0.02,
        adamw_lr=3e-3,
        weight_decay=0.01,
        adamw_weight_decay=0.01,
        ns_coefficients=choice.coefficients,
        ns_method=choice.method,
        ns_dtype=choice.dtype,
        stage=0,
        update="step",
    )
    count = sum(1 for row in optimizer.summary().rows if row.algorithm == "muon")
    if count != matrices:
        raise RuntimeError(f"{count} matrices got Muon, expected {matrices}")
    # Ten steps of warm-up, then down to a tenth: at a constant rate the noise of single steps hides differences.
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - 0.9 * step / steps))
    return losses_of(model, SHAPE, optimizer, steps, 1000 + seed, schedule)


def spread(values: list[float]) -> float:
    """Return the standard deviation over seeds; 0 for one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def summarize(runs: list[dict]) -> list[dict]:
    """Return a row for each choice: mean loss and spread over seeds, and of differences, seed by seed, to its base."""
    last = {(Choice(**run["choice"]), run["seed"]): run["last"] for run in runs}
    rows = []
    chosen = [choice for choice in CHOICES if any(choice == c for c, _ in last)]
    for choice in chosen:
        wanted = COMPARED.get(choice.coefficients, choice.coefficients)
        base = next((c for c in chosen if c.coefficients == wanted), choice)
        seeds = [seed for (c, seed) in last if c == choice and (base, seed) in last]
        if seeds:
            losses = [last[choice, seed] for seed in seeds]
            differences = [last[choice, seed] - last[base, seed] for seed in seeds]
            rows.append(
                asdict(choice)
                | {"seeds": len(seeds), "loss": statistics.fmean(losses), "loss_spread": spread(losses)}
                | {"difference": statistics.fmean(differences), "difference_spread": spread(differences)}
                | {"differences": differences}
            )
    return rows


def print_report(console: Console, rows: list[dict], title: str) -> None:
    table = Table(title=title)
    for heading in ("set", "method", "dtype", "seeds", "loss", "±", "difference", "± "):
        table.add_column(heading, justify="left" if heading in ("set", "method", "dtype") else "right")
    for row in rows:
        table.add_row(
            *(row[key] for key in ("coefficients", "method", "dtype")),
            str(row["seeds"]),
            *(f"{row[key]:.4f}" for key in ("loss", "loss_spread")),
            *(f"{row[key]:+.4f}" for key in ("difference",)),
            f"{row['difference_spread']:.4f}",
        )
    console.print(table)


def draw(rows: list[dict], title: str, path: Path) -> None:
    """Draw each choice's difference to the first of its set: a dot for each seed, a bar at their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.42 * len(rows) + 1.6))
    for place, row in enumerate(rows):
        axis.plot(row["differences"], [place] * row["seeds"], "o", color="tab:blue", alpha=0.6)
        axis.plot([row["difference"]], [place], "|", color="black", markersize=16)
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [f"{r['coefficients']}, {r['method']}, {r['dtype']}" for r in rows])
    axis.invert_yaxis()
    axis.set_xlabel(f"loss of the last {LAST} steps, minus that of the first choice of its set (nats a byte)")
    axis.set_title(title, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    write_svg(figure, path)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="+", choices=list(map(str, CHOICES)), default=list(map(str, CHOICES)))
    parser.add_argument("--json", type=Path, default=_RESULTS / "ns_training.json")
    parser.add_argument("--svg", type=Path, help="default: the JSON file's name with .svg")
    options = parser.parse_args(argv)
    for name in ("seeds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least 1")
    options.svg = options.svg or options.json.with_suffix(".svg")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)  # so that a run's bits depend on its seed alone
    console = Console(width=None if sys.stdout.isatty() else 120)
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "torch": torch.__version__,
        "platform": platform.machine(),
        "shape": vars(SHAPE),
        "steps": options.steps,
        "last": LAST,
    }
    title = (
        f"{SHAPE.layers}-layer GPT, width {SHAPE.width}, {options.steps} steps of {SHAPE.batch * SHAPE.context} bytes, "
        f"{options.seeds} seeds, CPU, torch {torch.__version__}"
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    runs: list[dict] = []
    for seed in range(options.seeds):
        for choice in (choice for choice in CHOICES if str(choice) in options.only):
            start = time.perf_counter()
            losses = train(choice, seed, options.steps)
            last = statistics.fmean(losses[-LAST:])
            curve = [round(statistics.fmean(losses[i : i + 10]), 5) for i in range(0, len(losses), 10)]
            runs.append({"choice": asdict(choice), "seed": seed, "last": last, "mean_of_10_steps": curve})
            seconds = time.perf_counter() - start
            console.print(f"seed {seed}: {choice}: {last:.4f} ({seconds:.0f} s)", highlight=False)
            # After each run, so that an interrupted campaign leaves its finished runs.
            options.json.write_text(json.dumps(about | {"rows": summarize(runs), "runs": runs}, indent=1) + "\n")
    rows = summarize(runs)
    print_report(console, rows, title)
    draw(rows, title, options.svg)
    console.print(f"losses: {options.json}\nchart:  {options.svg}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
