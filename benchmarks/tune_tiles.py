"""Time candidate tiles of the two matrix-product kernels and write this GPU's table into kernels/gpu/tiles.json.

    python benchmarks/tune_tiles.py               # prints the table it would write
    python benchmarks/tune_tiles.py --write       # and writes it

A tile is kept if it is the fastest at some size; the kept ones are listed from the largest to the smallest, each with
its rate at the largest size. The sizes from which Triton is chosen over cuBLAS are those from which it is at least as
fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from compile_muon.kernels.gpu.operands import empty_matrices
from compile_muon.kernels.gpu.product import product
from compile_muon.kernels.gpu.symmetric import symmetric_product
from compile_muon.kernels.gpu.tiles import Tile, load_tables, work

_FILE = Path(__file__).parents[1] / "kernels" / "gpu" / "tiles.json"
SIZES = (512, 1024, 2048, 4096, 8192)
BATCHED = 4  # matrices, for the threshold of batches


def candidates(capability: tuple[int, int]) -> Iterator[Tile]:
    """Shapes known to do well in Triton's matrix products, on what the architecture has."""
    descriptors = capability >= (9, 0)
    depths = (64, 128) if descriptors else (32, 64)
    shapes = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64))
    for (rows, cols), depth, stages, warps in itertools.product(shapes, depths, (3, 4, 5), (4, 8)):
        if rows * cols // (warps * 32) > 256 or (rows + cols) * depth * stages * 2 > 220 * 1024:
            continue
        tile = Tile(rows, cols, depth, 8, stages, warps, descriptors=descriptors)
        yield tile
        if capability[0] >= 10:
            yield dataclasses.replace(tile, specialize=True)


def milliseconds(run: Callable[[], object]) -> float:
    import triton

    return float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))


def time_tile(kind: str, tile: Tile, x: Tensor, processors: int) -> float:
    """Milliseconds of `kind` on x [b, k, k]; infinite where the tile does not compile for this GPU."""
    out = empty_matrices(*x.shape, like=x, dtype=x.dtype)
    make = symmetric_product if kind == "symmetric" else product
    launch = make(x, x, out, (tile,), processors, plus=x, beta=1.0)
    try:
        return milliseconds(launch.run)
    except Exception as error:  # out of registers or shared memory: not a candidate here
        print(f"{kind} {tile}: {type(error).__name__}", file=sys.stderr)
        return float("inf")


def tune(console: Console) -> dict:
    device = torch.device("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = list(candidates(torch.cuda.get_device_capability()))
    kept: dict[str, list[Tile]] = {}
    for kind in ("symmetric", "product"):
        winners = []
        shaped = [tile for tile in tiles if kind == "product" or tile.cols in (tile.rows, 2 * tile.rows)]
        for size in SIZES:  # the last, the largest, says what rate a tile has
            x = torch.randn(1, size, size, device=device).bfloat16()
            times = {tile: time_tile(kind, tile, x, processors) for tile in shaped}
            winner = min(times, key=lambda tile: times[tile])
            winners.append(winner)
            console.print(f"{kind} {size}: {times[winner]:.4f} ms, {winner}", highlight=False)
        distinct = sorted(set(winners), key=lambda tile: -tile.rows * tile.cols)
        # One tile a size of result: the larger of two equal ones never loses by much, and the choice goes by size.
        chosen = list({tile.rows * tile.cols: tile for tile in reversed(distinct)}.values())[::-1]
        triangle = kind == "symmetric"
        rates = [work(tile, size, size, 1, processors, triangle=triangle) / times[tile] for tile in chosen]
        kept[kind] = [
            dataclasses.replace(tile, rate=round(rate / max(rates), 3))
            for tile, rate in zip(chosen, rates, strict=True)
        ]
    return {
        "source": f"{torch.cuda.get_device_name()}, {datetime.date.today()}, {shlex.join(['python', *sys.argv])}",
        "smallest": _threshold(1, kept, processors),
        "smallest_batched": _threshold(BATCHED, kept, processors),
        "batch": BATCHED,
        **{kind: [dataclasses.asdict(tile) for tile in kept[kind]] for kind in kept},
    }


def _threshold(matrices: int, kept: dict[str, list[Tile]], processors: int) -> int:
    """The smallest size from which on a standard step is at least as fast as on cuBLAS."""
    smallest = 2 * SIZES[-1]
    for size in reversed(SIZES):
        x = torch.randn(matrices, size, size, device="cuda").bfloat16()
        out = empty_matrices(*x.shape, like=x, dtype=x.dtype)
        symmetric, general = tuple(kept["symmetric"]), tuple(kept["product"])
        ours = [
            milliseconds(symmetric_product(x, x, out, symmetric, processors).run),
            milliseconds(symmetric_product(x, x, out, symmetric, processors, plus=x, beta=1.0).run),
            milliseconds(product(x, x, out, general, processors, plus=x, beta=1.0).run),
        ]
        fused = milliseconds(lambda x=x: torch.baddbmm(x, x, x))
        if sum(ours) > 3 * fused:
            break
        smallest = size
    return smallest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"change {_FILE.name}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    console = Console()
    name = "sm_{}{}".format(*torch.cuda.get_device_capability())
    table = tune(console)
    console.print_json(json.dumps({name: table}))
    if options.write:
        tables = json.loads(_FILE.read_text()) | {name: table}
        _FILE.write_text(json.dumps(tables, indent=2) + "\n")
        load_tables.cache_clear()
        console.print(f"written: {sorted(load_tables())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
