"""Time Newton–Schulz: ours against torch.optim.Muon's, a cuBLAS formulation and gram-newton-schulz, in one run.

    python benchmarks/newton_schulz.py                    # a CUDA device: all shapes, and the elementwise kernels
    python benchmarks/newton_schulz.py --eager            # with what launches cost the host
    python benchmarks/newton_schulz.py --device cpu       # small shapes, to see that the harness works

On a GPU every call is captured into a CUDA graph and replayed: a training step queues work ahead of the device, and the
launches of a few small matrices, some 15 to 30 a call for every contender, would otherwise hide what the device does.
Every repeat times all contenders on all shapes in a new shuffled order; reported are medians over repeats. TFLOP/s are
on the *minimal* operation count, symmetric products computed once, whatever a contender really does; the peak is a
square matrix product of the same dtype on random data, timed in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compile_muon.kernels import muon_apply, muon_momentum, newton_schulz, resolve_coefficients
from compile_muon.kernels.operations import gram_flops, standard_flops

_RESULTS = Path(__file__).with_name("results")
STEPS = 5

# name: (matrices, rows, cols)
SHAPES = {
    **{f"square {k}": (1, k, k) for k in (512, 1024, 2048, 4096, 8192)},
    "1B key, value": (1, 512, 2048),
    "1B gate, up": (1, 8192, 2048),
    "1B down": (1, 2048, 8192),
    "8B key, value": (1, 1024, 4096),
    "8B gate, up": (1, 14336, 4096),
    "8B down": (1, 4096, 14336),
    "70B key, value": (1, 1024, 8192),
    "70B gate, up": (1, 28672, 8192),
    "70B down": (1, 8192, 28672),
    "experts": (64, 1408, 2048),
}
SMALL_SHAPES = {"square 64": (1, 64, 64), "wide": (1, 32, 128), "tall": (1, 96, 48), "experts": (3, 24, 40)}


@dataclass(frozen=True)
class Row:
    """Median seconds of one contender on one shape, and what follows from it."""

    shape: str
    matrices: int
    rows: int
    cols: int
    contender: str
    dtype: str
    seconds: float
    fastest_seconds: float
    tflops: float
    percent_of_peak: float


@dataclass(frozen=True)
class Contender:
    """`method` says which minimal count its time is held against, "standard" or "gram"."""

    run: Callable[[Tensor], Tensor]
    method: str
    dtype: torch.dtype


def contenders(console: Console, device: torch.device) -> dict[str, Contender]:
    from torch.optim._muon import _zeropower_via_newtonschulz as zeropower

    triple = resolve_coefficients("jordan").steps[0]
    eager = partial(_each, lambda x: zeropower(x, triple, STEPS, 1e-7))
    compiled = partial(_each, torch.compile(lambda x: zeropower(x, triple, STEPS, 1e-7), dynamic=False))
    chosen = {
        "ours, standard bf16": _ours("standard", torch.bfloat16),
        "ours, standard fp16": _ours("standard", torch.float16),
        "ours, gram fp16": _ours("gram", torch.float16),
        "torch.optim.Muon eager": Contender(eager, "standard", torch.bfloat16),
        "torch.optim.Muon compiled": Contender(compiled, "standard", torch.bfloat16),
        "cuBLAS, batched": Contender(_cublas, "standard", torch.bfloat16),
    }
    theirs = _gram_newton_schulz(device)
    if isinstance(theirs, str):
        console.print(f"[yellow]skipping gram-newton-schulz[/yellow]: {theirs}", soft_wrap=True)
    else:
        chosen["gram-newton-schulz"] = Contender(theirs, "gram", torch.float16)
    return chosen


def _ours(method: str, dtype: torch.dtype) -> Contender:
    return Contender(partial(newton_schulz, method=method, dtype=dtype), method, dtype)


def _each(one: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of one matrix on a batch, as an optimizer that knows no batches does it."""
    return one(x) if x.ndim == 2 else torch.stack([one(matrix) for matrix in x])


