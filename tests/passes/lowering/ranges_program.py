"""Trains small models with ranges on, as a rank of its own: `python ranges_program.py RANK WORLD STORE RESULT`.

The ranges are in the file that NVTX_LOG names, between lines `mark<TAB>case`; what torch.profiler saw, and what the
optimizer counted, goes to RESULT.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

from compile_muon import MuonZero, NonFiniteError
from compile_muon.passes.ranges import RANGE_PUSH, ranged

#: case: (codegen, stage, update, nvtx)
CASES: dict[int, dict[str, tuple[str, int, str, bool]]] = {
    1: {
        "eager": ("eager", 0, "step", True),
        "inductor": ("inductor", 0, "step", True),
        "off": ("eager", 0, "step", False),
    },
    2: {
        "eager": ("eager", 3, "backward", True),
        "inductor": ("inductor", 3, "backward", True),
        "refresh": ("eager", 2, "step", True),
    },
}
OPS = ("pack", "newton_schulz", "wait_tensor", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def mark(case: str) -> None:
    with open(os.environ["NVTX_LOG"], "a") as log:
        log.write(f"mark\t\t\t0\t{case}\n")


def train(codegen: str, stage: int, update: str, nvtx: bool, case: str) -> dict[str, Any]:
    """Two steps, the second one recorded, and one that is refused."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 16, bias=False), nn.Tanh(), nn.Linear(16, 8)]
    model = nn.Sequential(*layers)
    optimizer = MuonZero(model, stage=stage, update=update, ns_dtype="float32")
    # Buckets of a kilobyte: each matrix has its own.
    options = {"codegen": codegen, "nvtx": nvtx, "bucket_mb": 2**-10}
    compiled = torch.compile(model, backend="muon_zero", options=options)

    def step(scale: float = 1.0) -> None:
        (compiled(torch.ones(4, 16)).square().mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = optimizer.traffic
    mark(case)
    with profile() as recorded:
        step()
    after = optimizer.traffic
    mark(f"{case} refused")
    with contextlib.suppress(NonFiniteError):
        step(float("nan"))
        raise AssertionError("a step with NaN was not refused")
    mark("")
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.name.startswith("muon_zero ") or event.name.split("::")[-1] in OPS
    ]
    return {
        "events": events,
        "sent": after.bytes_sent - before.bytes_sent,
        "matrices": after.matrices - before.matrices,
    }


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    if world > 1:
        store = dist.FileStore(sys.argv[3], world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results = {case: train(*settings, case=case) for case, settings in CASES[world].items()}
    mark("left open")
    with contextlib.suppress(RuntimeError), ranged("outer"):
        RANGE_PUSH([torch.empty(0)], "inner", "reduce", 7)
        raise RuntimeError
    with ranged("after"):
        pass
    mark("")
    Path(sys.argv[4]).write_text(json.dumps(results))
    os._exit(0)  # no collective is left that the other rank could wait for


if __name__ == "__main__":
    main()
