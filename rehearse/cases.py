"""The rehearsed cases, their figures, and the budgets of a steady step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from models import SMALL
from order import Op

__all__ = ["BUDGETS", "CASES", "LARGE", "SHARED", "FEW", "Case", "Figures", "beyond", "over", "sent_bytes"]

_PLAIN = str.maketrans("", "", "{}'\"")

BUDGETS = Path(__file__).with_name("budgets.json")


@dataclass(frozen=True)
class Case:
    """The training of one rank, as a config describes it."""

    stage: int
    world: int
    dtype: str = "bf16"  # weights and activations in bfloat16 beside float32 masters; or "fp32"
    rank: int = 0  # that this process plays
    params: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer, beside rates
    more: Mapping[str, Any] = field(default_factory=dict)  # other keys of the config
    inductor: Mapping[str, Any] = field(default_factory=dict)  # settings of ``torch._inductor.config``
    method: str = "Muon"  # type of the optimizer
    model: str = SMALL
    frames: int = 1  # or 4, between which the graph breaks

    @property
    def name(self) -> str:
        settings = {**self.params, **self.more}
        words = [self.method] * (self.method != "Muon")
        words += [f"{self.model} in {self.frames} frames"] * (self.model != SMALL)
        words += [f"{key} {value}" for key, value in settings.items()] + list(self.inductor)
        return ", ".join([f"stage {self.stage}", f"{self.world} ranks", self.dtype, *words]).translate(_PLAIN)

    @property
    def micro_batches(self) -> int:
        return int(self.more.get("gradient_accumulation_steps", 1))

    @property
    def waits(self) -> int:
        """Waits of the host for the device in a steady step. The host waits for the numbers that it reads, or, where it
        computes AdamW, for each of three buckets of gradients."""
        if self.params.get("offload", {}).get("adamw_on") == "cpu":
            return 3
        return 0 if self.params.get("checks") == "next_step" else 1

    def config(self) -> dict[str, Any]:
        """Return the config for ``compile_muon.initialize``."""
        return {
            "compile": True,
            "optimizer": {"type": self.method, "params": {"lr": 0.02, "adam_lr": 0.005, **self.params}},
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.dtype == "bf16"},
            **self.more,
        }


#: bytes of the digest of a batch
_DIGEST = 16
#: offload with fewer buffers than buckets, which have to take turns
FEW = {"device": "cpu", "buffer_count": 2, "buffer_bytes": 1 << 18}
#: without the check of numbers, which the device does not compute
SHARED = {"size": 2, "blocks": ["blocks"], "check": False}
CASES = (
    *(Case(stage, world) for stage in range(4) for world in (1, 4)),
    *(Case(stage, 4, params={"checks": "next_step"}) for stage in (1, 3)),
    Case(3, 4, params={"checks": "next_step", "update": "step"}, more={"gradient_clipping": 1.0}),
    Case(1, 4, "fp32"),
    Case(3, 4, "fp32"),
    Case(2, 4, more={"gradient_accumulation_steps": 2}),
    Case(3, 4, more={"gradient_accumulation_steps": 2}),
    Case(3, 4, more={"gradient_clipping": 1.0}),
    Case(3, 8, rank=5, more={"mesh": {"replicate": 2, "shard": 4}}),
    Case(3, 4, more={"compile": {"nvtx": True}}),
    *(Case(stage, 4, more={"compile": {"cuda_graphs": True}}) for stage in (0, 1, 3)),
    *(Case(stage, 4, params={"checks": "next_step"}, more={"compile": {"cuda_graphs": True}}) for stage in (0, 1, 3)),
    *(
        Case(
            stage,
            4,
            params={"checks": "next_step"},
            more={"compile": {"cuda_graphs": True}, "gradient_accumulation_steps": 2},
        )
        for stage in (1, 3)
    ),
    Case(
        3,
        4,
        params={"checks": "next_step", "update": "step"},
        more={"compile": {"cuda_graphs": True}, "gradient_clipping": 1.0},
    ),
    *(
        Case(3, 4, method=method, params={"checks": "next_step"}, more={"compile": {"cuda_graphs": True}})
        for method in ("NorMuon", "SOAP")
    ),
    *(
        Case(stage, 4, params={"checks": "next_step", "offload": FEW | more})
        for more in ({}, {"masters": True}, {"masters": True, "adamw_on": "cpu"})
        for stage in (2, 3)
    ),
    *(Case(3, world, params={"checks": "next_step", "offload_param": "cpu"}) for world in (1, 4)),
    Case(2, 4, params={"checks": "next_step", "momentum_dtype": "8bit"}),
    # GiB that only moved activations fit.
    Case(3, 4, more={"compile": {"memory": 0.085}}),
    # Gathered weights stay for the whole step.
    Case(3, 4, more={"compile": {"memory": 1.0}, "gradient_accumulation_steps": 3}),
    Case(3, 4, params={"checks": "next_step"}, more={"sequence_parallel": SHARED}),
    *(
        Case(2, 4, dtype, params={"checks": "next_step"}, more={"sequence_parallel": {**SHARED, "attention": "ring"}})
        for dtype in ("bf16", "fp32")
    ),
)


#: micro-batches and budgets in GiB that fill an H100; the largest budget of a model fits all that it makes
LARGE = tuple(
    Case(stage, 8, model=model, frames=frames, more={"compile": {"memory": memory}})
    for model, stage, frames, memory in (
        ("GPT 1 B", 1, 1, 20),
        ("GPT 1 B", 1, 4, 28),
        ("GPT 1 B", 3, 1, 24),
        ("Llama 1 B", 3, 1, 24),
        ("Llama 1 B", 1, 4, 20),
        ("Llama 1 B", 3, 4, 20),
        ("Llama 8 B", 3, 4, 40),
        ("Llama 8 B", 3, 4, 76),
        ("Llama 8 B", 1, 4, 60),
        ("Llama 8 B", 3, 1, 50),
    )
)


@dataclass(frozen=True)
class Figures:
    """Figures of one steady step of a rank."""

    waits: Mapping[str, int]  # of the host for the device, by place in the source
    unordered: tuple[str, ...]  # races, in words
    kernels: int  # launches, of libraries and Triton
    copies: int  # and memsets
    collectives: Mapping[str, int]  # NCCL calls by name
    sent: int  # bytes of collectives, without the one sum of numbers in ``step()``
    counted: int  # the same by ``optimizer.traffic``
    # Peak of the bytes requested of the allocator, measured and planned; both without the unsplit rest of blocks, up to
    # 1 MiB each. With CUDA graphs, whose pools hold memory that nobody requests, `peak` is that of the reserved bytes.
    peak: int
    planned: int
    host_ms: float  # of Python for forward, backward and step
    planned_ms: float  # the same by the planner
    theirs_ms: float  # with plain torch.compile, FSDP2 on several ranks, and AdamW
    replayed: int = 0  # CUDA graphs, whose operations are in no log

    @property
    def ratio(self) -> float:
        return self.host_ms / self.theirs_ms

    @property
    def of_plan(self) -> float:
        return self.peak / self.planned

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def without_checks(ops: Sequence[Op]) -> list[Op]:
    """Drop collectives that ``optimizer.traffic`` does not count. These are the sums of numbers that the host reads in
    ``step()``, all-reduces on the main stream, and the digest of the batch that the ranks of a sequence compare."""
    return [op for op in ops if op.name != "ncclAllReduce" or (op.stream and op.amount != _DIGEST)]


def sent_bytes(ops: Iterable[Op]) -> int:
    """Return the bytes that this rank sends to others by ring algorithms, as ``optimizer.traffic`` counts them.

    >>> sent_bytes([Op("nccl", 1, "ncclAllGather", amount=100, ranks=4)])
    300
    """
    share = {
        "ncclAllGather": lambda n: n - 1,
        "ncclReduceScatter": lambda n: (n - 1) / n,
        "ncclAllReduce": lambda n: 2 * (n - 1) / n,
        "ncclAlltoAll": lambda n: (n - 1) / n,
        "ncclSend": lambda n: 1,
    }
    return round(sum(op.amount * share[op.name](op.ranks) for op in ops if op.kind == "nccl" and op.name in share))


def collectives_of(ops: Iterable[Op]) -> dict[str, int]:
    """Count the calls of NCCL by name."""
    return dict(sorted(Counter(op.name for op in ops if op.kind == "nccl").items()))


def _wrong(figures: Figures) -> list[str]:
    """List, in words, races and bytes that ``optimizer.traffic`` counts otherwise."""
    if figures.sent == figures.counted or figures.replayed:
        return [*figures.unordered]
    return [*figures.unordered, f"{figures.sent} bytes were sent, optimizer.traffic says {figures.counted}"]


def beyond(figures: Figures, memory: float) -> list[str]:
    """List, in words, where a case of :data:`LARGE` leaves its ``memory`` in GiB or its plan."""
    problems = _wrong(figures)
    if figures.peak > memory * 2**30 or abs(figures.of_plan - 1) > 0.02:
        problems.append(f"peak {figures.peak / 2**30:.2f} GiB of {memory}, {figures.of_plan:.3f} of the plan")
    return problems


def over(figures: Figures, budget: Mapping[str, Any], limits: Mapping[str, Any], waits: int) -> list[str]:
    """List, in words, where a case exceeds its budget.

    ``budget`` has the case's ``kernels``, ``copies``, ``of_plan`` and ``ratio``; ``limits`` those of every case: how
    far ``of_plan`` may be off (``peak``), and ``slack`` of the ratio, which other work on the machine moves. ``waits``:
    allowed waits of the host.
    """
    problems = _wrong(figures)
    waited = sum(figures.waits.values())
    if waited > waits:
        problems.append(f"{waited} waits for the device, not {waits}: {dict(figures.waits)}")
    if abs(figures.of_plan - budget["of_plan"]) > limits["peak"]:
        problems.append(
            f"peak {figures.peak:,} bytes, {figures.of_plan:.3f} of what is planned, not {budget['of_plan']}"
        )
    for name in ("kernels", "copies"):
        if getattr(figures, name) > budget[name]:
            problems.append(f"{getattr(figures, name)} {name}, budget {budget[name]}")
    if figures.ratio > budget["ratio"] * limits["slack"]:
        problems.append(f"host time {figures.ratio:.2f} of plain training's, budget {budget['ratio']}")
    return problems
