"""Whole Newton–Schulz of a step's lists on a GPU: in one call, in a replay of that call, and matrix by matrix.

    python benchmarks/lists.py --json lists.json
    python benchmarks/lists.py --cases "1b, 20 matrices" --seconds 0.1

Each way runs until clocks have settled, and is timed for as long again. Before and after each case a square matrix
product of the same dtype runs as long: percentages are relative to its sustained rate. TFLOP/s count the minimal
operations, symmetric products once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from gpt import PRESETS, Shape
from orthogonalizers import STEPS
from torch import Tensor
from turns import capture, release, seconds

from compile_muon.kernels import newton_schulz_list
from compile_muon.kernels.coefficients import resolve_coefficients
from compile_muon.kernels.dispatch import chosen_form
from compile_muon.kernels.operations import gram_flops, standard_flops

SIDE = 8192  # of the product that percentages are relative to
LAYERS = 5  # of `train_step.py --preset 1b`, whose step has four such lists


def of_layers(shape: Shape, layers: int) -> list[tuple[int, int]]:
    """List the shapes of the hidden matrices of so many layers."""
    width = shape.width
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


CASES = {
    "1b, 20 matrices": of_layers(PRESETS["1b"], LAYERS),
    "8 of 4096 × 4096": [(4096, 4096)] * 8,
    "64 of 1408 × 2048": [(1408, 2048)] * 64,
}
KINDS = (("standard", "bfloat16"), ("auto", "float16"))


def needed(shapes: Sequence[tuple[int, int]], method: str, dtype: str) -> float:
    """Count operations, symmetric products once; dispatch resolves "auto"."""
    restarts = len(resolve_coefficients("jordan", STEPS).gram_restarts(getattr(torch, dtype)))
    total = 0.0
    for shape in shapes:
        k, l = sorted(shape)  # noqa: E741
        form = chosen_form(method, k, l, STEPS, restarts, symmetric=True)
        if form == "standard":
            total += standard_flops(k, l, STEPS, symmetric=True)
        else:
            total += gram_flops(k, l, STEPS, restarts, symmetric=True)
    return total


def settled(run: Callable[[], object], at_least: float) -> float:
    """Return the seconds of a call, after ``at_least`` seconds of calls for the clocks to settle."""
    device = torch.device("cuda")
    run()
    seconds(run, device, at_least)
    return seconds(run, device, at_least)


def sustained(dtype: str, at_least: float) -> float:
    """Return the operations a second of a square product."""
    x = torch.randn(SIDE, SIDE, device="cuda").to(getattr(torch, dtype))
    out = torch.empty_like(x)
    return 2 * SIDE**3 / settled(lambda: torch.mm(x, x, out=out), at_least)


def ways_of(xs: list[Tensor], method: str, dtype: str) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    call = partial(newton_schulz_list, method=method, dtype=dtype)
    call(xs)  # ahead of the capture, because a first call copies tables to the device
    replayed, _ = capture(lambda: call(xs))
    return {"list": lambda: call(xs), "replayed": replayed, "single": lambda: [call([x]) for x in xs]}


def measure(shapes: list[tuple[int, int]], method: str, dtype: str, at_least: float) -> list[dict[str, object]]:
    xs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    before = sustained(dtype, at_least)
    took = {way: settled(run, at_least) for way, run in ways_of(xs, method, dtype).items()}
    peak = statistics.fmean((before, sustained(dtype, at_least)))
    work = needed(shapes, method, dtype)
    return [
        {
            "method": method,
            "dtype": dtype,
            "way": way,
            "ms": 1e3 * time,
            "tflops": work / time / 1e12,
            "of_sustained": work / time / peak,
            "sustained_tflops": peak / 1e12,
        }
        for way, time in took.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each timing, and of what goes before it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    rows: list[dict[str, object]] = []
    for case in options.cases:
        for method, dtype in KINDS:
            for row in measure(CASES[case], method, dtype, options.seconds):
                rows.append({"case": case, **row})
                print(
                    f"{case:18} {method:8} {dtype:8} {row['way']:8} {row['ms']:9.3f} ms {row['tflops']:6.0f} TFLOP/s, "
                    f"{row['of_sustained']:.0%} of a product's {row['sustained_tflops']:.0f}",
                    flush=True,
                )
            release(torch.device("cuda"))
            if options.json:
                about = {"device": torch.cuda.get_device_name(), "rows": rows}
                options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
