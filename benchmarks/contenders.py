"""The systems under test. Each is a function from a fresh model to a `Session` whose `step(micro_batches)` trains once.

To add one: write `build(model, plan) -> Session`, and list it in CONTENDERS.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpt import muon_names
from torch import Tensor, nn

ALL_STAGES = (0, 1, 2, 3)
NO_STAGE = -1  # for a contender with neither communication nor optimizer

MicroBatches = Sequence[tuple[Tensor, Tensor]]  # tokens and targets of each, int64 [batch, context]


@dataclass(frozen=True)
class Plan:
    """The settings that all contenders share; equal rates make losses comparable."""

    stage: int
    ranks: int
    micro_batches: int
    sequences: int  # of one micro-batch
    device: torch.device
    dtype: torch.dtype
    muon_lr: float = 0.02
    adamw_lr: float = 3e-4
    momentum: float = 0.95
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    ns_steps: int = 5
    ns_method: str = "standard"
    ns_dtype: str = "auto"  # compile_muon's: float32 on CPU; torch.optim.Muon and DeepSpeed always take bfloat16
    # compile_muon's and FSDP2's at stage 3; DeepSpeed keeps the weights that fit its default limits
    reshard_after_forward: bool = True
    offload: Mapping[str, Any] | None = None  # `offload_optimizer` of compile_muon and DeepSpeed
    # Of compile_muon alone:
    momentum_dtype: str | None = None
    cuda_graphs: bool = False
    checks: str | None = None

    @classmethod
    def of(cls, trial: Mapping[str, Any], batch: int, device: torch.device) -> Plan:
        """Make the plan of a trial's settings, with ``batch`` sequences a step; the simulator calls this, too."""
        names = ("stage", "ranks", "micro_batches", "ns_method", "ns_dtype", "reshard_after_forward")
        return cls(
            **{name: trial[name] for name in names},
            sequences=batch // trial["micro_batches"],
            device=device,
            dtype=getattr(torch, trial["dtype"]),
            offload=trial.get("offload"),
        )


@dataclass(frozen=True)
class Session:
    """A ready training setup."""

    step: Callable[[MicroBatches], Tensor]  # trains on one global batch, returns this rank's mean loss, detached
    muon_matrices: int
    note: str
    counted_bytes: Callable[[], int] | None = None  # the system's own count of bytes sent


@dataclass(frozen=True)
class Contender:
    """A system under test."""

    name: str
    build: Callable[[nn.Module, Plan], Session]
    stages: tuple[int, ...]
    requires: str  # module that has to be installed
    remedy: str  # command that installs it
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    one_rank: bool = False  # trains on one rank only

    def missing(self, dtype: torch.dtype, ranks: int) -> str | None:
        """Return why this contender cannot run here, with the remedy; None if it can."""
        if self.one_rank and ranks > 1:
            return f"it trains on one rank, not on {ranks}; use --ranks 1"
        if dtype not in self.dtypes:
            return f"it has no {dtype} form here; use --dtype float32"
        if importlib.util.find_spec(self.requires) is None:
            return f"{self.requires} is not installed: {self.remedy}"
        return None


