"""One compiled frame: the callables AOTAutograd runs for its forward and backward graphs.

They are plain boxed callables around generated code. Forward notes the visit and keeps resident weights fresh; backward
asks the ledger which lowering to run, and each lowering is compiled when it is first asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from compile_muon.config.compile_options import FrameOptions
from compile_muon.errors import MuonZeroError
from compile_muon.passes import HALF_PASSES, Half, Lowering, PassContext, run_passes
from compile_muon.passes.collectives import Traffic, measure_traffic
from compile_muon.passes.half.lower import BackwardPlan, ReducedGrad, gradient_positions, reduced_grads
from compile_muon.passes.markers import REDUCE_GRAD, UNSHARD
from compile_muon.passes.spec import ParamSpec
from compile_muon.passes.torch_private import SavedContext, compiled_autograd_active
from compile_muon.runtime.ledger import Arrival, Decision, ParamState, Pending, state_of

__all__ = ["BackwardGraph", "ForwardGraph", "lower_and_compile"]

#: (graph, example inputs, positions of inputs with a fixed address) -> boxed callable
Codegen = Callable[[GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]


def _specs(gm: GraphModule) -> list[ParamSpec]:
    """Specs of all parameters a graph with markers touches."""
    texts = [node.args[4] for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)]
    texts += [node.args[3] for node in gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD)]
    return [ParamSpec.decode(text) for text in texts]


def lower_and_compile(
    gm: GraphModule, inputs: Sequence[Any], ctx: PassContext, codegen: Codegen
) -> tuple[Callable[[list[Any]], Any], Traffic]:
    """Run the half passes and generate code; also count what one run sends."""
    specs = _specs(gm)
    gm = run_passes(gm, HALF_PASSES, ctx)
    world, rank = (specs[0].world, specs[0].rank) if specs else (1, 0)
    traffic = measure_traffic(gm, world=world, rank=rank)
    appended = [node.meta["val"] for node in list(gm.graph.find_nodes(op="placeholder"))[len(inputs) :]]
    return codegen(gm, [*inputs, *appended]), traffic


def _states_at(args: Sequence[Any], positions: Sequence[int]) -> list[ParamState]:
    states = []
    for position in positions:
        state = state_of(args[position])
        if state is None:
            raise MuonZeroError(
                "a compiled graph got a weight that belongs to no MuonZero optimizer; "
                "the optimizer was deleted or the module copied: call compile_muon.MuonZero on this model"
            )
        states.append(state)
    return states


class ForwardGraph:
    """Boxed callable of a forward or inference graph.

    Args:
        trained: names of the state inputs whose parameters the frame's backward produces gradients for; each visit
            owes them one backward visit. Empty for inference graphs.
    """

    _boxed_call = True

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        ctx: PassContext,
        codegen: Codegen,
        options: FrameOptions,
        trained: frozenset[str],
    ) -> None:
        self._options = options
        placeholders = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        read = {placeholders[node.args[1]] for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)}
        self._read = sorted(read)
        self._trained = [i for node, i in placeholders.items() if node.name in trained]
        self._run, self._traffic = lower_and_compile(gm, inputs, ctx, codegen)

    def __call__(self, args: list[Any]) -> Any:
        if self._read:
            states = _states_at(args, self._read)
            for state in states:
                state.ledger.keep_fresh(state)
            states[0].ledger.count(self._traffic)
            states[0].ledger.options = self._options
        if self._trained:
            if compiled_autograd_active():
                raise MuonZeroError(
                    "compiled autograd = on: it would bypass the compiled backward graphs and the updates in them; "
                    "turn it off (torch._dynamo.config.compiled_autograd = False)"
                )
            for state in _states_at(args, self._trained):
                state.ledger.visit_forward(state)
        return self._run(args)


@dataclass
class _Variant:
    """One compiled lowering of a backward graph."""

    run: Callable[[list[Any]], Any]
    plan: BackwardPlan
    traffic: Traffic


@dataclass
class BackwardGraph:
    """Boxed callable of a backward graph: picks a lowering at call time.

    Args:
        gm: the backward graph, markers in place; never modified.
        inputs: its example inputs.
        options, frame, codegen: how to lower and compile it.
    """

    gm: GraphModule
    inputs: Sequence[Any]
    options: FrameOptions
    frame: str
    codegen: Codegen
    grads: tuple[ReducedGrad, ...] = ()
    _variants: dict[tuple[Lowering, bool], _Variant] = field(default_factory=dict)
    _context: SavedContext = field(default_factory=SavedContext)
    _boxed_call: bool = True

    def __post_init__(self) -> None:
        self.grads = reduced_grads(self.gm)
        self._outputs = len(self.gm.graph.output_node().args[0])
        self._positions = gradient_positions(self.gm)

    def _variant(self, lowering: Lowering, with_prior: bool) -> _Variant:
        if not any(grad.spec.accumulates for grad in self.grads) and lowering is Lowering.ACCUMULATE:
            lowering, with_prior = Lowering.REDUCE, False
        key = (lowering, with_prior)
        if key not in self._variants:
            ctx = PassContext(Half.BACKWARD, self.frame, self.options, lowering, with_prior)
            gm = copy.deepcopy(self.gm)
            with self._context.restored():
                run, traffic = lower_and_compile(gm, self.inputs, ctx, self.codegen)
            self._variants[key] = _Variant(run, ctx.facts["plan"], traffic)  # type: ignore[arg-type]
        return self._variants[key]

    def __call__(self, args: list[Any]) -> Any:
        if not self.grads:
            return self._variant(Lowering.REDUCE, False).run(args)
        states = _states_at(args, [grad.state_index for grad in self.grads])
        ledger = states[0].ledger
        decision = ledger.visit_backward(states, [grad.updates for grad in self.grads])
        variant = self._variant(decision.lowering, decision.with_prior)
        taken = self._take_priors(variant.plan, states, decision)
        args.extend(
            states[i].local.new_zeros(self._prior_shape(i)) if prior is None else prior
            for i, prior in zip(variant.plan.priors, taken, strict=True)
        )
        try:
            results = list(variant.run(args))
        except BaseException:
            self._return_priors(variant.plan, states, taken)
            raise
        self._hand_over(variant.plan, states, decision, results)
        ledger.count(variant.traffic)
        return results[: self._outputs]

    def _prior_shape(self, index: int) -> tuple[int, ...]:
        """Stage 1 sums whole gradients, the others shards."""
        grad = self.grads[index]
        return grad.spec.shape if grad.spec.accumulates else grad.spec.local_shape

    def _take_priors(
        self, plan: BackwardPlan, states: list[ParamState], decision: Decision
    ) -> list[Tensor | None]:
        """What earlier micro-batches left; the graph adds it in, so it leaves the parameter."""
        taken: list[Tensor | None] = []
        for index in plan.priors:
            state, prior = states[index], None
            if decision.receives[index] and self.grads[index].spec.accumulates:
                prior = state.take_unreduced()
            elif decision.receives[index]:
                prior, state.param.grad = state.gradient(), None
            # The graph was compiled for contiguous priors, but may return gradients in another layout (convolutions).
            taken.append(None if prior is None else prior.detach().contiguous())
        # At stage 1 `.grad` may hold the zeros of earlier micro-batches: drop them so that autograd sets the direction.
        for index in plan.updated:
            states[index].param.grad = None
        return taken

    def _return_priors(self, plan: BackwardPlan, states: list[ParamState], taken: list[Tensor | None]) -> None:
        for index, prior in zip(plan.priors, taken, strict=True):
            if prior is None:
                continue
            if self.grads[index].spec.accumulates:
                states[index].unreduced = prior
            else:
                states[index].ledger.add_gradient(states[index], prior)

    def _hand_over(
        self, plan: BackwardPlan, states: list[ParamState], decision: Decision, results: list[Tensor]
    ) -> None:
        extra, count = results[self._outputs :], len(plan.accumulated)
        for index, grad in zip(plan.accumulated, extra[:count], strict=True):
            state = states[index]
            if decision.receives[index]:
                state.keep_unreduced(grad)
        if not plan.updated:
            return
        momenta, norms = extra[count:-1], extra[-1].unbind()
        for index, momentum, norm in zip(plan.updated, momenta, norms, strict=True):
            position = self._positions[index]
            direction = None if position is None else Arrival.of(results[position])
            states[index].pending = Pending(momentum, norm, direction)
