"""A model whose gradients are what it is given: multiples of 1/8, the same in every world to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compile_muon
from compile_muon.checkpoint.optimizer_state import full_optimizer_state, load_full_optimizer_state
from compile_muon.engine.dtensors import local_tensor
from support.reference import DECAY, LR, MOMENTUM, full, world_and_rank

__all__ = ["HEADS", "SETTINGS", "SHAPES", "STEPS", "TOLERANCE", "Exact", "given", "gradients", "made", "saved", "train"]

SHAPES = {"wide": (6, 12), "tall": (13, 6), "square": (8, 8), "stack": (3, 6, 8), "vector": (5,)}
STEPS = 8
TOLERANCE = 1e-5


class Exact(nn.Module):
    """A loss that is linear in all parameters: its gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) / 4))

    def forward(self, *given: Tensor) -> Tensor:
        params = (self.wide, self.tall, self.square, self.stack, self.vector)
        return torch.stack([(param * own).sum() for param, own in zip(params, given, strict=True)]).sum()


def gradients(step: int) -> list[Tensor]:
    """Their means over the ranks."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(-16, 17, shape, generator=generator) / 8 for shape in SHAPES.values()]


def given(step: int, sharing: int = 1) -> list[Tensor]:
    """This rank's, which differ but for those that share batches."""
    world, rank = (number // sharing for number in world_and_rank())
    return [own + own.sign() * (2 * rank - world + 1) for own in gradients(step)]


HEADS = {"square": {"heads": 4}, "wide": {"heads": 2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "soap": {"rates": {"basis_every": 3}},
    "muonbp": {"rates": {"period": 3, "block_lr_factor": 0.5}, "muon_views": HEADS},
    "dion2": {"rates": {"fraction": 0.4}},
    "muown": {},
}


def made(way: str, model: Exact | None = None, **settings: Any) -> tuple[Exact, compile_muon.MuonZero]:
    model = model or Exact()
    given = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "ns_dtype": "float32", "method": way}
    return model, compile_muon.MuonZero(model, **{**given, **SETTINGS.get(way, {}), **settings})


def train(
    model: Exact, optimizer: compile_muon.MuonZero, steps: range, *, compiled: bool = False, spoiled: bool = False,
    sharing: int = 1, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """The weights behind these steps, as exact as the optimizer has them.

    Args:
        spoiled: with a step more on the way, whose gradients are inf on the last rank.
        sharing: ranks that have the same batches.
        options: of the backend.
    """
    run: Any = torch.compile(model, backend="muon_zero", options={"codegen": "eager", **options}) if compiled else model
    world, rank = world_and_rank()
    for step in steps:
        if spoiled and step == 4:
            run(*(own * (math.inf if rank == world - 1 else 1) for own in given(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        run(*given(step, sharing)).backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = {name: optimizer.state[p].get("master_weight", p) for name, p in model.named_parameters()}
    return {name: full(master).detach().clone() for name, master in masters.items()}


def saved(
    folder: str, way: str, first: int, last: int, stage: int, whole: bool = False, **settings: Any
) -> dict[str, Tensor]:
    """The weights behind steps that go on from a checkpoint, if there is one, and that leave one.

    Args:
        whole: by the state as one file has it: that of the checkpoint is spoiled.
    """
    model, optimizer = made(way, stage=stage, update="step", **settings)
    checkpointer, file = compile_muon.Checkpointer(Path(folder)), Path(folder) / "whole.pt"
    if checkpointer.load(model, optimizer) is not None and whole:
        for states in optimizer.state.values():
            for tensor in states.values():
                local_tensor(tensor).fill_(7)
        load_full_optimizer_state(optimizer, torch.load(file) if world_and_rank()[1] == 0 else None)
    weights = train(model, optimizer, range(first, last))
    checkpointer.save(last, model, optimizer)
    state = full_optimizer_state(optimizer)
    if world_and_rank()[1] == 0:
        torch.save(state, file)
    return weights
