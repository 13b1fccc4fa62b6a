"""What a mesh costs: bytes a rank sends per step over each axis, and what it keeps, from the formulas.

    python benchmarks/mesh_bytes.py                       # an 8 B dense model, stage 3, on 8, 64 and 512 ranks
    python benchmarks/mesh_bytes.py --state-over all      # masters, gradients and optimizer state cut over both axes
    python benchmarks/mesh_bytes.py --stage 2 --mesh 4x16 1x64

Weights and gradients travel in bfloat16, Newton-Schulz runs in bfloat16, masters and state are float32. No model is
built; docs/parallelism.md holds what this prints.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

from compile_muon.passes.costs import OVER_ALL, bytes_by_axis, weight_bytes_by_axis

BFLOAT16, FLOAT32 = 2, 4
#: one decoder layer of Llama 3 8B: (rows, cols) of its matrices
BLOCK = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
TABLES = ((128256, 4096), (128256, 4096))
LAYERS = 32


@dataclass(frozen=True)
class Cost:
    """Of one rank.

    Args:
        kept: bytes of master weights, gradients and optimizer state, and of resident weights.
        sent: bytes per step by axis.
    """

    kept: float
    sent: dict[str, float]


def cost(replicas: int, shards: int, stage: int, over: str = "shard") -> Cost:
    """Of the 8 B model, one micro-batch a step."""
    sent: Counter[str] = Counter()
    kept = 0.0
    matrices = [(shape, True) for shape in BLOCK * LAYERS] + [(shape, False) for shape in TABLES]
    size = {"shards": shards, "replicas": replicas, "itemsize": BFLOAT16}
    over_all = over == "all" and replicas > 1
    suffix = OVER_ALL if over_all else ""
    # forward and backward; or the refresh
    gathers = ["all_gather"] * (2 if stage == 3 else 1) + ["slice_gather"] * over_all
    for shape, muon in matrices:
        numel = shape[0] * shape[1]
        state = 1 if muon else 2  # momentum; both of Adam's moments
        kept += numel * FLOAT32 * (2 + state) / (shards * replicas if over_all else shards)
        if stage < 3:
            kept += numel * BFLOAT16
        elif over_all:
            kept += numel * BFLOAT16 / shards
        for collective in [*gathers, "reduce_scatter" + suffix]:
            for axis, nbytes in weight_bytes_by_axis(collective, *shape, **size).items():
                sent[axis] += int(nbytes)
        if muon:
            for axis, nbytes in bytes_by_axis("owner" + suffix, *shape, **size).items():
                sent[axis] += int(nbytes)
    return Cost(kept, dict(sent))


def mesh(text: str) -> tuple[int, int]:
    """``"8x64"``: replicas and shards."""
    replicas, shards = map(int, text.split("x"))
    return replicas, shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    default = [(1, 8), (1, 64), (8, 8), (1, 512), (8, 64), (64, 8)]
    parser.add_argument("--mesh", type=mesh, nargs="+", default=default, metavar="RxS", help="replicas x shards")
    parser.add_argument("--state-over", default="shard", choices=("shard", "all"), help="shard_state_over")
    args = parser.parse_args()
    axes = ("shard", "replicate", "all") if args.state_over == "all" else ("shard", "replicate")
    columns = ["replicate x shard", "kept per rank, GiB", *(f"sent over `{axis}`, GB" for axis in axes)]
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))
    for replicas, shards in args.mesh:
        found = cost(replicas, shards, args.stage, args.state_over)
        sent = [f"{found.sent.get(axis, 0) / 1e9:.2f}" for axis in axes]
        print(f"| {replicas} x {shards} | {found.kept / 2**30:.1f} | {' | '.join(sent)} |")


if __name__ == "__main__":
    main()
