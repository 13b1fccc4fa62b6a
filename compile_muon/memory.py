"""``compile.memory``: choose the weights and activations that a frame saves, so that a step fits a memory budget.

The module partitions and lowers a frame once for each of a fixed list of choices
(:class:`~compile_muon.passes.pipeline.Kept`), and the planner simulates forward and backward from shapes alone. The
fastest choice whose peak fits wins, so a larger budget never makes a step slower.

Frames are compiled one by one, as they first run, and the graphs of later frames are unknown. Saved bytes are taken to
be in proportion to parameters: a frame with a tenth of all parameters saves a tenth of the bytes of all frames.

Gathers are collective: the first rank that compiles a frame chooses the weights that stay and the buckets that are
gathered ahead, and other ranks follow it, through the store of the process group. Each rank chooses its activations by
itself, since batches may differ in size.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from inspect import currentframe
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from compile_muon.config import FrameOptions
from compile_muon.engine.dtensors import local_tensor
from compile_muon.errors import ConfigError, config_error
from compile_muon.passes import (
    LOWERING_PASSES,
    MOVE_OUT,
    BackwardRequest,
    GraphKind,
    PassContext,
    Purpose,
    persistent_weights,
    reduced_grads,
    run_passes,
    saved_by,
    take_weights,
)
from compile_muon.passes.joint.move import move_activations
from compile_muon.passes.joint.recompute import gathers
from compile_muon.passes.language.layout import Axis
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.lowering.aliases import base, nbytes
from compile_muon.passes.pipeline import Kept
from compile_muon.passes.torch_private import ShortenTraceback
from compile_muon.simulate import SimulatedGraph, Timeline, simulate
from compile_muon.simulate.machine import Machine, load_machine
from compile_muon.simulate.played import groups_of

if TYPE_CHECKING:
    from compile_muon.engine.engine import Engine
    from compile_muon.engine.hooks import StateProvider
    from compile_muon.engine.sharded_param import ShardedParam

#: ``(joint graph with markers, context) -> (forward, backward)``
Halves = Callable[[GraphModule, PassContext], tuple[GraphModule, GraphModule]]

_GIB = 2**30
#: ``Kept(weights, activations, moved, buckets, persistent)`` from the least memory to the most
_CHOICES = (
    *(Kept(0.0, part) for part in (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)),
    *(Kept(1.0, part) for part in (0.05, 0.2, 0.5)),
    *(Kept(0.0, 0.5, moved) for moved in (1.0, 0.5)),
    *(Kept(part, 1.0, moved) for part in (0.0, 1.0) for moved in (1.0, 0.75, 0.5, 0.25)),
    *(Kept(1.0, part, persistent=True) for part in (0.2, 0.5)),
    *(Kept(0.5, persistent=persistent) for persistent in (True, False)),
    Kept(1.0, persistent=True),
    *(Kept(part) for part in (0.0, 0.25, 0.75, 1.0)),
    Kept(1.0, buckets=8),
)
#: memory of a GPU that "auto" leaves free: a fraction for fragmentation, bytes for CUDA's context and communicators
_FRAGMENTS, _CONTEXT = 0.05, 1.5 * _GIB


def resident_bytes(
    params: Sequence[ShardedParam], state: Mapping[Any, Mapping[str, Any]], provider: StateProvider
) -> dict[str, int]:
    """Return the bytes on a rank's device that live through the whole step: "parameters" and "optimizer" (state)."""
    states = [value for sharded in params for value in state.get(sharded.param, {}).values() if value.ndim]
    # Offloaded states pass through buffers on the device, which count there.
    off_device = provider.bytes_off_device - provider.bytes_in_buffers
    return {
        "parameters": sum(map(_weight_bytes, params)),
        "optimizer": sum(local_tensor(value).nbytes for value in states) - off_device,
    }


def mesh_axes(params: Sequence[ShardedParam]) -> list[Axis]:
    """Return the mesh dimensions over which parameters are sharded or replicated."""
    return [*dict.fromkeys(axis for sharded in params for axis in sharded.spec.layout.axes)]


def auto_limit(memory_bytes: int) -> int:
    """Return the budget in bytes that "auto" stands for on a GPU of ``memory_bytes``."""
    return int((1 - _FRAGMENTS) * memory_bytes - _CONTEXT)


