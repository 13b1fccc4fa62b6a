"""Resharding: every world and ZeRO stage loads the checkpoints of every other, all 256 pairs, bit for bit.

Every rank compares whole parameters, momenta, moments and step counts, its shards, the resident weights of stages 1 and
2, hyperparameters, and the scheduler. The model has uneven and empty shards, a scalar, a tied weight, a frozen
parameter and one in bfloat16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import compile_muon
from compile_muon import Checkpointer

from .outcome import Request, Row, again
from .processes import join, rendezvous, start

__all__ = ["campaign"]

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
TIMEOUT = 60.0
PATIENCE = 300.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.thin = nn.Linear(3, 5), nn.Linear(5, 1)
        self.down = nn.Linear(1, 3, bias=False)
        self.head, self.tied = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.tied.weight = self.head.weight
        self.low = nn.Linear(3, 7, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tied(torch.tanh(self.head(self.down(self.thin(torch.tanh(self.up(x)))) * self.scale)))
        return self.low(h.bfloat16()).float() + self.frozen.sum()


class Training:
    """A model in training, on all ranks of the world."""

    def __init__(self, stage: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = compile_muon.MuonZero(
            self.model, stage=stage, ns_dtype="float32", muon_params=["up.weight", "down.weight", "low.weight"]
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], gamma=0.5)

    def step(self) -> None:
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters, buffers and state by name."""
        tensors: dict[str, Tensor] = dict(self.model.state_dict())
        for group in self.optimizer.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                tensors |= {f"{name}/{slot}": value for slot, value in self.optimizer.state[param].items()}
        return tensors

    def settings(self) -> dict[str, Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"groups": groups, "scheduler": self.scheduler.state_dict()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _begin(meeting: Path, rank: int, world: int) -> None:
    if world > 1:
        rendezvous(dist.FileStore(str(meeting), world), rank, world, TIMEOUT)


def save(place: Path, rank: int, world: int, stages: tuple[int, ...], seed: int) -> None:
    """Save a checkpoint at each stage, and beside it a file of the whole tensors and settings."""
    _begin(place / f"save-{world}", rank, world)
    for stage in stages:
        run = Training(stage, seed + 10 * world + stage)
        for _ in range(2):
            run.step()
        for group in run.optimizer.param_groups:
            group["weight_decay"] = 0.01 * world + stage
        run.model.seen += 1 + stage
        folder = place / f"{world}-{stage}"
        Checkpointer(folder).save(2, run.model, run.optimizer, scheduler=run.scheduler, world=world)
        tensors = {name: whole(value) for name, value in run.tensors().items()}
        if rank == 0:
            torch.save((tensors, run.settings()), f"{folder}.pt")


def load(
    place: Path, rank: int, world: int, stage: int, sources: list[tuple[int, int]], seed: int
) -> dict[tuple[int, int], str]:
    """Load the checkpoint of each of ``sources``, (world, stage); return the names of what differs, by source."""
    _begin(place / f"load-{world}-{stage}", rank, world)
    differences = {}
    for source in sources:
        run = Training(stage, seed + 77)
        run.step()
        folder = place / f"{source[0]}-{source[1]}"
        extra = Checkpointer(folder).load(run.model, run.optimizer, scheduler=run.scheduler)
        tensors, settings = torch.load(f"{folder}.pt")
        wrong = [] if extra == {"world": source[0]} and run.settings() == settings else ["settings"]
        now = run.tensors()
        wrong += sorted(now.keys() ^ tensors.keys())
        wrong += [name for name in now if not _same(now[name], tensors[name], rank, world)]
        for sharded in run.optimizer.engine.params:
            if sharded.resident is not None and not torch.equal(sharded.resident, tensors[sharded.name]):
                wrong.append(f"the resident copy of {sharded.name}")
        run.step()  # a loaded run must train on
        differences[source] = ", ".join(wrong)
    return differences


def _same(now: Tensor, saved: Tensor, rank: int, world: int) -> bool:
    """Tell whether the whole tensor and this rank's shard are equal to the saved ones."""
    if now.dtype != saved.dtype or not torch.equal(whole(now), saved):
        return False
    if not isinstance(now, DTensor) or not now.placements[0].is_shard():
        return True
    rows = -(-len(saved) // world)
    return torch.equal(now.to_local(), saved[rank * rows : (rank + 1) * rows])


def campaign(request: Request) -> Iterator[Row]:
    """Yield a row for each world and stage that saves."""
    worlds = (1, 2, 3) if request.quick else WORLDS
    stages = (0, 3) if request.quick else STAGES
    name = "saved by {} at stage {}"
    rows = {}
    for world in worlds:
        for stage in stages:
            title = name.format("1 rank" if world == 1 else f"{world} ranks", stage)
            if request.wants(title):
                rows[world, stage] = Row("resharding", title, again("resharding", request, title))
    sources = list(rows)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for world in {world for world, _ in sources}:
            chosen = tuple(stage for w, stage in sources if w == world)
            _all(world, save, place, chosen, request.seed)
        for world in worlds:
            for stage in stages:
                answers = _all(world, load, place, stage, sources, request.seed)
                for source in sources:
                    wrong = sorted({answer[source] for answer in answers} - {""})
                    rows[source].count("bit for bit" if not wrong else "WRONG", wrong=bool(wrong))
                    if wrong:
                        rows[source].details.setdefault("wrong", []).append([world, stage, wrong])
    yield from rows.values()


def _all(world: int, function: Any, place: Path, *arguments: Any) -> list[Any]:
    """Run ``function(place, rank, world, *arguments)`` on every rank, and return the answers."""
    log = place / f"{function.__name__}-{world}.log"
    ranks = [start(function, place, rank, world, *arguments, log=log) for rank in range(world)]
    join(ranks, PATIENCE)
    for rank, child in enumerate(ranks):
        if child.code != 0:
            raise RuntimeError(f"{function.__name__} on {world} ranks: rank {rank}: {child.code} {child.error}")
    return [child.answer for child in ranks]
