"""A model whose gradients are what it is given: multiples of 1/8, the same in every world to the bit.

Of a gram of less than full rank any basis of the null space is one of eigenvectors, and which one comes out hangs on
the last bit of a gradient.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import compile_muon
from compile_muon.checkpoint.optimizer_state import full_optimizer_state, load_full_optimizer_state
from compile_muon.engine.dtensors import local_tensor
from compile_muon.passes.methods import ElementMethod
from support.as_graphs import AsGraphs, outputs_in_place
from support.books import Step
from support.reference import ADAMW_EPS, BETAS, DECAY, DEVICE, LR, MOMENTUM, full, placed, world_and_rank

SHAPES = {
    "wide": (6, 12), "tall": (13, 6), "fused": (24, 8), "stack": (3, 6, 8), "narrow": (2, 8),
    "table": (7, 4), "vector": (5,),
}  # fmt: skip
#: what AdamW or another method of elements trains
REST = ("table", "vector")
STEPS, ELEMENT_LR = 6, 0.01
#: the dim that ranks of tensor parallelism cut
SLICES = {"wide": 1, "tall": 0, "fused": 1, "stack": 2, "narrow": 1, "table": 0, "vector": 0}


class Exact(nn.Module):
    """A loss that is linear in all parameters: its gradients are what it is given. ``mesh``: of slices of rows and of
    columns, as parallelize_module makes them."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator) / 4
            value = value if mesh is None else distribute_tensor(value, mesh, [Shard(SLICES[name])])
            self.register_parameter(name, nn.Parameter(value))
        self.table.use_muon = False

    def forward(self, *given: Tensor) -> Tensor:
        parts = list(given)
        if self.mesh is not None:
            parts = [distribute_tensor(x, self.mesh, [Shard(d)]) for x, d in zip(given, SLICES.values(), strict=True)]
        params = (self.wide, self.tall, self.fused, self.stack, self.narrow, self.table, self.vector)
        total = torch.stack([(param * own).sum() for param, own in zip(params, parts, strict=True)]).sum()
        return total.full_tensor() if isinstance(total, DTensor) else total


def gradients(step: int) -> dict[str, Tensor]:
    """Their means over ranks and micro-batches."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randint(-16, 17, shape, generator=generator) / 8 for name, shape in SHAPES.items()}


def given(step: int, micro: int, of: int, sharing: int) -> list[Tensor]:
    """This rank's, which differ but for those that share batches."""
    world, rank = (number // sharing for number in world_and_rank())
    of_micro = 2 * micro - of + 1  # 0 where there is one
    return [own + own.sign() * (2 * rank - world + 1 + of_micro) for own in gradients(step).values()]


def rates(step: int) -> tuple[float, float]:
    """The factor on learning rates, and the momentum, of a schedule: what is kept of an earlier step is wrong."""
    return 1 / (1 + step % 3), MOMENTUM - 0.01 * (step % 4)


def steps_of(name: str, steps: int, lr: float) -> list[Step]:
    """What a book is given of a parameter."""
    return [Step(gradients(step)[name], rates(step)[0] * lr, rates(step)[1]) for step in range(steps)]


def _runs(*sizes: int) -> list[Tensor]:
    return list(torch.arange(sum(sizes)).split(list(sizes)))


_ROWS = torch.arange(24).view(2, -1)  # of each group of queries: 6 of two heads, 3 of a key, 3 of a value
_TURNS = [*_ROWS[:, :6].flatten().split(3), _ROWS[:, 6:9].flatten(), _ROWS[:, 9:].flatten()]
#: what users say, and which rows or columns are a matrix by itself: of sizes that ranks cut in the middle of
VIEWS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, list[Tensor]]]]] = {
    "": ({}, {}),
    "heads": ({"fused": {"heads": 8}, "wide": {"heads": 2}}, {"fused": (0, _runs(*[3] * 8)), "wide": (0, _runs(3, 3))}),
    "split": (
        {"fused": {"split": [12, 6, 6]}, "tall": {"split": [5, 8]}, "wide": {"split": [5, 7], "dim": 1}},
        {"fused": (0, _runs(12, 6, 6)), "tall": (0, _runs(5, 8)), "wide": (1, _runs(5, 7))},
    ),
    "turns": (  # Megatron's: queries, keys and values take turns; queries by heads, the others whole
        {"fused": {"split": [12, 6, 6], "groups": 2, "heads": [4, 1, 1]}, "wide": {"heads": 4, "dim": 1}},
        {"fused": (0, _TURNS), "wide": (1, _runs(*[3] * 4))},
    ),
}


def blocks_of(name: str, view: str) -> tuple[int, list[Tensor]]:
    """The dim, and the rows or columns of each matrix along it."""
    return VIEWS[view][1].get(name, (0, [torch.arange(SHAPES[name][-2])]))