def _cublas(x: Tensor) -> Tensor:
    """Every product one addmm or baddbmm, in bfloat16."""
    from compile_muon.kernels.newton_schulz import make_plan
    from compile_muon.kernels.reference import orthogonalize

    return orthogonalize(x, make_plan("standard", "jordan", STEPS, torch.bfloat16, x.device, 1e-7))


def _gram_newton_schulz(device: torch.device) -> Callable[[Tensor], Tensor] | str:
    """The package of that name with its kernels, on jordan's coefficients and ours' restart; or why not."""
    if device.type != "cuda":
        return "it has kernels for GPUs only"
    try:
        from gram_newton_schulz import GramNewtonSchulz
    except ImportError:
        return "it is not installed: pip install gram-newton-schulz"
    jordan = resolve_coefficients("jordan")
    restarts = list(jordan.gram_restarts(torch.float16))
    return GramNewtonSchulz(
        ns_coefficients=[list(triple) for triple in jordan.steps], gram_newton_schulz_reset_iterations=restarts
    )


def minimal_flops(matrices: int, rows: int, cols: int, method: str) -> float:
    k, l = min(rows, cols), max(rows, cols)  # noqa: E741
    if method == "standard":
        return matrices * standard_flops(k, l, STEPS, symmetric=True)
    restarts = len(resolve_coefficients("jordan").gram_restarts(torch.float16))
    return matrices * gram_flops(k, l, STEPS, restarts, symmetric=True)


