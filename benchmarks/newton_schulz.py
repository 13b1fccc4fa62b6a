"""Time Newton–Schulz: ours against torch.optim.Muon's, a cuBLAS formulation and other libraries, in one run.

    python benchmarks/newton_schulz.py                    # a CUDA device: all shapes, and the elementwise kernels
    python benchmarks/newton_schulz.py --eager            # with the host's time for launches
    python benchmarks/newton_schulz.py --device cpu       # small shapes, to see that the harness works

On a GPU every call is captured into a CUDA graph and replayed: a training step queues work ahead of the device, and the
launches of a few small matrices, some 15 to 30 a call for every contender, would otherwise hide the device's time.

Each contender has a process of its own, and the result of a timed call is first checked against float64: a wrong
contender is reported and not timed, a failing one is named and left out. On every shape contenders take turns, in an
order shuffled anew every round; the report has medians over rounds. On "8B, all matrices", the hidden matrices of
Llama 3 8B in one call, contenders run one after another, for they would not fit side by side. TFLOP/s count the
*minimal* operations, symmetric products once, whatever a contender computes; the peak is a square matrix product of the
same dtype on random data, timed in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import shlex
import signal
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from orthogonalizers import CONTENDERS, SHAPES, SMALL_SHAPES, STEPS, WHOLE_MODEL, YARDSTICK, Case, whole_model
from pictures import write_svg
from rich.console import Console
from rich.table import Table
from turns import Process, Rounds
from yardsticks import ELEMENTWISE, cases

_RESULTS = Path(__file__).with_name("results")
LAYERS = 32  # of Llama 3 8B


@dataclass(frozen=True)
class Row:
    """The median seconds of one contender on one shape, and its rates."""

    shape: str
    groups: tuple[tuple[int, int, int], ...]  # (matrices, rows, cols) each
    contender: str
    dtype: str
    seconds: float
    fastest_seconds: float
    tflops: float
    percent_of_peak: float | None


@dataclass(frozen=True)
class Measured:
    """Median and fastest seconds by case and contender, and the complaints about others."""

    shapes: dict[str, Case]
    yardsticks: dict[str, Case]
    times: dict[tuple[str, str], tuple[float, float]]
    wrong: dict[tuple[str, str], str]
    failed: dict[tuple[str, str], str]
    missing: dict[str, str]

    @property
    def unsound(self) -> bool:
        """True if a contender of this project failed or was wrong, or nothing was measured."""
        others = {"gram-newton-schulz", "QuACK", "torch grouped"}
        return not self.times or any(name not in others for _, name in {**self.wrong, **self.failed})


def time_all(options: argparse.Namespace, console: Console) -> tuple[Measured, bool]:
    """Time all contenders; return the measurements, and whether a signal cut them short."""
    on_gpu = options.device == "cuda"
    shapes = {name: cases_of(options)[name] for name in options.shapes}
    yardsticks = cases(on_gpu)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    rounds = Rounds(
        lambda name: Process(name, options.device, options.graph, options.timeout),
        repeats=options.repeats,
        at_least=options.seconds,
        order=random.Random(options.seed),
        say=say,
    )
    stopped = False
    try:
        for case, names in yardsticks.values():
            say(case.name)
            rounds.run(case, names)
        rounds.close()
        for case in shapes.values():
            say(case.name)
            rounds.run(case, options.contenders)
    except Stopped:
        stopped = True
        say("stopped: what follows is what there is")
    finally:
        rounds.close()
    measured = Measured(
        shapes,
        {name: case for name, (case, _) in yardsticks.items()},
        {key: (statistics.median(s), min(s)) for key, s in rounds.samples.items()},
        rounds.wrong,
        rounds.failed,
        rounds.missing,
    )
    return measured, stopped


def rows_of(measured: Measured) -> list[Row]:
    rows = []
    side = measured.yardsticks["peak"].groups[0][1]
    for name, case in measured.shapes.items():
        for contender, about in CONTENDERS.items():
            if (name, contender) not in measured.times:
                continue
            dtype = str(about.dtype).removeprefix("torch.")
            median, fastest = measured.times[name, contender]
            rate = case.minimal_flops(about.method) / median
            peak = measured.times.get(("peak", f"mm {dtype}"))
            percent = None if peak is None else 100 * rate / (2 * side**3 / peak[0])
            rows.append(Row(name, case.groups, contender, dtype, median, fastest, rate / 1e12, percent))
    return rows


def judge(rows: list[Row], measured: Measured) -> list[tuple[str, bool | None]]:
    """Compare the measurements with the project's bars."""
    verdicts: list[tuple[str, bool | None]] = []
    at = {(row.shape, row.contender): row for row in rows}
    for row in rows:
        k = min(row.groups[0][1:])
        if row.contender.startswith("ours") and k >= 1024 and len(row.groups) == 1 and row.percent_of_peak is not None:
            bar = 65 if k >= 2048 else 50
            text = f"{row.contender}, {row.shape}: {row.percent_of_peak:.0f} % of peak (bar: {bar})"
            verdicts.append((text, row.percent_of_peak >= bar))
    for shape in measured.shapes:
        ours = [row for row in rows if row.shape == shape and row.contender.startswith("ours")]
        others = [row for row in rows if row.shape == shape and not row.contender.startswith("ours")]
        if ours and others:
            best, rival = (min(side, key=lambda row: row.seconds) for side in (ours, others))
            ratio = rival.seconds / best.seconds
            text = f"{shape}: {best.contender} is {ratio:.2f} × as fast as {rival.contender} (bar: 1)"
            verdicts.append((text, ratio >= 1))
        if ours and (shape, YARDSTICK) in at and shape == WHOLE_MODEL:
            ratio = at[shape, YARDSTICK].seconds / best.seconds
            text = f"{shape}: {best.contender} is {ratio:.2f} × as fast as {YARDSTICK} (bar: 1.5)"
            verdicts.append((text, ratio >= 1.5))
    gram, compiled = at.get(("1B down", "ours, gram fp16")), at.get(("1B down", YARDSTICK))
    if gram and compiled:
        ratio = compiled.seconds / gram.seconds
        verdicts.append((f"gram at α = 4, k = 2048: {ratio:.2f} × as fast as compiled standard (bar: 2)", ratio >= 2))
    times = measured.times
    if {("XXᵀ", "XXᵀ of torch"), ("XXᵀ", "XXᵀ of ours")} <= set(times):
        ratio = times["XXᵀ", "XXᵀ of torch"][0] / times["XXᵀ", "XXᵀ of ours"][0]
        size = measured.yardsticks["XXᵀ"].groups[0][1]
        verdicts.append((f"XXᵀ at {size}: {ratio:.2f} × as fast as torch (bar: 1.6)", ratio >= 1.6))
    else:
        verdicts.append(("XXᵀ: not measured", None))
    speeds = {n: moved / times["elementwise", n][0] for n, moved in ELEMENTWISE.items() if ("elementwise", n) in times}
    copy = speeds.pop("copy", None)
    for name, speed in speeds.items() if copy else ():
        verdicts.append((f"{name}: {100 * speed / copy:.0f} % of copy bandwidth (bar: 85)", speed >= 0.85 * copy))
    return verdicts


