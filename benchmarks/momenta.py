"""Momenta in fewer bits: the last loss, beside momenta in float32, from the same weights on the same batches.

python benchmarks/momenta.py                     three seeds, 200 steps each
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from gpt import GPT, PRESETS, losses_of
from rich.console import Console

import compile_muon

SHAPE = PRESETS["tiny"]
KEPT = (None, "bfloat16", "8bit")
LAST = 20  # steps that a run is judged by


def train(kept: str | None, seed: int, steps: int) -> float:
    """Train with momenta of dtype ``kept``; return the mean loss of the last steps, in nats a byte."""
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    optimizer = compile_muon.MuonZero(
        model, lr=0.01, adamw_lr=3e-3, weight_decay=0.01, momentum_dtype=kept, stage=0, update="step"
    )
    return statistics.mean(losses_of(model, SHAPE, optimizer, steps, seed + 1)[-LAST:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "momenta.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    console, ends = Console(), {}
    for kept in KEPT:
        ends[str(kept)] = [round(train(kept, seed, options.steps), 4) for seed in range(options.seeds)]
        console.print(f"{kept!s:10} {ends[str(kept)]}", highlight=False)
    result = {
        "command": "python benchmarks/momenta.py",
        "torch": torch.__version__,
        "steps": options.steps,
        "ends": ends,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
