"""Save in a loop, be killed at a random moment, look at what is left, go on from it: over and over in one folder.

    python killed_saver.py FOLDER RUNS

Weights and state of the checkpoint of step N are all N, so rows of two steps would show. Odd runs are one process, even
ones two ranks of which one or both are killed; a survivor must end by itself, with a CheckpointError. Half of them save
asynchronously. Prints a report as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import compile_muon
from compile_muon import Checkpointer, CheckpointError
from compile_muon.checkpoint.folder import Folder
from compile_muon.checkpoint.manifest import Manifest

TIMEOUT = timedelta(seconds=5)
PATIENCE = 40.0  # seconds until a survivor must have ended: while a group is made, Gloo takes the time-out four times


def everything(optimizer: compile_muon.MuonZero) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield param
            yield from optimizer.state[param].values()


def build() -> tuple[nn.Module, compile_muon.MuonZero]:
    model = nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 1), nn.Embedding(7, 9))
    return model, compile_muon.MuonZero(model, stage=3)


@torch.no_grad()
def load(folder: Path) -> int:
    """The step of what is loaded, all of which must be of that step."""
    model, optimizer = build()
    extra = Checkpointer(folder).load(model, optimizer)
    step = 0 if extra is None else extra["at"]
    for tensor in everything(optimizer) if step else ():
        value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(value, torch.full_like(value, step)), (step, value)
    return step


@torch.no_grad()
def save_for_ever(folder: Path, rank: int, world: int, asynchronous: bool, ready: int, meeting: Path) -> None:
    if world > 1:
        store = dist.FileStore(str(meeting), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    step = load(folder)
    model, optimizer = build()
    checkpointer = Checkpointer(folder, keep_last=2, asynchronous=asynchronous)
    os.write(ready, b"x")
    while True:
        step += 1
        for tensor in everything(optimizer):
            (tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor).fill_(step)
        checkpointer.save(step, model, optimizer, at=step)


def one_run(folder: Path, world: int, asynchronous: bool, dice: random.Random, meeting: Path) -> None:
    told, ready = os.pipe()
    ranks = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            try:
                save_for_ever(folder, rank, world, asynchronous, ready, meeting)
            except CheckpointError:
                os._exit(7)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        ranks.append(child)
    os.close(ready)
    for _ in ranks:
        started = select.select([told], [], [], PATIENCE)[0] and os.read(told, 1)
        if not started:
            for child in ranks:
                os.kill(child, signal.SIGKILL)
            raise AssertionError("a rank did not start")
    os.close(told)
    time.sleep(dice.uniform(0.0, 0.4))
    doomed = dice.choice([[0], [1], [0, 1]]) if world == 2 else [0]
    for rank in doomed:
        os.kill(ranks[rank], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    for rank, child in enumerate(ranks):
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                for other in ranks[rank:]:
                    os.kill(other, signal.SIGUSR1)  # where it hangs
                    time.sleep(1.0)
                    os.kill(other, signal.SIGKILL)
                raise AssertionError(f"rank {rank} hangs after {doomed} were killed")
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(ended[1])
        assert code == (-signal.SIGKILL if rank in doomed else 7), f"rank {rank} ended with {code}"


def main(folder: Path, runs: int) -> None:
    torch.set_num_threads(1)
    dice = random.Random(0)
    last = unfinished = 0
    for run in range(runs):
        one_run(folder, 1 + run % 2, run % 4 >= 2, dice, folder.parent / f"meeting-{run}")
        unfinished += any(entry.name.endswith(".tmp") for entry in folder.iterdir())
        steps = Folder(folder).steps()
        for step in steps:
            Manifest.read(Folder(folder).at(step)).verify(Folder(folder).at(step))
        step = load(folder)
        assert step == max(steps, default=0) >= last, (run, step, steps, last)
        last = step
    print(json.dumps({"runs": runs, "unfinished": unfinished, "steps": last}))


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "checkpoints", int(sys.argv[2]))