def print_report(console: Console, rows: list[Row], verdicts: list[tuple[str, bool | None]], title: str) -> None:
    table = Table(title=title)
    for heading in ("shape", "contender", "ms", "TFLOP/s", "% of peak", "speed-up"):
        table.add_column(heading, justify="left" if heading in ("shape", "contender") else "right")
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous is not None and previous.shape != row.shape:
            table.add_section()
        base = next((r for r in rows if (r.shape, r.contender) == (row.shape, YARDSTICK)), None)
        size = ", ".join("×".join(map(str, group)) for group in row.groups)
        table.add_row(
            f"{row.shape} [{size}]",
            row.contender,
            f"{row.seconds * 1e3:.3f}",
            f"{row.tflops:.1f}",
            "-" if row.percent_of_peak is None else f"{row.percent_of_peak:.0f}",
            "-" if base is None else f"{base.seconds / row.seconds:.2f}",
        )
    console.print(table)
    for text, met in verdicts:
        mark = {True: "[green]met[/green]", False: "[red]MISSED[/red]", None: "[yellow]open[/yellow]"}[met]
        console.print(f"{mark}  {text}", soft_wrap=True)


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Draw speeds over torch.optim.Muon compiled, by shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = list(dict.fromkeys(row.contender for row in rows))
    figure, axis = plt.subplots(figsize=(max(8, len(shapes)), 5))
    width = 0.8 / len(names)
    base = {row.shape: row.seconds for row in rows if row.contender == YARDSTICK}
    for i, name in enumerate(names):
        shown = [row for row in rows if row.contender == name and row.shape in base]
        places = [shapes.index(row.shape) + (i - (len(names) - 1) / 2) * width for row in shown]
        axis.bar(places, [base[row.shape] / row.seconds for row in shown], width * 0.92, label=name)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right", fontsize=8)
    axis.set_ylabel("times as fast as torch.optim.Muon's, compiled")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_svg(figure, path)
    plt.close(figure)


