"""The pass runner: order, contracts, timing, lint, stamps and dumps, so that passes hold only their rewrite."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch.fx import GraphModule

from .costs import Costs
from .errors import PassContractError
from .language.request import BackwardRequest
from .torch_private import trace_artifact

__all__ = [
    "LOWERED", "PASS_KEY", "GraphPass", "GraphKind", "Kept", "PassContext", "PassOptions", "run_passes", "tensor_value",
]  # fmt: skip

#: key of node.meta: the name of the pass that made the node
PASS_KEY = "muon_zero_pass"


class GraphKind(str, Enum):
    """The role of a graph."""

    DYNAMO = "dynamo"
    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"
    STEP = "step"


#: kinds of graphs that are lowered
LOWERED = (GraphKind.FORWARD, GraphKind.BACKWARD, GraphKind.INFERENCE, GraphKind.STEP)


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Options of the passes, from the caller of torch.compile."""

    dump: Path | None = None  # folder for readable graphs before and after each pass
    nvtx: bool = False  # insert profiler ranges around collectives and Newton–Schulz
    bucket_bytes: int = 512 * 2**20  # largest bucket; the cost model may choose smaller ones
    exchange_bytes: int = 512 * 2**20  # most bytes that overlapping exchanges hold
    # Gather again for backward at stage 3, rather than save gathered weights; at stage 0 the same for casts of master
    # weights.
    reshard_after_forward: bool = True


@dataclass(frozen=True)
class Kept:
    """The memory that a frame spends to save time, between forward and backward and on gathers ahead."""

    weights: float = 0.0  # part of the bytes of gathered weights that stay: those that backward reads first
    activations: float = 1.0  # PyTorch's ``activation_memory_budget``: of the saved bytes, from a graph's inputs on
    moved: float = 0.0  # part of the bytes of activations that forward saves in host memory: those that it makes first
    buckets: int = 2  # of gathered weights in memory at a time: the one in use, and those ahead
    persistent: bool = False  # whether weights that stay for backward stay for the step's later micro-batches, too


@dataclass
class PassContext:
    """The input of passes beside the graph, and their further results."""

    kind: GraphKind
    frame: str = "frame"  # name in dumps
    options: PassOptions = PassOptions()
    costs: Costs = Costs()
    request: BackwardRequest | None = None  # backward graphs only
    user_outputs: int = 0  # forward graphs: number of the model's outputs, ahead of the saved values
    persistent: Sequence[int] = ()  # forward graphs: places of the persistent weights among the outputs
    again: bool = False  # forward graphs: the last inputs are the persistent weights
    # Backward graphs: inputs that forward made for this graph alone, by name, to names of their memory; several may be
    # views of one.
    saved: dict[str, str] = field(default_factory=dict)
    # Bytes that backward frees until its end, beside its outputs. The room pass sets it for a backward graph and reads
    # it for a step graph.
    left: int = 0
    shards: Sequence[int] = ()  # Dynamo's graphs: inputs that take_shards turned from DTensors into shards
    timings: dict[str, float] = field(default_factory=dict)  # seconds per pass, set by the runner
    exchange_bytes: int = 0  # most bytes that overlapping exchanges hold, set by verify
    chosen: Kept | None = None  # the planner's choice within a budget; None without one

    @property
    def kept(self) -> Kept:
        """The frame's choice; without a budget ``reshard_after_forward`` decides whether gathered weights stay."""
        return self.chosen or Kept(weights=0.0 if self.options.reshard_after_forward else 1.0)

    @property
    def title(self) -> str:
        """File-name stem of this graph's dumps."""
        parts = [self.frame, self.kind.value, *(["again"] if self.again else [])]
        if self.request is not None:
            parts.append(self.request.title)
        return ".".join(parts)


@dataclass(frozen=True)
class GraphPass:
    """A named rewrite with its contract."""

    name: str  # in dumps, timings and errors
    rewrite: Callable[[GraphModule, PassContext], GraphModule]
    requires: tuple[str, ...] = ()  # names of passes that must run before
    conflicts: tuple[str, ...] = ()  # names of passes that must not run before
    kinds: tuple[GraphKind, ...] = tuple(GraphKind)  # graphs that it applies to


_ASSIGNMENT = re.compile(r"^ +(\w+)(: \"[^\"]*\")? = ", re.MULTILINE)


def readable(gm: GraphModule) -> str:
    """Return the graph as Python code, with the name of the pass behind each node that a pass made."""
    makers = {node.name: node.meta[PASS_KEY] for node in gm.graph.nodes if PASS_KEY in node.meta}
    code = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    lines = []
    for line in code.splitlines():
        assignment = _ASSIGNMENT.match(line)
        maker = makers.get(assignment.group(1)) if assignment else None
        lines.append(line if maker is None else f"{line}  # made by {maker}")
    return "\n".join(lines) + "\n"


def _dump(gm: GraphModule, ctx: PassContext, stage: str) -> None:
    # Printing graphs takes an eighth of all compile time, so they are printed only for a reader.
    trace_artifact(f"muon_zero.{ctx.title}.{stage}", lambda: readable(gm))
    if ctx.options.dump is not None:
        ctx.options.dump.mkdir(parents=True, exist_ok=True)
        (ctx.options.dump / f"{ctx.title}.{stage}.py").write_text(readable(gm))


def run_passes(gm: GraphModule, passes: Sequence[GraphPass], ctx: PassContext) -> GraphModule:
    """Run ``passes`` in order over ``gm``, and label each new node with its pass (``meta[PASS_KEY]``).

    The graph is linted and compiled to Python once, at the end; with dumps it is linted after each pass. Raises
    :class:`PassContractError` where ``requires`` or ``conflicts`` does not hold, or a pass left an ill-formed graph.
    """
    done: set[str] = set()
    _dump(gm, ctx, "00_before")
    for number, graph_pass in enumerate((p for p in passes if ctx.kind in p.kinds), start=1):
        if missing := set(graph_pass.requires) - done:
            raise PassContractError(f"pass {graph_pass.name!r} needs {sorted(missing)} to run before it; reorder them")
        if clash := set(graph_pass.conflicts) & done:
            raise PassContractError(f"pass {graph_pass.name!r} must run before {sorted(clash)}; reorder them")
        started = time.perf_counter()
        old_nodes = set(gm.graph.nodes)
        gm = graph_pass.rewrite(gm, ctx)
        for node in gm.graph.nodes:
            if node not in old_nodes:
                node.meta[PASS_KEY] = graph_pass.name
        ctx.timings[graph_pass.name] = time.perf_counter() - started
        done.add(graph_pass.name)
        if ctx.options.dump is not None:
            _lint(gm, f"pass {graph_pass.name!r}")
        _dump(gm, ctx, f"{number:02d}_{graph_pass.name}")
    _lint(gm, f"one of the passes {sorted(done)}; options={{'dump': folder}} tells which:")
    gm.recompile()
    return gm


def _lint(gm: GraphModule, who: str) -> None:
    try:
        gm.graph.lint()
    except Exception as error:
        raise PassContractError(f"{who} left an ill-formed graph: {error}") from error


def tensor_value(node: torch.fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"node {node} holds {type(value).__name__}, not a tensor")
    return value
