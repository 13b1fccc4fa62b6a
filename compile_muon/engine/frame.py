"""One compiled frame: the callables AOTAutograd runs for its forward and backward graphs.

``backend.py`` makes the graphs: Dynamo traces each read of a weight as an ``unshard`` marker, AOTAutograd derives a
``reduce_grad`` for each gradient, and a partitioner cuts the joint graph in two. A *lowering* replaces the markers of a
graph by collectives and kernels, and generates code: of a forward at once, of a backward at the first call with a new
request. A *state input* is a graph input that is the ``state`` of markers: the momentum, or an empty tensor. At run
time this tensor object carries the :class:`.ShardedParam`, so that equal layers share a graph.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from functorch.compile import make_boxed_func
from torch import Tensor
from torch.fx import GraphModule

from compile_muon.agreement.status import TRAINING
from compile_muon.config import FrameOptions
from compile_muon.engine.dtensors import edits_of
from compile_muon.engine.gradient import Speculation, memory_of
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.resident import keep_fresh
from compile_muon.engine.sharded_param import ShardedParam, receiving, sharded_param_of
from compile_muon.errors import MuonZeroError
from compile_muon.passes import (
    LOWERING_PASSES,
    BackwardRequest,
    GraphKind,
    PassContext,
    PassOptions,
    Purpose,
    ReducedGrad,
    reduced_grads,
    run_passes,
    torch_private,
)
from compile_muon.passes.ahead import kernels_ahead
from compile_muon.passes.collectives import Traffic, collectives, measure_traffic
from compile_muon.passes.markers import Orthogonalize, ReduceGrad, Unshard
from compile_muon.passes.ranges import ranged
from compile_muon.progress import compiling

#: ``(graph, example inputs) -> boxed callable``
Codegen = Callable[[GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]
#: boxed callable, and the traffic of one run
Lowered = tuple[Callable[[list[Any]], Any], Traffic]
#: ``(graph with markers, example inputs, context of the passes) -> lowered and compiled graph``
Lowering = Callable[[GraphModule, Sequence[Any], PassContext], Lowered]

#: most lowerings of one backward graph that speculate; further requests get gradients only
_MAX_SPECULATING = 8


def lower(gm: GraphModule, ctx: PassContext) -> tuple[GraphModule, Traffic]:
    """Run the lowering passes; return the lowered graph and the traffic of one run."""
    markers = [*Unshard.all(gm), *ReduceGrad.all(gm), *Orthogonalize.all(gm)]
    axes = {axis for marker in markers for axis in marker.spec.layout.axes}
    gm = run_passes(gm, LOWERING_PASSES, ctx)
    return gm, measure_traffic(gm, axes)


def lower_and_compile(gm: GraphModule, inputs: Sequence[Any], ctx: PassContext, codegen: Codegen) -> Lowered:
    """Run :func:`lower` and generate code."""
    # Backward and step graphs compile at run time, when another thread may be compiling its model.
    with torch_private.compiling_alone():
        gm, traffic = lower(gm, ctx)
        appended = [node.meta["val"] for node in list(gm.graph.find_nodes(op="placeholder"))[len(inputs) :]]
        with contextlib.nullcontext() if codegen is eager_codegen else kernels_ahead(gm):
            return torch_private.below_autograd(codegen(gm, [*inputs, *appended])), traffic


def eager_codegen(gm: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return a callable that interprets the graph."""
    return make_boxed_func(gm.forward)


def params_at(args: Sequence[Any], positions: Sequence[int]) -> list[ShardedParam]:
    """Return the sharded parameters of the state inputs at ``positions``; MuonZeroError for one without."""
    sharded_params = []
    for position in positions:
        sharded = sharded_param_of(args[position])
        if sharded is None:
            raise MuonZeroError(
                "a compiled graph got a weight that belongs to no MuonZero optimizer; "
                "the optimizer was deleted or the module copied: call compile_muon.MuonZero on this model"
            )
        sharded_params.append(sharded)
    return sharded_params


def _note(half: str, frame: str, sharded_params: Sequence[ShardedParam], details: Sequence[str]) -> None:
    """Log a visit with collectives in the frame log of each optimizer that has some of the parameters."""
    for ledger in dict.fromkeys([sharded.ledger for sharded in sharded_params]):
        names = [sharded.name for sharded in sharded_params if sharded.ledger is ledger]
        ledger.frame_log.note(half, frame, names, details)


def _range(options: PassOptions, name: str) -> AbstractContextManager[None]:
    """Return the profiler range of a visit; its end closes ranges that a raising graph left open."""
    return ranged(name) if options.nvtx else contextlib.nullcontext()