def _accumulate(
    model: Callable[[Tensor, Tensor], Tensor],
    micro_batches: MicroBatches,
    unsynchronized: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """Run forward and backward of micro-batches, all but the last inside `unsynchronized()`; return their mean loss."""
    losses = []
    for number, (x, y) in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else unsynchronized():
            loss = model(x, y) / len(micro_batches)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def our_config(plan: Plan, algorithm: str) -> dict[str, object]:
    """Make the configuration for :func:`compile_muon.initialize`; the simulator calls this, too."""
    params: dict[str, object] = {"betas": list(plan.betas), "eps": plan.eps, "weight_decay": plan.weight_decay}
    if algorithm == "Muon":
        params |= {
            "muon_lr": plan.muon_lr,
            "adam_lr": plan.adamw_lr,
            "momentum": plan.momentum,
            "ns_steps": plan.ns_steps,
            "ns_method": plan.ns_method,
            "ns_dtype": plan.ns_dtype,
        }
        if plan.momentum_dtype:
            params["momentum_dtype"] = plan.momentum_dtype
        if plan.checks:
            params["checks"] = plan.checks
    else:
        params |= {"lr": plan.adamw_lr}
    zero: dict[str, object] = {"stage": plan.stage}
    if plan.offload:
        zero["offload_optimizer"] = dict(plan.offload)
    return {
        "compile": {"reshard_after_forward": plan.reshard_after_forward, "cuda_graphs": plan.cuda_graphs},
        "optimizer": {"type": algorithm, "params": params},
        "zero_optimization": zero,
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": {"enabled": plan.dtype == torch.bfloat16},
    }


def ours(model: nn.Module, plan: Plan, algorithm: str, **more: object) -> Session:
    """Compile the model with compile_muon by :func:`our_config`, with ``more`` keys of a configuration."""
    import compile_muon

    matrices = len(muon_names(model)) if algorithm == "Muon" else 0
    model, optimizer = compile_muon.initialize(model, {**our_config(plan, algorithm), **more})

    def step(micro_batches: MicroBatches) -> Tensor:
        loss = _accumulate(model, micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Session(step, matrices, "compiled", lambda: int(optimizer.traffic.bytes_sent))


def ours_muon(model: nn.Module, plan: Plan) -> Session:
    return ours(model, plan, "Muon")


def varied(plan: Plan, variant: str) -> Plan:
    """Return the plan of one of :data:`VARIANTS`: Muon with the default ``ns_method="auto"``, and its changes."""
    return replace(plan, ns_method="auto", **CHANGES[variant])


def ours_varied(model: nn.Module, plan: Plan, variant: str) -> Session:
    return ours(model, varied(plan, variant), "Muon")


def ours_adamw(model: nn.Module, plan: Plan) -> Session:
    return ours(model, plan, "AdamW")


def _deepspeed(model: nn.Module, plan: Plan, compiled: bool) -> Session:
    # DeepSpeed's detection falls back to the CPU with a message on every rank; the documented way is to name it.
    os.environ.setdefault("DS_ACCELERATOR", plan.device.type)
    import deepspeed

    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)  # adopts the group
    # All parameters fit one bucket, as in DeepSpeed's default of 5e8 elements, which would reserve 2 GB at stage 3.
    zero: dict[str, object] = {
        "stage": plan.stage,
        "reduce_bucket_size": sum(parameter.numel() for parameter in model.parameters()),
    }
    if plan.stage == 3:
        # DeepSpeed raises "Muon and reduce scatter cannot be used together" at stage 3 otherwise.
        zero["reduce_scatter"] = False
    if plan.offload:
        zero["offload_optimizer"] = dict(plan.offload)
    config = {
        "train_micro_batch_size_per_gpu": plan.sequences,
        "gradient_accumulation_steps": plan.micro_batches,
        # DeepSpeed's default of 1.0 clips the orthogonalized update at stage 3, shrinking Muon's steps by the update's
        # norm (25x in the tiny preset). Without clipping its four stages train bit for bit alike.
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": plan.dtype == torch.bfloat16},
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

    def step(micro_batches: MicroBatches) -> Tensor:
        losses = []
        for x, y in micro_batches:
            loss = engine(x, y)
            engine.backward(loss)  # divides by gradient_accumulation_steps
            engine.step()  # does nothing before the last micro-batch
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Session(step, matrices, "engine.compile()" if compiled else "eager model, its own compiled NS")


def deepspeed_muon(model: nn.Module, plan: Plan) -> Session:
    return _deepspeed(model, plan, compiled=False)


def deepspeed_muon_compiled(model: nn.Module, plan: Plan) -> Session:
    return _deepspeed(model, plan, compiled=True)


def fsdp2_adamw(model: nn.Module, plan: Plan) -> Session:
    """Compile and `fully_shard` each block (torchtitan's recipe); stage 2 keeps weights after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(plan.device.type, (plan.ranks,))
    half = plan.dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=plan.dtype, reduce_dtype=plan.dtype) if half else MixedPrecisionPolicy()
    reshard = plan.stage == 3 and plan.reshard_after_forward
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    for block in model.get_submodule("blocks").children():
        block.compile()
        shard(block)
    shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.adamw_lr, betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay
    )

    def step(micro_batches: MicroBatches) -> Tensor:
        loss = _accumulate(model, micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Session(step, 0, "blocks compiled")


def _torch_optimizers(model: nn.Module, plan: Plan) -> tuple[list[nn.Parameter], list[torch.optim.Optimizer]]:
    """Return the matrices, and torch.optim.Muon of these beside AdamW of the other parameters."""
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
    return matrices, optimizers


def ddp_muon(model: nn.Module, plan: Plan) -> Session:
    """Build DDP with torch.optim.Muon, in float32: every rank orthogonalizes every matrix."""
    from torch.nn.parallel import DistributedDataParallel

    matrices, optimizers = _torch_optimizers(model, plan)
    data_parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compiled = torch.compile(data_parallel)

    def step(micro_batches: MicroBatches) -> Tensor:
        loss = _accumulate(compiled, micro_batches, data_parallel.no_sync)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # gradients stay views of DDP's buckets
        return loss

    return Session(step, len(matrices), "compiled")


def _plain(model: nn.Module, plan: Plan, muon: bool) -> Session:
    """Build one rank without a system for several: torch.compile and torch.optim, in bfloat16 under autocast."""
    if muon:
        matrices, optimizers = _torch_optimizers(model, plan)
    else:
        adamw = torch.optim.AdamW(
            model.parameters(), lr=plan.adamw_lr, betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay
        )
        matrices, optimizers = [], [adamw]
    half = plan.dtype == torch.bfloat16

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(plan.device.type, torch.bfloat16, enabled=half):
            return model(x, y)

    compiled = torch.compile(forward)

    def step(micro_batches: MicroBatches) -> Tensor:
        loss = _accumulate(compiled, micro_batches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Session(step, len(matrices), "compiled, autocast" if half else "compiled")


def plain_muon(model: nn.Module, plan: Plan) -> Session:
    return _plain(model, plan, muon=True)


def plain_adamw(model: nn.Module, plan: Plan) -> Session:
    return _plain(model, plan, muon=False)


def compute_only(model: nn.Module, plan: Plan) -> Session:
    """Run forward and backward alone on every rank: the floor that no training system can beat here."""
    compiled = torch.compile(model.to(plan.dtype))

    def step(micro_batches: MicroBatches) -> Tensor:
        loss = _accumulate(compiled, micro_batches)
        model.zero_grad()
        return loss

    return Session(step, 0, "compiled, no update")


EARLIER = "ours-muon-earlier"  # ours-muon with another version of the package, see --earlier
_FROM_SOURCE = "pip install -e . in this repository"
_FROM_PYPI = "pip install deepspeed"


#: changed fields of the plan, by variant
CHANGES: dict[str, dict[str, Any]] = {
    "ours-muon-auto": {},
    # Graphs hold the whole step: with other checks the host waits for their result, and runs the update itself.
    "ours-muon-graphs": {"cuda_graphs": True, "checks": "next_step"},
    "ours-muon-bfloat16": {"momentum_dtype": "bfloat16"},
    "ours-muon-8bit": {"momentum_dtype": "8bit"},
}
#: compile_muon with other settings, contenders only where named
VARIANTS = {
    name: Contender(name, partial(ours_varied, variant=name), ALL_STAGES, "compile_muon", _FROM_SOURCE)
    for name in CHANGES
}
CONTENDERS = VARIANTS | {
    contender.name: contender
    for contender in (
        Contender("ours-muon", ours_muon, ALL_STAGES, "compile_muon", _FROM_SOURCE),
        Contender(EARLIER, ours_muon, ALL_STAGES, "compile_muon", _FROM_SOURCE),
        Contender("ours-adamw", ours_adamw, ALL_STAGES, "compile_muon", _FROM_SOURCE),
        Contender("deepspeed-muon", deepspeed_muon, ALL_STAGES, "deepspeed", _FROM_PYPI),
        Contender("deepspeed-muon-compiled", deepspeed_muon_compiled, ALL_STAGES, "deepspeed", _FROM_PYPI),
        Contender("fsdp2-adamw", fsdp2_adamw, (2, 3), "torch", "pip install torch"),
        Contender("ddp-muon", ddp_muon, (0,), "torch", "pip install torch", (torch.float32,)),
        Contender("plain-muon", plain_muon, (0,), "torch", "pip install torch", one_rank=True),
        Contender("plain-adamw", plain_adamw, (0,), "torch", "pip install torch", one_rank=True),
        Contender("compute-only", compute_only, (NO_STAGE,), "torch", "pip install torch"),
    )
}
