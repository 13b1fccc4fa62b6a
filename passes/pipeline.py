"""The pass runner: order, contracts, timing, lint, stamps, dumps.

A pass is ``(GraphModule, PassContext) -> GraphModule`` and holds only its rewrite; everything around it is done here,
once, for all of them.
"""

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

__all__ = ["LOWERED", "PASS_KEY", "GraphPass", "GraphKind", "PassContext", "PassOptions", "run_passes", "tensor_value"]

#: key of node.meta under which the runner notes the name of the pass that made a node
PASS_KEY = "muon_zero_pass"


class GraphKind(str, Enum):
    """Which graph a pass is looking at."""

    DYNAMO = "dynamo"
    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"
    STEP = "step"


#: graphs that are lowered: all but those of Dynamo and joint ones
LOWERED = (GraphKind.FORWARD, GraphKind.BACKWARD, GraphKind.INFERENCE, GraphKind.STEP)


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """What the caller of torch.compile chose about the passes.

    Args:
        dump: folder for readable graphs before and after each pass, or None.
        nvtx: make ranges for profilers around collectives and Newton–Schulz.
        bucket_bytes: size cap of fused collectives, below which the cost model chooses.
        exchange_bytes: what exchanges under way may hold.
        reshard_after_forward: gather again for backward at stage 3, rather than save gathered weights for it;
            at stage 0 the same of weights in another dtype than their masters.
    """

    dump: Path | None = None
    nvtx: bool = False
    bucket_bytes: int = 512 * 2**20
    exchange_bytes: int = 512 * 2**20
    reshard_after_forward: bool = True


@dataclass
class PassContext:
    """What passes know besides the graph.

    Args:
        kind: the graph's role.
        frame: name for dumps.
        options: the caller's.
        costs: what the machine costs that the graph is for.
        request: backward graphs only: what to do with each gradient.
        user_outputs: forward graphs only: how many outputs, the first ones, are the model's; the rest is saved for
            backward.
        saved: backward graphs only: inputs that forward made for this graph alone, by name, to names of their memory;
            several may be views of one.
        left: bytes that backward has held beside what it returns, and holds no more behind it: filled by room for a
            backward graph, read by it for a step graph.
        shards: graphs of Dynamo only: which inputs are shards in place of the DTensors they are of, filled by
            take_shards.
        timings: seconds per pass, filled by the runner.
        exchange_bytes: the most that exchanges of several buckets hold at a time, filled by verify.
    """

    kind: GraphKind
    frame: str = "frame"
    options: PassOptions = PassOptions()
    costs: Costs = Costs()
    request: BackwardRequest | None = None
    user_outputs: int = 0
    saved: dict[str, str] = field(default_factory=dict)
    left: int = 0
    shards: Sequence[int] = ()
    timings: dict[str, float] = field(default_factory=dict)
    exchange_bytes: int = 0

    @property
    def title(self) -> str:
        """File-name stem of this graph's dumps."""
        parts = [self.frame, self.kind.value]
        if self.request is not None:
            parts.append(self.request.title)
        return ".".join(parts)


@dataclass(frozen=True)
class GraphPass:
    """A named rewrite with its contract.

    Args:
        name: shown in dumps, timings and errors.
        rewrite: the transform.
        requires: names of passes that must have run before.
        conflicts: names of passes that must not have run before.
        kinds: graphs it applies to.
    """

    name: str
    rewrite: Callable[[GraphModule, PassContext], GraphModule]
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    kinds: tuple[GraphKind, ...] = tuple(GraphKind)


_ASSIGNMENT = re.compile(r"^ +(\w+)(: \"[^\"]*\")? = ", re.MULTILINE)


def readable(gm: GraphModule) -> str:
    """The graph as Python code; what a pass made ends with the name of the pass."""
    makers = {node.name: node.meta[PASS_KEY] for node in gm.graph.nodes if PASS_KEY in node.meta}
    code = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    lines = []
    for line in code.splitlines():
        found = _ASSIGNMENT.match(line)
        maker = makers.get(found.group(1)) if found else None
        lines.append(line if maker is None else f"{line}  # made by {maker}")
    return "\n".join(lines) + "\n"


def _dump(gm: GraphModule, ctx: PassContext, stage: str) -> None:
    # Readable graphs are an eighth of all compile time, so they are made only where someone reads them.
    trace_artifact(f"muon_zero.{ctx.title}.{stage}", lambda: readable(gm))
    if ctx.options.dump is not None:
        ctx.options.dump.mkdir(parents=True, exist_ok=True)
        (ctx.options.dump / f"{ctx.title}.{stage}.py").write_text(readable(gm))


def run_passes(gm: GraphModule, passes: Sequence[GraphPass], ctx: PassContext) -> GraphModule:
    """Run ``passes`` in order over ``gm``; every node that a pass makes gets its name, under ``meta[PASS_KEY]``.

    The graph is checked and compiled to Python once, at the end: nobody runs what is between two passes. With dumps it
    is checked behind each pass.

    Raises:
        PassContractError: a pass's ``requires`` or ``conflicts`` does not hold, or it left an ill-formed graph.
    """
    done: set[str] = set()
    _dump(gm, ctx, "00_before")
    for number, graph_pass in enumerate((p for p in passes if ctx.kind in p.kinds), start=1):
        if missing := set(graph_pass.requires) - done:
            raise PassContractError(f"pass {graph_pass.name!r} needs {sorted(missing)} to run before it; reorder them")
        if clash := set(graph_pass.conflicts) & done:
            raise PassContractError(f"pass {graph_pass.name!r} must run before {sorted(clash)}; reorder them")
        started = time.perf_counter()
        known = set(gm.graph.nodes)
        gm = graph_pass.rewrite(gm, ctx)
        for node in gm.graph.nodes:
            if node not in known:
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
    """The fake tensor a node stands for."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"node {node} holds {type(value).__name__}, not a tensor")
    return value
