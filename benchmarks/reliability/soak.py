"""Thousands of compiled steps with a checkpoint every 50, written asynchronously: nothing may grow.

Each rank samples, while no checkpoint is written, resident memory, threads of Python and of the operating system, open
files, and objects that the garbage collector knows. After a warm-up, the numbers of threads, files and checkpoints on
the disk must be constant; objects may differ by :data:`OBJECTS`, and resident memory may rise by :data:`SLOPE` per
step. A leak of one tensor a step exceeds both: its memory exceeds the slope, and it has two objects.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import compile_muon
from compile_muon import Checkpointer

from .outcome import Request, Row, again
from .processes import Child, join, rendezvous, start

__all__ = ["campaign"]

STEPS, WARM_UP, EVERY = 2500, 500, 50
QUICK_STEPS, QUICK_WARM_UP, QUICK_EVERY = 400, 200, 10
#: KiB per step, of the least-squares line over all samples after the warm-up; a short run's heap still settles
SLOPE, QUICK_SLOPE = 0.5, 4.0
OBJECTS = 50
LENGTHS = (5, 9, 7)
TIMEOUT, PATIENCE = 60.0, 1200.0

Sample = dict[str, int]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 10)
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10, bias=False)
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = h + F.dropout(self.down(self.up(h).relu()), 0.1)
        return self.head(self.norm(h))


def open_files() -> int:
    """Count the files that stay open."""
    # The fewest of several counts: a FileStore opens a file for each status that a rank publishes.
    fewest = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        time.sleep(0.01)
        fewest = min(fewest, len(os.listdir("/proc/self/fd")))
    return fewest


def sample(step: int, folder: Path) -> Sample:
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "step": step,
        "resident KiB": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "Python threads": threading.active_count(),
        "OS threads": len(os.listdir("/proc/self/task")),
        "open files": open_files(),
        "objects": len(gc.get_objects()),
        "checkpoints": len([*folder.glob("step-*")]),
    }


def train(place: Path, rank: int, world: int, stage: int, codegen: str, steps: int, every: int) -> list[Sample]:
    """Train a rank with a checkpoint every ``every`` steps; return its samples, taken between checkpoints."""
    rendezvous(dist.FileStore(str(place / "meeting"), world), rank, world, TIMEOUT)
    torch.manual_seed(0)
    model = Net()
    optimizer = compile_muon.MuonZero(model, stage=stage, ns_dtype="float32")
    run = torch.compile(model, backend="muon_zero", options={"codegen": codegen})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.999**done)
    folder = place / "checkpoints"
    checkpointer = Checkpointer(folder, keep_last=2, asynchronous=True)
    samples: list[Sample] = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 16, (4, LENGTHS[step % len(LENGTHS)]), generator=generator)
        F.cross_entropy(run(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % every == 0:
            checkpointer.save(step, model, optimizer, scheduler=scheduler, done=step)
        if step % every == every // 2 and step > every:
            checkpointer.wait()
            dist.barrier()  # rank 0 removes old checkpoints after the commit
            samples.append(sample(step, folder))
    checkpointer.wait()
    dist.barrier()
    return samples


def slope(samples: list[Sample], what: str) -> float:
    """Return the least-squares slope of a figure, per step."""
    steps, values = [s["step"] for s in samples], [s[what] for s in samples]
    middle, mean = sum(steps) / len(steps), sum(values) / len(values)
    spread = sum((step - middle) ** 2 for step in steps)
    return sum((step - middle) * (value - mean) for step, value in zip(steps, values, strict=True)) / spread


def grown(samples: list[Sample], limit: float = SLOPE) -> list[str]:
    """List the figures that are not flat; ``limit`` is that of resident memory, in KiB per step."""
    problems = []
    for what in ("Python threads", "OS threads", "open files", "checkpoints"):
        values = sorted({s[what] for s in samples})
        if len(values) > 1:
            problems.append(f"{what}: {values[0]} to {values[-1]}")
    objects = [s["objects"] for s in samples]
    if max(objects) - min(objects) > OBJECTS:
        problems.append(f"objects: {min(objects)} to {max(objects)}")
    if (rise := slope(samples, "resident KiB")) > limit:
        problems.append(f"resident memory: {rise:.2f} KiB per step")
    return problems


def campaign(request: Request) -> Iterator[Row]:
    """Yield a row for each setting."""
    steps, warm_up, every = (QUICK_STEPS, QUICK_WARM_UP, QUICK_EVERY) if request.quick else (STEPS, WARM_UP, EVERY)
    if request.runs:
        steps, warm_up = max(request.runs, 10 * every), max(request.runs, 10 * every) // 5
    settings = [(2, 3, "eager")] if request.quick else [(2, 3, "eager"), (2, 1, "inductor")]
    for world, stage, codegen in settings:
        title = f"{steps:,} steps, {world} ranks, stage {stage}, {codegen}"
        if not request.wants(title):
            continue
        row = Row("soak", title, again("soak", request, f"stage {stage}, {codegen}", sized=True))
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, stage, codegen, steps, every)
            log = Path(folder, "log")
            ranks = [start(train, Path(folder), rank, *arguments, log=log) for rank in range(world)]
            join(ranks, PATIENCE)
            seconds = time.monotonic() - start_s
            for rank, child in enumerate(ranks):
                _note(row, rank, child, warm_up, QUICK_SLOPE if request.quick else SLOPE)
        row.tried = steps
        row.details["seconds"] = round(seconds, 1)
        yield row


def _note(row: Row, rank: int, child: Child, warm_up: int, limit: float) -> None:
    if child.code != 0:
        row.note(f"rank {rank} ended with {child.code} {child.error}", wrong=True)
        return
    samples: list[Sample] = child.answer
    after = [s for s in samples if s["step"] > warm_up]
    problems = grown(after, limit)
    for problem in problems:
        row.note(f"rank {rank}: {problem}", wrong=True)
    if not problems:
        row.note("ranks whose figures stayed flat")
    row.details[f"rank {rank}"] = {
        "after the warm-up": after[0],
        "at the end": after[-1],
        "resident KiB per step": round(slope(after, "resident KiB"), 3),
        "in the second half": round(slope(after[len(after) // 2 :], "resident KiB"), 3),
        "resident KiB": [s["resident KiB"] for s in samples],
        "objects": [min(s["objects"] for s in after), max(s["objects"] for s in after)],
    }