@dataclass(frozen=True)
class Case:
    """How a method is trained. ``compiled``: by the backend, "eager"; directions are made in backward where the method
    can and ``update`` lets it. ``view``: of :data:`VIEWS`. ``mesh``: "", "replicas" of shards, or "slices" of tensor
    parallelism. ``over``: ``shard_state_over``. ``offload``: "", "cpu" or "nvme". ``masters``: weights are bf16, and
    master weights offloaded. ``checks``: where a step more comes whose gradients are inf on the last rank: "in_step" or
    "next_step". ``recorded``: steps are CUDA graphs (:class:`support.as_graphs.AsGraphs`)."""

    stage: int = 3
    compiled: bool = False
    update: str = "step"
    view: str = ""
    mesh: str = ""
    over: str = "shard"
    offload: str = ""
    masters: bool = False
    micro: int = 1
    checks: str = ""
    recorded: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value not in ("", False))


def made(settings: dict[str, Any], case: Case = Case(), folder: str = "") -> tuple[Exact, compile_muon.MuonZero]:
    """A model and its optimizer; ``settings`` are the method's, and offloaded states go to ``folder``."""
    more: dict[str, Any] = {"stage": case.stage, "update": case.update, "shard_state_over": case.over}
    world, sliced = world_and_rank()[0], case.mesh == "slices"
    if case.mesh:
        sizes = (world // 2, 2) if sliced else (2, world // 2)
        names = ("shard", "tensor") if sliced else ("replicate", "shard")
        more["mesh"] = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)
    model = Exact(more["mesh"]["tensor"] if sliced else None).to(DEVICE)
    if case.offload:
        place = {"device": "nvme", "nvme_path": folder} if case.offload == "nvme" else {"device": "cpu"}
        more["offload"] = {**place, "buffer_bytes": 1, "masters": case.masters}
        more |= {"param_dtype": torch.bfloat16} if case.masters else {}  # which every gradient here fits
    if case.checks or case.recorded:
        more |= {"checks": case.checks or "next_step", "nonfinite": "skip" if case.checks else "error"}
    optimizer = compile_muon.MuonZero(
        model, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, adamw_lr=ELEMENT_LR, adamw_betas=BETAS,
        adamw_eps=ADAMW_EPS, adamw_weight_decay=DECAY, ns_dtype="float32", gradient_accumulation_steps=case.micro,
        **{"muon_views": VIEWS[case.view][0], **more, **settings},
    )  # fmt: skip
    return model, optimizer


def train(
    model: Exact, optimizer: compile_muon.MuonZero, steps: range, case: Case = Case()
) -> tuple[dict[str, Tensor], int]:
    """The weights behind these steps, as exact as the optimizer has them, and how often a graph was replayed."""
    graphs, options = AsGraphs(), {"codegen": "eager", "cuda_graphs": case.recorded}
    run: Any = torch.compile(model, backend="muon_zero", options=options) if case.compiled else model
    sharing = 2 if case.mesh == "slices" else 1
    world, rank = (place // sharing for place in world_and_rank())

    def step(number: int, spoiled: bool = False) -> None:
        factor, momentum = rates(number)
        for group in optimizer.param_groups:
            of_elements = isinstance(optimizer.engine.step.method(group), ElementMethod)
            group["lr"] = (ELEMENT_LR if of_elements else LR) * factor
            group |= {"momentum": momentum} if "momentum" in group else {}
        for micro in range(case.micro):
            parts = given(number, micro, case.micro, sharing)
            parts = [part * math.inf for part in parts] if spoiled and rank == world - 1 else parts
            (run(*placed(parts)) / case.micro).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.MonkeyPatch.context() if case.recorded else nullcontext() as patch:
        if patch is not None:
            outputs_in_place(patch)
            optimizer.engine.step.recorded = graphs
        for number in steps:
            if case.checks and number == 4:
                step(number, spoiled=True)
            step(number)
        if case.compiled:
            torch.compiler.reset()
    masters = {name: optimizer.state[p].get("master_weight", p) for name, p in model.named_parameters()}
    return {name: full(master).detach().clone() for name, master in masters.items()}, graphs.replays


def resumed(settings: dict[str, Any], case: Case, folder: str, first: int, last: int, whole: bool) -> dict[str, Tensor]:
    """The weights behind steps that go on from a checkpoint, if there is one, and that leave one. ``whole``: by the
    state as one file has it; that of the checkpoint is spoiled."""
    model, optimizer = made(settings, case, folder)
    checkpointer, file = compile_muon.Checkpointer(Path(folder) / "saved"), Path(folder) / "whole.pt"
    if checkpointer.load(model, optimizer) is not None and whole:
        for states in optimizer.state.values():
            for tensor in states.values():
                local_tensor(tensor).fill_(7)
        load_full_optimizer_state(optimizer, torch.load(file) if world_and_rank()[1] == 0 else None)
    weights, _ = train(model, optimizer, range(first, last), case)
    checkpointer.save(last, model, optimizer)
    state = full_optimizer_state(optimizer)
    if world_and_rank()[1] == 0:
        torch.save(state, file)
    return weights
