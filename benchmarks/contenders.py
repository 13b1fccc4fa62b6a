"""The systems under test. Each is a function from a fresh model to a `Session` whose `step(x, y)` trains once.

To add one: write `build(model, plan) -> Session`, and list it in CONTENDERS.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpt import muon_names
from torch import Tensor, nn

ALL_STAGES = (0, 1, 2, 3)
NO_STAGE = -1  # for what involves neither communication nor optimizer


@dataclass(frozen=True)
class Plan:
    """What all contenders share. The rates are applied by all alike, so that losses can be compared too."""

    stage: int
    ranks: int
    micro_batch: int
    device: torch.device
    muon_lr: float = 0.02
    adamw_lr: float = 3e-4
    momentum: float = 0.95
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    ns_steps: int = 5
    ns_method: str = "standard"


@dataclass(frozen=True)
class Session:
    """A ready training setup. `counted_bytes` is the system's own count of bytes sent, if it keeps one."""

    step: Callable[[Tensor, Tensor], Tensor]
    muon_matrices: int
    note: str
    counted_bytes: Callable[[], int] | None = None


@dataclass(frozen=True)
class Contender:
    name: str
    build: Callable[[nn.Module, Plan], Session]
    stages: tuple[int, ...]
    requires: str
    remedy: str

    def missing(self) -> str | None:
        """Why this contender cannot run here, with the remedy; None if it can."""
        if importlib.util.find_spec(self.requires) is None:
            return f"{self.requires} is not installed: {self.remedy}"
        return None


def _ours(model: nn.Module, plan: Plan, algorithm: str) -> Session:
    import compile_muon

    params: dict[str, object] = {"betas": list(plan.betas), "eps": plan.eps, "weight_decay": plan.weight_decay}
    if algorithm == "Muon":
        params |= {
            "muon_lr": plan.muon_lr,
            "adam_lr": plan.adamw_lr,
            "momentum": plan.momentum,
            "ns_steps": plan.ns_steps,
            "ns_method": plan.ns_method,
        }
    else:
        params |= {"lr": plan.adamw_lr}
    config = {
        "compile": True,
        "optimizer": {"type": algorithm, "params": params},
        "zero_optimization": {"stage": plan.stage},
    }
    matrices = len(muon_names(model)) if algorithm == "Muon" else 0
    model, optimizer = compile_muon.initialize(model, config)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Session(step, matrices, "compiled", lambda: int(optimizer.traffic.bytes_sent))


def ours_muon(model: nn.Module, plan: Plan) -> Session:
    return _ours(model, plan, "Muon")


def ours_adamw(model: nn.Module, plan: Plan) -> Session:
    return _ours(model, plan, "AdamW")


def _deepspeed(model: nn.Module, plan: Plan, compiled: bool) -> Session:
    # Its own detection takes CPU as a fallback and says so on every rank; naming it is the documented way.
    os.environ.setdefault("DS_ACCELERATOR", plan.device.type)
    import deepspeed

    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)  # adopts the group
    # All parameters still fit one bucket, as in its default of 5e8 elements, which at stage 3 reserves 2 GB.
    zero: dict[str, object] = {
        "stage": plan.stage,
        "reduce_bucket_size": sum(parameter.numel() for parameter in model.parameters()),
    }
    if plan.stage == 3:
        # DeepSpeed raises "Muon and reduce scatter cannot be used together" at stage 3 otherwise.
        zero["reduce_scatter"] = False
    config = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": 1,
        # Its default of 1.0 clips the orthogonalized update at stage 3, shrinking Muon's steps by the update's norm
        # (25x in the tiny preset). Without clipping its four stages train bit for bit alike.
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_optimization": zero,
        "optimizer": {
            "type": "Muon",
            "params": {
                "lr": plan.muon_lr,
                "muon_lr": plan.muon_lr,
                "adam_lr": plan.adamw_lr,
                "momentum": plan.momentum,
                "weight_decay": plan.weight_decay,
                "betas": list(plan.betas),
                "eps": plan.eps,
                "ns_method": plan.ns_method,
            },
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if compiled:
        engine.compile()
    matrices = sum(bool(getattr(p, "use_muon", False)) for p in engine.module.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Session(step, matrices, "engine.compile()" if compiled else "eager model, its own compiled NS")


def deepspeed_muon(model: nn.Module, plan: Plan) -> Session:
    return _deepspeed(model, plan, compiled=False)


def deepspeed_muon_compiled(model: nn.Module, plan: Plan) -> Session:
    return _deepspeed(model, plan, compiled=True)


def fsdp2_adamw(model: nn.Module, plan: Plan) -> Session:
    """`fully_shard` a block at a time, each compiled (torchtitan's recipe); stage 2 keeps weights after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(plan.device.type, (plan.ranks,))
    reshard = plan.stage == 3
    for block in model.get_submodule("blocks").children():
        block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.adamw_lr, betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Session(step, 0, "blocks compiled")


def ddp_muon(model: nn.Module, plan: Plan) -> Session:
    """DDP with torch.optim.Muon: every rank orthogonalizes every matrix."""
    from torch.nn.parallel import DistributedDataParallel

    names = set(muon_names(model))
    matrices = [p for name, p in model.named_parameters() if name in names]
    others = [p for name, p in model.named_parameters() if name not in names]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices,
            lr=plan.muon_lr,
            momentum=plan.momentum,
            weight_decay=plan.weight_decay,
            ns_steps=plan.ns_steps,
            adjust_lr_fn="original",
        ),
        torch.optim.AdamW(others, lr=plan.adamw_lr, betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay),
    ]
    compiled = torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = compiled(x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # gradients stay views of DDP's buckets
        return loss.detach()

    return Session(step, len(matrices), "compiled")


def compute_only(model: nn.Module, plan: Plan) -> Session:
    """Forward and backward on every rank, nothing else: the floor that no training system can beat here."""
    compiled = torch.compile(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = compiled(x, y)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return Session(step, 0, "compiled, no update")


_FROM_SOURCE = "pip install -e . in this repository"
_FROM_PYPI = "pip install deepspeed"

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("ours-muon", ours_muon, ALL_STAGES, "compile_muon", _FROM_SOURCE),
        Contender("ours-adamw", ours_adamw, ALL_STAGES, "compile_muon", _FROM_SOURCE),
        Contender("deepspeed-muon", deepspeed_muon, ALL_STAGES, "deepspeed", _FROM_PYPI),
        Contender("deepspeed-muon-compiled", deepspeed_muon_compiled, ALL_STAGES, "deepspeed", _FROM_PYPI),
        Contender("fsdp2-adamw", fsdp2_adamw, (2, 3), "torch", "pip install torch"),
        Contender("ddp-muon", ddp_muon, (0,), "torch", "pip install torch"),
        Contender("compute-only", compute_only, (NO_STAGE,), "torch", "pip install torch"),
    )
}