def _weight_bytes(sharded: ShardedParam) -> int:
    """Return the bytes of the shard and of the resident weight, of which the shard is a view if dtypes are equal."""
    local, resident = sharded.local, sharded.resident
    if resident is None:
        return local.nbytes
    return resident.nbytes + (local.nbytes if resident.dtype is not local.dtype else 0)


def _gradient_bytes(sharded: ShardedParam) -> int:
    """Return the bytes of ``.grad``, and at stage 1 of the unreduced sum of earlier micro-batches (whole shape)."""
    if not sharded.param.requires_grad:
        return 0
    several = sharded.ledger.accumulation_steps != 1
    numel = sharded.local.numel() + (sharded.spec.layout.numel if several and sharded.spec.layout.accumulates else 0)
    return numel * decode_dtype(sharded.spec.dtype).itemsize


class BudgetError(ShortenTraceback, ConfigError):
    """A :class:`~compile_muon.ConfigError` that Dynamo does not wrap: no choice fits ``compile.memory``."""

    def __init__(self, message: str, least: str) -> None:
        self.least = least  # memory that a step takes at least, with its unit
        super().__init__(message, first_useful_frame=currentframe())

    def remove_dynamo_frames(self) -> BudgetError:
        """Drop the traceback: all its frames are the compiler's."""
        return self.with_traceback(None)


@dataclass(frozen=True)
class Choice:
    """The choice for a frame."""

    kept: Kept
    gathers: bool  # whether the frame gathers or casts weights
    peak: int  # bytes of a step of all frames
    limit: int  # budget in bytes

    def __str__(self) -> str:
        choice = self.kept
        until = " for the whole step" if choice.persistent else ""
        weights = f"{choice.weights:.0%} of gathered weights stay{until}, with {choice.buckets} buckets at a time, and "
        moved = f", {choice.moved:.0%} of them in host memory" if choice.moved else ""
        return (
            f"{weights if self.gathers else ''}{choice.activations:.0%} of activations are saved{moved}; "
            f"peak {_gib(self.peak)} of {_gib(self.limit)}"
        )


@dataclass(frozen=True)
class _Simulated:
    """The simulated forward and backward of a frame: time, and bytes beside parameters and optimizer state."""

    kept: Kept
    seconds: float  # of a micro-batch; the mean over a step
    saved: int  # bytes saved for backward
    peak: int  # contains ``saved``


