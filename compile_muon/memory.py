"""``compile.memory``: what a frame keeps between forward and backward, so that a step fits a number of bytes.

A frame is partitioned and lowered for a fixed list of choices (:class:`~compile_muon.passes.pipeline.Kept`), and the
planner simulates forward and backward of each, from shapes alone. The choice is the fastest whose peak fits, so a step
takes no longer with a larger budget.

Frames are compiled one by one, as they first run, so that a frame knows its own graphs only. It gets the part of the
budget that its parameters have of all parameters: the bytes that it saves, divided by that part, stand for the bytes
that all frames save.

Gathers are collective. The first rank that compiles a frame chooses which weights stay and how far ahead gathers
start, and other ranks follow, through the store of the process group. Activations are each rank's own choice, since
batches may differ in size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from inspect import currentframe
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from compile_muon.config import FrameOptions
from compile_muon.engine.dtensors import local_tensor
from compile_muon.errors import ConfigError, config_error
from compile_muon.passes import (
    LOWERING_PASSES,
    BackwardRequest,
    GraphKind,
    PassContext,
    Purpose,
    reduced_grads,
    run_passes,
    saved_by,
)
from compile_muon.passes.joint.recompute import gathered_bytes
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.lowering.aliases import base, nbytes
from compile_muon.passes.pipeline import Kept
from compile_muon.passes.torch_private import ShortenTraceback

if TYPE_CHECKING:
    from compile_muon.engine.engine import Engine
    from compile_muon.engine.sharded_param import ShardedParam
    from compile_muon.engine.state_provider import StateProvider
    from compile_muon.planning.machine import Machine

__all__ = ["BudgetError", "FrameMemory", "auto_limit", "resident_bytes"]

#: ``(joint graph with markers, context) -> (forward, backward)``
Halves = Callable[[GraphModule, PassContext], tuple[GraphModule, GraphModule]]

_GIB = 2**30
#: parts of the activations, of the gathered weights, and numbers of buckets, from the least memory to the most
_CHOICES = (
    *(Kept(0.0, part) for part in (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)),
    *(Kept(1.0, part) for part in (0.05, 0.2, 0.5)),
    *(Kept(part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)),
    Kept(1.0, buckets=8),
)
#: what "auto" leaves of a GPU: to fragments, a part, and to the context and communicators, bytes
_FRAGMENTS, _CONTEXT = 0.05, 1.5 * _GIB


def resident_bytes(
    params: Sequence[ShardedParam], state: Mapping[Any, Mapping[str, Any]], provider: StateProvider
) -> dict[str, int]:
    """Return the bytes that live all the time on a rank's device: "parameters" and "optimizer" (state)."""
    states = [value for sharded in params for value in state.get(sharded.param, {}).values() if value.ndim]
    off_device = provider.bytes_off_device - provider.bytes_in_buffers
    return {
        "parameters": sum(map(_weight_bytes, params)),
        "optimizer": sum(local_tensor(value).nbytes for value in states) - off_device,
    }


def auto_limit(memory_bytes: int) -> int:
    """Return the bytes that "auto" allows on a GPU of so many."""
    return int((1 - _FRAGMENTS) * memory_bytes - _CONTEXT)


def _weight_bytes(sharded: ShardedParam) -> int:
    """Return the bytes of the shard and the resident weight; with one dtype, the shard is a view of the latter."""
    local, resident = sharded.local, sharded.resident
    if resident is None:
        return local.nbytes
    return resident.nbytes + (local.nbytes if resident.dtype is not local.dtype else 0)


def _gradient_bytes(sharded: ShardedParam) -> int:
    """Return the bytes of ``.grad``, and at stage 1 of the whole sum of earlier micro-batches."""
    several = sharded.ledger.accumulation_steps != 1
    numel = sharded.local.numel() + (sharded.spec.layout.numel if several and sharded.spec.layout.accumulates else 0)
    return numel * decode_dtype(sharded.spec.dtype).itemsize


