"""The Triton matrix products alone, on a GPU: do they launch, are they right, and from which size are they faster?

    python benchmarks/products.py
    python benchmarks/products.py --sizes 4096 --json products.json

For each size the three products of a standard step run: X Xᵀ, bA + cA² and aX + BX, in bfloat16, square. "error" is the
largest error of a 64 × 64 block against float64, beside torch's, which rounds its results, too. "asymmetry" is the
largest difference of a symmetric result from its transpose, relative to its largest entry: tiles on the diagonal may
sum an entry and its mirror in another order, which costs at most one rounding of the result. Times are Triton's
do_bench, beside torch.baddbmm, or torch.bmm where nothing is added. Ends with status 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from orthogonalizers import asymmetry_of, worst_block
from torch import Tensor

from compile_muon.kernels.gpu.newton_schulz import Products, products_on
from compile_muon.kernels.gpu.tiles import architecture

SIZES = (1000, 1024, 2048, 4096, 8192)
BOUND = 4 * torch.finfo(torch.bfloat16).eps


def launches(products: Products, size: int) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], Tensor]]:
    """Return for each product our function, torch's function, and the exact result in float64."""
    x = torch.randn(1, size, size, device="cuda").bfloat16()
    a = products.outer(x) / size  # symmetric to the bit, entries around one
    wide_x, wide_a = x.double(), a.double()
    return {
        "X Xᵀ": (lambda: products.outer(x), lambda: torch.bmm(x, x.mT), wide_x @ wide_x.mT),
        "bA + cA²": (
            lambda: products.symmetric(a, a, plus=a, beta=-4.775, alpha=2.0315),
            lambda: torch.baddbmm(a, a, a, beta=-4.775, alpha=2.0315),
            -4.775 * wide_a + 2.0315 * wide_a @ wide_a,
        ),
        "aX + BX": (
            lambda: products.general(a, x, plus=x, beta=3.4445),
            lambda: torch.baddbmm(x, a, x, beta=3.4445),
            3.4445 * wide_x + wide_a @ wide_x,
        ),
    }


def measure(products: Products, size: int) -> list[dict]:
    import triton

    rows = []
    for name, (ours, theirs, exact) in launches(products, size).items():
        result = ours()
        error, torch_error = (worst_block(y[0], exact[0]) for y in (result, theirs()))
        asymmetry = 0.0 if name == "aX + BX" else asymmetry_of(result[0])
        ms, torch_ms = (triton.testing.do_bench(run, return_mode="median") for run in (ours, theirs))
        row = {"size": size, "product": name, "error": error, "torch_error": torch_error, "asymmetry": asymmetry}
        right = error <= BOUND and asymmetry <= torch.finfo(result.dtype).eps
        rows.append(row | {"ms": ms, "torch_ms": torch_ms, "speed_up": torch_ms / ms, "right": right})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    products = products_on(device)
    if products is None:
        major, minor = torch.cuda.get_device_capability()
        parser.error(f"kernels/gpu/tiles.json has no table for sm_{major}{minor}")
    rows = []
    for size in options.sizes:
        for row in measure(products, size):
            rows.append(row)
            print(
                f"{size:5} {row['product']:9} {'right' if row['right'] else 'WRONG'}  "
                f"error {row['error']:.1e} (torch {row['torch_error']:.1e})  asymmetry {row['asymmetry']:.1e}  "
                f"{row['ms']:.4f} ms (torch {row['torch_ms']:.4f}): {row['speed_up']:.2f} × as fast",
                flush=True,
            )
        if options.json:
            about = {"device": torch.cuda.get_device_name(), "architecture": architecture(device), "rows": rows}
            options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