def seconds(run: Callable[[], object], device: torch.device, at_least: float, *, graph: bool) -> float:
    """Mean over as many calls as `at_least` seconds take, by the device's own clock on CUDA; replayed with `graph`."""
    if device.type != "cuda":
        run()
        started, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - started < at_least:
            run()
            calls += 1
        return (time.perf_counter() - started) / calls
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    calls = max(1, int(at_least / (start.elapsed_time(end) / 1e3)))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def elementwise(device: torch.device, elements: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Name: (call, bytes it has to move). "copy" is the bandwidth the others are held against."""
    a, b = torch.randn(elements, device=device), torch.randn(elements, device=device)
    half = torch.randn(elements, device=device).bfloat16()
    lr = torch.tensor(1e-3, device=device)
    weights = torch.tensor([0.05], device=device), torch.tensor([0.95], device=device)
    return {
        "copy": (lambda: b.copy_(a), 8 * elements),
        "muon_momentum": (
            lambda: muon_momentum(a, b, beta=weights, nesterov=True, out_dtype=torch.bfloat16),
            14 * elements,  # two float32 read, one float32 and one bfloat16 written
        ),
        "muon_apply": (lambda: muon_apply([a], [half], lr=lr, weight_decay=0.1, scale=1.0), 10 * elements),
    }


def time_all(options: argparse.Namespace, console: Console) -> dict:
    """Median and fastest seconds of everything, keyed by what it is."""
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    shapes = {name: (SHAPES if on_gpu else SMALL_SHAPES)[name] for name in options.shapes}
    side, elements = (8192, 2**28) if on_gpu else (256, 2**16)  # 1 GiB of float32
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    chosen = contenders(console, device)
    for shape, (matrices, rows, cols) in shapes.items():
        x = torch.randn((matrices, rows, cols) if matrices > 1 else (rows, cols), device=device)
        for name, contender in chosen.items():
            calls[shape, name] = partial(contender.run, x)
    for dtype in (torch.bfloat16, torch.float16):
        p, q = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        calls["peak", str(dtype)] = partial(torch.mm, p, q)
    x = torch.randn(side // 2, side // 2, device=device).bfloat16()
    calls["XXᵀ", "torch"] = partial(lambda x: x @ x.mT, x)
    ours = _triton_square(x)
    if ours is not None:
        calls["XXᵀ", "ours"] = ours
    moved = {}
    for name, (call, size) in elementwise(device, elements).items():
        calls["elementwise", name], moved[name] = call, size
    console.print(f"{len(calls)} timings, {options.repeats} repeats; first a warm-up of each")
    failed = {}
    for key, call in list(calls.items()):
        try:
            call()
            seconds(call, device, 0.0, graph=options.graph)
        except Exception as error:  # a contender that cannot do a shape is reported, not fatal
            failed[key] = f"{type(error).__name__}: {error}".splitlines()[0]
            console.print(f"[red]{' '.join(key)} failed[/red]: {failed[key]}", soft_wrap=True)
            del calls[key]
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    order = random.Random(options.seed)
    for _ in range(options.repeats):
        keys = list(calls)
        order.shuffle(keys)
        for key in keys:
            samples[key].append(seconds(calls[key], device, options.seconds, graph=options.graph))
    return {
        "times": {key: (statistics.median(s), min(s)) for key, s in samples.items()},
        "contenders": chosen,
        "shapes": shapes,
        "side": side,
        "moved": moved,
        "failed": {" ".join(key): reason for key, reason in failed.items()},
    }


def _triton_square(x: Tensor) -> Callable[[], object] | None:
    from compile_muon.kernels.dispatch import triton_kernels

    kernels = triton_kernels()
    products = kernels.products_on(x.device) if kernels and x.is_cuda else None
    return None if products is None else partial(products.symmetric, x[None], x[None])


def rows_of(measured: dict) -> list[Row]:
    rows = []
    peak = {
        dtype: 2 * measured["side"] ** 3 / measured["times"]["peak", str(dtype)][0]
        for dtype in (torch.bfloat16, torch.float16)
    }
    for shape, (matrices, m, n) in measured["shapes"].items():
        for name, contender in measured["contenders"].items():
            if (shape, name) not in measured["times"]:
                continue
            median, fastest = measured["times"][shape, name]
            rate = minimal_flops(matrices, m, n, contender.method) / median
            dtype = str(contender.dtype).removeprefix("torch.")
            percent = 100 * rate / peak[contender.dtype]
            rows.append(Row(shape, matrices, m, n, name, dtype, median, fastest, rate / 1e12, percent))
    return rows


def judge(rows: list[Row], measured: dict) -> list[tuple[str, bool | None]]:
    """The bars, each with what was measured."""
    verdicts: list[tuple[str, bool | None]] = []
    at = {(row.shape, row.contender): row for row in rows}
    for row in rows:
        k = min(row.rows, row.cols)
        if row.contender.startswith("ours") and k >= 1024:
            bar = 65 if k >= 2048 else 50
            text = f"{row.contender}, {row.shape}: {row.percent_of_peak:.0f} % of peak (bar: {bar})"
            verdicts.append((text, row.percent_of_peak >= bar))
    for shape in measured["shapes"]:
        ours = [row for row in rows if row.shape == shape and row.contender.startswith("ours")]
        others = [row for row in rows if row.shape == shape and not row.contender.startswith("ours")]
        if ours and others:
            best, rival = (min(side, key=lambda row: row.seconds) for side in (ours, others))
            ratio = rival.seconds / best.seconds
            text = f"{shape}: {best.contender} is {ratio:.2f} × as fast as {rival.contender} (bar: 1)"
            verdicts.append((text, ratio >= 1))
    gram, compiled = at.get(("1B down", "ours, gram fp16")), at.get(("1B down", "torch.optim.Muon compiled"))
    if gram and compiled:
        ratio = compiled.seconds / gram.seconds
        verdicts.append((f"gram at α = 4, k = 2048: {ratio:.2f} × as fast as compiled standard (bar: 2)", ratio >= 2))
    times = measured["times"]
    if ("XXᵀ", "ours") in times:
        ratio = times["XXᵀ", "torch"][0] / times["XXᵀ", "ours"][0]
        verdicts.append((f"XXᵀ at {measured['side'] // 2}: {ratio:.2f} × as fast as torch (bar: 1.6)", ratio >= 1.6))
    else:
        verdicts.append(("XXᵀ: no Triton kernel runs on this device", None))
    copy = measured["moved"]["copy"] / times["elementwise", "copy"][0]
    for name, size in measured["moved"].items():
        if name != "copy":
            percent = 100 * size / times["elementwise", name][0] / copy
            verdicts.append((f"{name}: {percent:.0f} % of copy bandwidth (bar: 85)", percent >= 85))
    return verdicts


def print_report(console: Console, rows: list[Row], verdicts: list[tuple[str, bool | None]], title: str) -> None:
    table = Table(title=title)
    for heading in ("shape", "contender", "ms", "TFLOP/s", "% of peak", "speed-up"):
        table.add_column(heading, justify="left" if heading in ("shape", "contender") else "right")
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous is not None and previous.shape != row.shape:
            table.add_section()
        base = next((r for r in rows if (r.shape, r.contender) == (row.shape, "torch.optim.Muon compiled")), None)
        size = "×".join(map(str, (row.matrices, row.rows, row.cols)))
        table.add_row(
            f"{row.shape} [{size}]",
            row.contender,
            f"{row.seconds * 1e3:.3f}",
            f"{row.tflops:.1f}",
            f"{row.percent_of_peak:.0f}",
            "-" if base is None else f"{base.seconds / row.seconds:.2f}",
        )
    console.print(table)
    for text, met in verdicts:
        mark = {True: "[green]met[/green]", False: "[red]MISSED[/red]", None: "[yellow]open[/yellow]"}[met]
        console.print(f"{mark}  {text}", soft_wrap=True)


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Speed over torch.optim.Muon compiled, by shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = list(dict.fromkeys(row.contender for row in rows))
    figure, axis = plt.subplots(figsize=(max(8, len(shapes)), 5))
    width = 0.8 / len(names)
    base = {row.shape: row.seconds for row in rows if row.contender == "torch.optim.Muon compiled"}
    for i, name in enumerate(names):
        mine = [row for row in rows if row.contender == name and row.shape in base]
        places = [shapes.index(row.shape) + (i - (len(names) - 1) / 2) * width for row in mine]
        axis.bar(places, [base[row.shape] / row.seconds for row in mine], width * 0.92, label=name)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right", fontsize=8)
    axis.set_ylabel("times as fast as torch.optim.Muon's, compiled")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help=f"some of: {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each timing, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the timings")
    parser.add_argument("--eager", action="store_true", help="call instead of replaying CUDA graphs")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/newton_schulz_DEVICE.json")
    parser.add_argument("--png", type=Path, help="default: the JSON file's name with .png")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; --device cpu tries the harness on small shapes")
    known = SHAPES if options.device == "cuda" else SMALL_SHAPES
    options.shapes = options.shapes or list(known)
    unknown = [name for name in options.shapes if name not in known]
    if unknown:
        parser.error(f"--shapes {unknown[0]!r} is unknown; expected some of: {', '.join(known)}")
    options.graph = options.device == "cuda" and not options.eager
    variant = f"{options.device}_eager" if options.device == "cuda" and options.eager else options.device
    options.json = options.json or _RESULTS / f"newton_schulz_{variant}.json"
    options.png = options.png or options.json.with_suffix(".png")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 2 * len(SHAPES)  # a contender compiled for each shape, none left eager
    measured = time_all(options, console)
    rows = rows_of(measured)
    verdicts = judge(rows, measured)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    called = "replayed" if options.graph else "called"
    title = f"Newton–Schulz, {STEPS} steps, {called}, {name}, torch {torch.__version__}, {date}"
    print_report(console, rows, verdicts, title)
    about = {"device": name, "date": date, "torch": torch.__version__, "command": " ".join(["python", *sys.argv])}
    about |= {"rows": [asdict(row) for row in rows], "failed": measured["failed"]}
    about |= {"verdicts": [{"text": text, "met": met} for text, met in verdicts]}
    about |= {"others_s": {" ".join(k): v[0] for k, v in measured["times"].items() if k[0] not in measured["shapes"]}}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(about, indent=1) + "\n")
    draw(rows, title, options.png)
    console.print(f"samples: {options.json}\nchart:   {options.png}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