class FrameMemory:
    """The memory of an optimizer's frames; ``chosen`` is what each keeps, by name of the frame."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)  # whose ledger holds this object
        self.chosen: dict[str, Choice] = {}
        #: gathered weights that stay for later micro-batches, with the edits of the shard and the spec
        self.persistent: WeakKeyDictionary[ShardedParam, tuple[tuple[int, ParamSpec], Tensor]] = WeakKeyDictionary()

    @property
    def engine(self) -> Engine:
        engine = self._engine()
        assert engine is not None  # frames run while their optimizer lives
        return engine

    def fit(
        self,
        gm: GraphModule,
        halves: Halves,
        ctx: PassContext,
        options: FrameOptions,
        frame_params: Sequence[ShardedParam],
    ) -> Kept:
        """Return the fastest choice for a frame whose peak fits ``options.memory``, or raise :class:`BudgetError`.

        ``gm`` is the joint graph with markers; ``halves`` partitions it into forward and backward; the frame reads the
        parameters ``frame_params``.
        """
        device = self.engine.device.type
        machine = load_machine(self.engine.step.config.machine or ("cpu" if device == "cpu" else "h100"))
        limit = self._limit(options.memory, machine)
        params = self.engine.params
        part = min(1.0, sum(s.spec.layout.numel for s in frame_params) / sum(s.spec.layout.numel for s in params))
        resident = resident_bytes(params, self.engine.step.optimizer.state, self.engine.state_provider)
        gradients = sum(map(_gradient_bytes, params))
        # Without accumulation, the frame's own gradients are in its simulation alone.
        in_frame = sum(map(_gradient_bytes, frame_params)) if self.engine.ledger.accumulation_steps == 1 else 0
        frame_choices = _Choices(gm, halves, ctx, options, machine, self.engine)
        simulated = frame_choices.simulated
        outside = sum(resident.values()) + gradients - in_frame

        def peak(frame: _Simulated) -> int:
            # The frame's peak has its own saved bytes only: count those of all frames in their place.
            return outside + int(frame.saved / part) + frame.peak - frame.saved

        def fastest(all_choices: Sequence[Kept]) -> _Simulated | None:
            # Saved bytes are known ahead of the simulation, and are a part of the peak.
            choices = [choice for choice in all_choices if outside + frame_choices.saved_bytes(choice) / part <= limit]
            # Choices that save most recompute least: if they fit, the others need no simulation.
            most = all_choices[-1]
            candidates = [c for c in choices if replace(most, buckets=c.buckets, persistent=c.persistent) == c]
            if not candidates or any(peak(simulated(choice)) > limit for choice in candidates):
                candidates = choices
            fitting = [frame for frame in map(simulated, candidates) if peak(frame) <= limit]
            return min(fitting, key=lambda frame: (frame.seconds, peak(frame)), default=None)

        choices = self._choices(gm, options, machine)
        frame = fastest(choices)
        if frame is not None and (agreed := self._agreed(frame_params, frame.kept)) != frame.kept:
            # Another rank chose other gathers: take them, and choose activations anew.
            parts = dict.fromkeys((choice.activations, choice.moved) for choice in choices)
            choices = [replace(agreed, activations=activations, moved=moved) for activations, moved in parts]
            frame = fastest(choices)
        if frame is None:
            table = _table(resident, gradients, part, peak, [simulated(choice) for choice in choices])
            least = min(map(peak, map(simulated, choices)))
            problem = f"is {_gib(limit)}, and a step takes {_gib(least)} at least:{table}\n"
            remedy = f"allow {math.ceil(1000 * least / _GIB) / 1000:.3f} or more, or save as the table says"
            raise BudgetError(str(config_error("compile.memory", options.memory, problem, remedy)), _gib(least))
        self.chosen[ctx.frame] = Choice(frame.kept, gathers(gm), peak(frame), limit)
        return frame.kept

    def _choices(self, gm: GraphModule, options: FrameOptions, machine: Machine) -> list[Kept]:
        """Return the choices open to the frame, from the least memory to the most."""
        # A CUDA graph would record copies to one host buffer, which the next micro-batch overwrites.
        moves = machine.host_bandwidth and not options.cuda_graphs
        # Nor do CUDA graphs keep results for another graph; and only a declared number says which one is the last.
        carries = (self.engine.ledger.accumulation_steps or 1) > 1 and not options.cuda_graphs
        choices = [c for c in _CHOICES if (moves or not c.moved) and (carries or not c.persistent)]
        if not options.reshard_after_forward:
            return [choice for choice in choices if choice.weights == 1]
        # Without a store ranks cannot agree on gathers.
        agrees = not self.engine.compares or self.engine.status.heartbeat is not None
        if agrees and gathers(gm):
            return choices
        return [choice for choice in choices if choice == Kept(0.0, choice.activations, choice.moved)]

    def _agreed(self, frame_params: Sequence[ShardedParam], choice: Kept) -> Kept:
        """Return ``choice`` with the gathers of the first rank that compiled a frame of ``frame_params``."""
        names = hashlib.sha1("\n".join(sharded.name for sharded in frame_params).encode()).hexdigest()
        agreed = self.engine.status.agreed(f"kept/{names}", f"{choice.weights} {choice.buckets} {choice.persistent:d}")
        weights, buckets, persistent = agreed.split()
        return replace(choice, weights=float(weights), buckets=int(buckets), persistent=bool(int(persistent)))

    def _limit(self, memory: float | str | None, machine: Machine) -> int:
        """Return the budget in bytes from ``memory``: GiB, or "auto"."""
        if isinstance(memory, (int, float)):
            return int(memory * _GIB)
        if machine.device != "cuda":
            problem = "has no meaning on CPUs, which share memory"
            raise BudgetError(str(config_error("compile.memory", memory, problem, "write GiB")), "")
        device = self.engine.device
        present = device.type == "cuda"  # a plan for GPUs runs on a CPU
        memory_bytes = torch.cuda.get_device_properties(device).total_memory if present else machine.memory_bytes
        return auto_limit(memory_bytes)


def _table(
    resident: Mapping[str, int],
    gradients: int,
    part: float,
    peak: Callable[[_Simulated], int],
    frames: Sequence[_Simulated],
) -> str:
    """Return a line for each use of memory by the smallest choice, with the settings that reduce it.

    ``frames``: all choices, the last of which saves all activations; ``part``: fraction of all parameters in the frame.
    """
    least = min(frames, key=peak)
    saved, all_saved = (int(frame.saved / part) for frame in (least, frames[-1]))
    rows = [
        ("weights", resident["parameters"], "zero_optimization.stage 3, more ranks"),
        ("gradients", gradients, "zero_optimization.stage 2 or 3, more ranks"),
        ("optimizer state", resident["optimizer"], "zero_optimization.offload_optimizer"),
        ("activations", saved, f"smaller micro-batches; {_gib(all_saved)} where all are saved"),
        ("other results", peak(least) - sum(resident.values()) - gradients - saved, "smaller micro-batches, bucket_mb"),
    ]
    return "".join(f"\n  {_gib(nbytes):>12}  {name}: {remedy}" for name, nbytes, remedy in rows)


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:,.2f} GiB" if nbytes >= 0.1 * _GIB else f"{nbytes / 2**20:,.1f} MiB"


class _Choices:
    """The simulated steps of a frame, by choice; choices that differ only behind the partitioner share its result."""

    def __init__(
        self, gm: GraphModule, halves: Halves, ctx: PassContext, options: FrameOptions, machine: Machine, engine: Engine
    ) -> None:
        def ahead_of_lowering(weights: float, activations: float, moved: float) -> tuple[GraphModule, GraphModule]:
            if not moved:
                return halves(deepcopy(gm), self._context(Kept(weights, activations)))
            forward, backward = map(deepcopy, self._halves(weights, activations, 0.0))
            move_activations(forward, backward, ctx.user_outputs, moved)
            return forward, backward

        gm.graph.set_codegen(CodeGen())  # that of nested arguments warns where it is copied
        self._ctx, self._options, self._machine, self._engine = ctx, options, machine, engine
        self._halves = cache(ahead_of_lowering)
        self.saved_bytes = cache(self._saved_bytes)
        self.simulated = cache(self._simulated)

    def _context(self, choice: Kept) -> PassContext:
        return replace(self._ctx, chosen=choice, options=replace(self._ctx.options, dump=None))

    def _saved_bytes(self, choice: Kept) -> int:
        """Return the bytes that forward saves for backward on the device."""
        forward, _ = self._halves(choice.weights, choice.activations, choice.moved)
        (outputs,) = forward.graph.output_node().args
        # Several saved values may be views of one storage; saved placeholders exist before forward.
        storages = {base(node) for node in outputs[self._ctx.user_outputs :] if isinstance(node, Node)}
        made = [memory for memory in storages if memory.op == "call_function" and memory.target is not MOVE_OUT]
        return sum(map(nbytes, made))

    def _simulated(self, choice: Kept) -> _Simulated:
        """Lower the halves under ``choice``, and simulate them."""
        forward, backward = self._halves(choice.weights, choice.activations, choice.moved)
        ctx = self._context(choice)
        persistent = tuple(persistent_weights(forward, ctx))
        ctx.saved = saved_by(forward, ctx.user_outputs, persistent)
        last = Purpose.REDUCE if self._engine.ledger.update == "step" else Purpose.SPECULATE

        def lowered(half: GraphModule, kind: GraphKind, purpose: Purpose | None = None, **parts: Any) -> SimulatedGraph:
            request = BackwardRequest.of(reduced_grads(half), purpose) if purpose else None
            half_ctx = replace(ctx, kind=kind, request=request, timings={}, **parts)
            graph = SimulatedGraph.of(run_passes(deepcopy(half), LOWERING_PASSES, half_ctx), half_ctx)
            return replace(graph, replayed=self._options.cuda_graphs)

        first = lowered(forward, GraphKind.FORWARD, persistent=persistent)
        update = lowered(backward, GraphKind.BACKWARD, last)
        step = self._played([first, update])
        seconds, peak = step.seconds, step.peak.total
        if persistent:
            again = deepcopy(forward)
            take_weights(again, ctx)
            later = lowered(again, GraphKind.FORWARD, persistent=persistent, again=True)
            reduction = lowered(backward, GraphKind.BACKWARD, Purpose.REDUCE)
            number = self._engine.ledger.accumulation_steps or 1
            peak = self._played([first, reduction, later, update]).peak.total
            seconds = (seconds + (number - 1) * self._played([later, update]).seconds) / number
        return _Simulated(choice, seconds, self.saved_bytes(choice), peak)

    def _played(self, graphs: Sequence[SimulatedGraph]) -> Timeline:
        ranks = 1 if self._engine.mesh is None else self._engine.mesh.size
        groups = groups_of(mesh_axes(self._engine.params), graphs)
        return simulate(graphs, self._machine, groups=groups, ranks=ranks, codegen=self._options.codegen)