def cases_of(options: argparse.Namespace) -> dict[str, Case]:
    on_gpu = options.device == "cuda"
    whole = whole_model(options.layers) if on_gpu else whole_model(min(options.layers, 2), shrink=64)
    return (SHAPES if on_gpu else SMALL_SHAPES) | {WHOLE_MODEL: whole}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help=f"some of: {', '.join((*SHAPES, WHOLE_MODEL))}")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"some of: {'; '.join(CONTENDERS)}")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f'of "{WHOLE_MODEL}"')
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each timing, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the timings")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a contender to compile or be timed")
    parser.add_argument("--eager", action="store_true", help="call instead of replaying CUDA graphs")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/newton_schulz_DEVICE.json")
    parser.add_argument("--svg", type=Path, help="default: the JSON file's name with .svg")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; --device cpu tries the harness on small shapes")
    for name in ("layers", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least 1")
    for name, known in (("shapes", cases_of(options)), ("contenders", CONTENDERS)):
        chosen = getattr(options, name) or list(known)
        setattr(options, name, chosen)
        unknown = [value for value in chosen if value not in known]
        if unknown:
            parser.error(f"--{name} {unknown[0]!r} is unknown; expected some of: {', '.join(known)}")
    options.graph = options.device == "cuda" and not options.eager
    variant = f"{options.device}_eager" if options.device == "cuda" and options.eager else options.device
    options.json = options.json or _RESULTS / f"newton_schulz_{variant}.json"
    options.svg = options.svg or options.json.with_suffix(".svg")
    return options


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived: the measurements so far are reported."""


def _stop(number: int, frame: object) -> None:
    raise Stopped


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    console = Console(width=None if sys.stdout.isatty() else 140)
    measured, stopped = time_all(options, console)
    rows = rows_of(measured)
    verdicts = judge(rows, measured)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    called = "replayed" if options.graph else "called"
    title = f"Newton–Schulz, {STEPS} steps, {called}, {name}, torch {torch.__version__}, {date}"
    print_report(console, rows, verdicts, title)
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    about = {"device": name, "date": date, "torch": torch.__version__, "command": command, "stopped": stopped}
    about |= {"rows": [asdict(row) for row in rows]}
    about |= {kind: [[*key, why] for key, why in getattr(measured, kind).items()] for kind in ("wrong", "failed")}
    about |= {"missing": measured.missing, "verdicts": [{"text": text, "met": met} for text, met in verdicts]}
    about |= {"others_s": {yard: s for (case, yard), (s, _) in measured.times.items() if case not in measured.shapes}}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(about, indent=1) + "\n")
    console.print(f"samples: {options.json}", soft_wrap=True)
    try:
        draw(rows, title, options.svg)
        console.print(f"chart:   {options.svg}", soft_wrap=True)
    except ImportError as error:
        console.print(f"no chart: {error}", soft_wrap=True)
    return 1 if measured.unsound else 0


if __name__ == "__main__":
    sys.exit(main())