class BudgetError(ShortenTraceback, ConfigError):
    """No choice fits ``compile.memory``; a :class:`~compile_muon.ConfigError` that Dynamo does not wrap."""

    def __init__(self, message: str, least: str) -> None:
        self.least = least  # that a step takes, with its unit
        super().__init__(message, first_useful_frame=currentframe())

    def remove_dynamo_frames(self) -> BudgetError:
        """Drop the traceback, which is the compiler's."""
        return self.with_traceback(None)


@dataclass(frozen=True)
class Choice:
    """What a frame keeps, with the peak of all frames that goes with it, and the budget, in bytes."""

    kept: Kept
    gathers: bool  # whether weights are gathered or cast for the frame
    peak: int
    limit: int

    def __str__(self) -> str:
        kept = self.kept
        weights = f"{kept.weights:.0%} of gathered weights stay, with {kept.buckets} buckets at a time, and "
        return (
            f"{weights if self.gathers else ''}{kept.activations:.0%} of activations are saved; "
            f"peak {_gib(self.peak)} of {_gib(self.limit)}"
        )


@dataclass(frozen=True)
class _Simulated:
    """Forward and backward of a frame with a choice: bytes without what is resident."""

    kept: Kept
    seconds: float
    saved: int  # by the end of forward
    peak: int
    gradients: int  # part of ``peak``


@dataclass(eq=False)
class FrameMemory:
    """The memory of an optimizer's frames.

    Attributes:
        chosen: what each frame keeps, by its name.
    """

    engine: Engine
    chosen: dict[str, Choice] = field(default_factory=dict)

    def fit(
        self, gm: GraphModule, halves: Halves, ctx: PassContext, options: FrameOptions, read: Sequence[ShardedParam]
    ) -> Kept:
        """Return what a frame keeps: the most that fits ``options.memory``.

        ``gm`` is the joint graph with markers, ``read`` the parameters that the frame reads. Raises a
        :class:`~compile_muon.ConfigError` if nothing fits; it has a table.
        """
        from compile_muon.planning.machine import load_machine

        device = self.engine.device.type
        machine = load_machine(self.engine.step.config.machine or ("cpu" if device == "cpu" else "h100"))
        limit = self._limit(options.memory, machine)
        params = self.engine.params
        part = min(1.0, sum(s.spec.layout.numel for s in read) / sum(s.spec.layout.numel for s in params))
        resident = resident_bytes(params, self.engine.step.optimizer.state, self.engine.state_provider)
        gradients = sum(_gradient_bytes(sharded) for sharded in params if sharded.param.requires_grad)
        simulated = cache(partial(_simulated, gm, halves, ctx, options, machine, self.engine))

        def peak(frame: _Simulated) -> int:
            others = sum(resident.values()) + gradients - frame.gradients
            return others + int(frame.saved / part) + frame.peak - frame.saved

        def fastest(choices: Sequence[Kept]) -> _Simulated | None:
            if peak(most := simulated(choices[-1])) <= limit:
                return most
            fitting = [frame for frame in map(simulated, choices) if peak(frame) <= limit]
            return min(fitting, key=lambda frame: (frame.seconds, peak(frame)), default=None)

        choices = self._choices(gm, ctx)
        frame = fastest(choices)
        if frame is not None and (followed := self._agreed(read, frame.kept)) != frame.kept:
            weights, buckets = followed.weights, followed.buckets
            frame = fastest([Kept(weights, each.activations, buckets) for each in _CHOICES])
        if frame is None:
            table = _table(resident, gradients, part, peak, [simulated(each) for each in choices])
            least = min(map(peak, map(simulated, choices)))
            problem = f"is {_gib(limit)}, and a step takes {_gib(least)} at least:{table}\n"
            remedy = f"allow {math.ceil(100 * least / _GIB) / 100:.2f} or more, or save as the table says"
            raise BudgetError(str(config_error("compile.memory", options.memory, problem, remedy)), _gib(least))
        self.chosen[ctx.frame] = Choice(frame.kept, bool(gathered_bytes(gm)), peak(frame), limit)
        return frame.kept

    def _choices(self, gm: GraphModule, ctx: PassContext) -> list[Kept]:
        """Return the choices that the frame has, from the least memory to the most."""
        if not ctx.options.reshard_after_forward:
            return [kept for kept in _CHOICES if kept.weights == 1]
        # Without a store ranks cannot agree on gathers.
        agrees = not self.engine.compares or self.engine.status.heartbeat is not None
        return [kept for kept in _CHOICES if (gathered_bytes(gm) and agrees) or kept == Kept(0.0, kept.activations)]

    def _agreed(self, read: Sequence[ShardedParam], kept: Kept) -> Kept:
        """Return ``kept`` with the gathers of the first rank that compiled a frame of these parameters."""
        names = hashlib.sha1("\n".join(sharded.name for sharded in read).encode()).hexdigest()
        agreed = self.engine.status.agreed(f"kept/{names}", f"{kept.weights} {kept.buckets}")
        weights, buckets = agreed.split()
        return replace(kept, weights=float(weights), buckets=int(buckets))

    def _limit(self, memory: float | str | None, machine: Machine) -> int:
        """Return the budget in bytes."""
        if isinstance(memory, (int, float)):
            return int(memory * _GIB)
        if machine.device != "cuda":
            raise config_error("compile.memory", memory, "has no meaning on CPUs, which share memory", "write GiB")
        device = self.engine.device
        real = device.type == "cuda"
        bytes_of = torch.cuda.get_device_properties(device).total_memory if real else machine.memory_bytes
        return auto_limit(bytes_of)


