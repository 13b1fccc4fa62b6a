"""Whole steps in CUDA graphs on several ranks, whose host waits for numbers in each step: does any step stall?

    torchrun --standalone --nproc_per_node=2 benchmarks/replayed.py

Captured collectives can stall while the host waits (pytorch#196133, open). Ranks may share a GPU, see shared_nccl.py.
Ends with status 1 if ranks end with different weights, or a collective takes --timeout seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import compile_muon


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def run(stage: int, steps: int, width: int = 256) -> None:
    torch.manual_seed(0)
    config = {
        "compile": {"cuda_graphs": True},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, "checks": "next_step"}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    model, optimizer = compile_muon.initialize(nn.Sequential(*(Block(width) for _ in range(4))).cuda(), config)
    x = torch.randn(64, width, device="cuda", dtype=torch.bfloat16)
    start, numbers = time.monotonic(), {}
    for step in range(steps):
        if step == 10:  # steps are compiled and captured by now
            torch.cuda.synchronize()
            start = time.monotonic()
        (model(x) - x.flip(0)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers = optimizer.metrics()
    torch.cuda.synchronize()
    seconds = (time.monotonic() - start) / max(steps - 10, 1)
    with torch.no_grad():
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        sums = torch.stack([p.double().sum() for p in weights])
    sums_of_ranks = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(sums_of_ranks, sums)
    if not all(torch.equal(rank_sums, sums_of_ranks[0]) for rank_sums in sums_of_ranks):
        raise SystemExit(f"stage {stage}: ranks have other weights after {steps} steps")
    if dist.get_rank() == 0:
        print(f"stage {stage}: {steps} steps, {1e3 * seconds:.1f} ms each, gradient norm {numbers['grad_norm']:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--timeout", type=float, default=50, help="seconds for a collective")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl", timeout=timedelta(seconds=options.timeout))
    for stage in options.stages:
        run(stage, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