def _buckets(options: PassOptions) -> str:
    return f"buckets of {options.bucket_bytes} bytes"


class ForwardGraph:
    """The boxed callable of a forward or inference graph: refreshes edited weights, notes the visit, runs the code.

    ``trained``: names of the state inputs of parameters that get gradients from the frame's backward; each forward
    visit owes them a backward visit. Empty for inference graphs.
    """

    _boxed_call = True

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        ctx: PassContext,
        lowering: Lowering,
        options: FrameOptions,
        trained: frozenset[str],
    ) -> None:
        self._options = options
        self._frame = ctx.frame
        self._title = ctx.title
        placeholders = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        unshards = Unshard.all(gm)
        self._meets = any(marker.spec.layout.gathered for marker in unshards)  # other ranks, in gathers of weights
        self._groups = frozenset(node.args[-1] for node, _ in collectives(gm))
        # Positions of (shard, state, resident weight) among the inputs, for weights that are whole on this rank.
        self._copies = [
            (placeholders[marker.shard], placeholders[marker.state], placeholders[marker.resident])
            for marker in unshards
            if marker.resident is not None and marker.spec.layout.everyone.alone
        ]
        values = {i: node.meta.get("val") for node, i in placeholders.items()}
        self._integers = [i for i, x in values.items() if isinstance(x, Tensor) and not x.is_floating_point()]
        self._trained = [i for node, i in placeholders.items() if node.name in trained]
        # Positions of all state inputs, first in the order of the gathers, which must be the same on all ranks.
        self._states = list(dict.fromkeys([*(placeholders[marker.state] for marker in unshards), *self._trained]))
        self._run, self._traffic = lowering(gm, inputs, ctx)
        self._inference = ctx.kind is GraphKind.INFERENCE
        self._visited = False

    def __call__(self, args: list[Any]) -> Any:
        if not self._states:
            return self._run(args)
        sharded_params = params_at(args, self._states)
        sharded_at = dict(zip(self._states, sharded_params, strict=True))
        trained = [sharded_at[place] for place in self._trained]
        if trained and torch_private.compiled_autograd_active():
            raise MuonZeroError(
                "compiled autograd = on: it would bypass the compiled backward graphs and the updates in them; "
                "turn it off (torch._dynamo.config.compiled_autograd = False)"
            )
        ledger: Ledger = sharded_params[0].ledger
        names = [sharded.name for sharded in sharded_params]
        with ledger.status.at("forward", self._frame, names), _range(self._options, self._title):
            ledgers = dict.fromkeys(sharded.ledger for sharded in sharded_params)
            for each_ledger in ledgers:
                for hook in each_ledger.hooks.before_forward:
                    hook(self._groups, [args[i] for i in self._integers])
            if self._meets:
                ledger.status.change(ledger.phase(evaluates=self._inference))
            for each_ledger in ledgers:
                each_ledger.options = self._options
            for sharded in sharded_params:
                keep_fresh(sharded)
            for weight, state, resident in self._copies:
                if args[weight] is not sharded_at[state].param:  # torch.func.functional_call passed another weight
                    args[resident] = args[weight].detach().to(args[resident].dtype)
            for sharded in trained:
                sharded.visits.forward()
                sharded.watch()
            results = self._run(args)
        ledger.count(self._traffic)
        if not self._visited:
            ledger.compiled()
            self._visited = True
        if self._meets:
            _note("forward", self._frame, sharded_params, [_buckets(self._options)])
        return results