def _table(
    resident: Mapping[str, int],
    gradients: int,
    part: float,
    peak: Callable[[_Simulated], int],
    frames: Sequence[_Simulated],
) -> str:
    """Return a line for each use of memory, of the choice that takes least, with what makes it smaller."""
    least = min(frames, key=peak)
    saved, usual = (int(frame.saved / part) for frame in (least, frames[-1]))
    rows = [
        ("weights", resident["parameters"], "zero_optimization.stage 3, more ranks"),
        ("gradients", gradients, "zero_optimization.stage 2 or 3, more ranks"),
        ("optimizer state", resident["optimizer"], "zero_optimization.offload_optimizer"),
        ("activations", saved, f"smaller micro-batches; {_gib(usual)} where all are saved"),
        ("other results", peak(least) - sum(resident.values()) - gradients - saved, "smaller micro-batches, bucket_mb"),
    ]
    return "".join(f"\n  {_gib(nbytes):>12}  {name}: {remedy}" for name, nbytes, remedy in rows)


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:,.2f} GiB" if nbytes >= 0.1 * _GIB else f"{nbytes / 2**20:,.1f} MiB"


def _simulated(
    gm: GraphModule,
    halves: Halves,
    ctx: PassContext,
    options: FrameOptions,
    machine: Machine,
    engine: Engine,
    kept: Kept,
) -> _Simulated:
    """Partition and lower a copy of a joint graph, and simulate it."""
    from compile_muon.planning.capture import groups_of
    from compile_muon.planning.simulate import SimulatedGraph, simulate

    ctx = replace(ctx, chosen=kept, options=replace(ctx.options, dump=None))
    forward, backward = halves(deepcopy(gm), ctx)
    ctx.saved = saved_by(forward, ctx.user_outputs)
    (outputs,) = forward.graph.output_node().args
    memories = {base(node) for node in outputs[ctx.user_outputs :] if isinstance(node, Node)}
    purpose = Purpose.REDUCE if engine.ledger.update == "step" else Purpose.SPECULATE
    request = BackwardRequest.of(reduced_grads(backward), purpose)
    graphs = []
    for half, kind, asked in ((forward, GraphKind.FORWARD, None), (backward, GraphKind.BACKWARD, request)):
        of_half = replace(ctx, kind=kind, request=asked, timings={})
        graph = SimulatedGraph.of(run_passes(half, LOWERING_PASSES, of_half), of_half)
        graphs.append(replace(graph, replayed=options.cuda_graphs))
    ranks = 1 if engine.mesh is None else engine.mesh.size
    step = simulate(graphs, machine, groups=groups_of(engine.params, graphs), ranks=ranks, codegen=options.codegen)
    return _Simulated(
        kept,
        step.seconds,
        sum(nbytes(memory) for memory in memories if memory.op == "call_function"),
        step.peak.total,
        step.peak.by_category.get("gradients", 0),
    )
