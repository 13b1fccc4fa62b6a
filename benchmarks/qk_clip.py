"""The cost of MuonClip in a step: the same model with and without ``qk_clip``, in turns, at several context lengths.

    python benchmarks/qk_clip.py                     one process
    python benchmarks/qk_clip.py --contexts 256 2048

No head exceeds the threshold, so both train alike: the difference is the time to find and compare the largest logits.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from gpt import GPT, PRESETS, read_corpus, sample_batch
from rich.console import Console
from rich.table import Table

import compile_muon

_RESULTS = Path(__file__).parent / "results"


class Run:
    """A model of one context length in training, with or without MuonClip."""

    def __init__(self, args: argparse.Namespace, context: int, threshold: float | None) -> None:
        torch.manual_seed(0)
        self.shape = replace(PRESETS[args.preset], context=context, batch=max(1, args.tokens // context))
        model = GPT(self.shape)
        views = {"*.qkv.weight": {"split": [self.shape.width] * 3}}
        self.optimizer = compile_muon.MuonZero(model, stage=0, muon_views=views, qk_clip=threshold)
        self.model = torch.compile(model, backend="muon_zero")
        self.generator, self.corpus = torch.Generator().manual_seed(1), read_corpus()
        self.seconds: list[float] = []

    def step(self) -> None:
        batch = sample_batch(self.corpus, self.shape, self.generator)
        start = time.perf_counter()
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def measure(args: argparse.Namespace, context: int) -> dict[str, float]:
    """Return the seconds of a step without ``qk_clip``, and the time with it as a multiple of that."""
    # A second run without it, "again", shows the noise of the ratio.
    plain, again, clipped = Run(args, context, None), Run(args, context, None), Run(args, context, 1e9)
    for _ in range(args.steps + args.warmup):
        for run in (plain, clipped, again):
            run.step()
    took = {
        name: run.seconds[args.warmup :] for name, run in (("plain", plain), ("again", again), ("clipped", clipped))
    }
    ratios = {name: statistics.median(b / a for a, b in zip(took["plain"], took[name], strict=True)) for name in took}
    return {"context": context, "seconds": statistics.median(took["plain"]), **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=_RESULTS / "qk_clip.json")
    args = parser.parse_args()
    rows = [measure(args, context) for context in args.contexts]
    table = Table("context", "step without, ms", "the same again", "with qk_clip", title=f"{args.preset}, one process")
    for row in rows:
        ratios = (f"{row[name]:.2f}" for name in ("again", "clipped"))
        table.add_row(f"{row['context']:,}", f"{row['seconds'] * 1e3:,.0f}", *ratios)
    Console().print(table)
    command = f"python benchmarks/qk_clip.py {shlex.join(sys.argv[1:])}".strip()
    args.out.write_text(json.dumps({"command": command, "torch": torch.__version__, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