@dataclass
class BackwardGraph:
    """The boxed callable of a backward graph: asks the ledgers for a request, and runs the lowering for it."""

    gm: GraphModule  # with markers; never modified
    inputs: Sequence[Any]
    ctx: PassContext  # context of the passes, without the request
    lowering: Lowering
    grads: tuple[ReducedGrad, ...] = ()
    _variants: dict[BackwardRequest, Lowered] = field(default_factory=dict)  # compiled lowerings
    _context: torch_private.SavedContext = field(default_factory=torch_private.SavedContext)
    _boxed_call: bool = True

    def __post_init__(self) -> None:
        self.grads = reduced_grads(self.gm)
        self._states = [grad.state_index for grad in self.grads]
        self._outputs = len(self.gm.graph.output_node().args[0])

    def __call__(self, args: list[Any]) -> Any:
        sharded_params = params_at(args, self._states)
        if not sharded_params:
            return self._visit(args, sharded_params)
        status, names = sharded_params[0].ledger.status, [sharded.name for sharded in sharded_params]
        with status.at("backward", self.ctx.frame, names), _range(self.ctx.options, self.ctx.title):
            status.change(TRAINING)
            return self._visit(args, sharded_params)

    def _visit(self, args: list[Any], sharded_params: Sequence[ShardedParam]) -> Any:
        call = torch_private.current_backward()
        receives = receiving(sharded_params)
        for sharded, delivers in zip(sharded_params, receives, strict=True):
            sharded.visits.delivers = delivers  # for ops in the graph, which runs below autograd and could not ask
        request = self._request(sharded_params, receives, call)
        # A rank whose ``.grad`` was kept, where others dropped theirs, gets another sum: the frame log shows it.
        details = [
            f"{purpose.value} and add to .grad" if sharded.grad is not None else purpose
            for sharded, purpose in zip(sharded_params, request.purposes, strict=True)
        ]
        run, traffic = self._variants.get(request) or self._compile(request, sharded_params)
        unreduced_sums = [sharded_params[i].sums.take(call) for i in request.unreduced_inputs]
        carried_grads = [sharded_params[i].local_grad.detach() for i in request.carried_inputs]
        # The graph is compiled for contiguous inputs, but may return gradients in another layout (convolutions).
        args.extend(tensor.contiguous() for tensor in (*unreduced_sums, *carried_grads))
        results = list(run(args))
        extras = request.split(results[self._outputs :])
        for index, grad in extras.unreduced.items():
            if receives[index]:
                # Cloned: a replay for the next micro-batch would overwrite it.
                sharded_params[index].sums.keep(
                    call, grad.clone() if sharded_params[index].ledger.replays_between else grad
                )
        fingerprints = () if extras.fingerprints is None else extras.fingerprints.unbind()
        for (index, direction), fingerprint in zip(extras.directions.items(), fingerprints, strict=True):
            sharded = sharded_params[index]
            edits = edits_of(sharded.momentum_buffer)
            output = self.grads[index].output
            assert output is not None  # a direction is made only of a returned gradient
            where = memory_of(results[output])
            sharded.speculations.make(Speculation(direction, fingerprint, edits, sharded.rates, sharded.fetches, where))
        for ledger, number in Counter([sharded_params[index].ledger for index in extras.directions]).items():
            ledger.count(speculated=number)
        if sharded_params:
            sharded_params[0].ledger.count(traffic)
        if traffic.collectives:
            _note("backward", self.ctx.frame, sharded_params, [*details, _buckets(self.ctx.options)])
        return results[: self._outputs]

    def _request(self, sharded_params: Sequence[ShardedParam], receives: Sequence[bool], call: int) -> BackwardRequest:
        """Ask the ledger of each parameter for its purpose; replace SPECULATE once too many lowerings have it."""
        for sharded, delivers in zip(sharded_params, receives, strict=True):
            if delivers:
                sharded.begin_backward(call)
        for ledger in dict.fromkeys([sharded.ledger for sharded in sharded_params]):
            if ledger.before_backward is not None:
                ledger.before_backward()
        purposes = [
            sharded.ledger.purpose(sharded, call, receives=delivers, speculates=grad.speculates)
            for sharded, delivers, grad in zip(sharded_params, receives, self.grads, strict=True)
        ]
        if not any(receives):  # autograd.grad() may return some of the gradients: reduce all
            purposes = [Purpose.REDUCE] * len(purposes)

        def request(purposes: Sequence[Purpose]) -> BackwardRequest:
            rows = list(zip(sharded_params, purposes, receives, strict=True))
            unreduced = [gets and p is not Purpose.ACCUMULATE and a.sums.available(call) for a, p, gets in rows]
            carried = [p is Purpose.SPECULATE and a.grad is not None for a, p, _ in rows]
            return BackwardRequest(tuple(purposes), tuple(unreduced), tuple(carried))

        wanted = request(purposes)
        speculative = [variant for variant in self._variants if Purpose.SPECULATE in variant.purposes]
        if len(speculative) < _MAX_SPECULATING or Purpose.SPECULATE not in purposes or wanted in self._variants:
            return wanted
        return request([Purpose.REDUCE if p is Purpose.SPECULATE else p for p in purposes])

    def _compile(self, request: BackwardRequest, sharded_params: Sequence[ShardedParam]) -> Lowered:
        ctx = replace(self.ctx, request=request, timings={})
        gm = copy.deepcopy(self.gm)
        with self._context.restored(), compiling(f"the backward of {ctx.frame}"):
            self._variants[request] = lowered = self.lowering(gm, self.inputs, ctx)
        if sharded_params:
            sharded_params[0].ledger.compiled(ctx.left)
        return lowered
