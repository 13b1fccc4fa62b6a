"""The step graph: orthogonalizes at once all matrices that have no direction at ``optimizer.step()``.

It is built from the ``orthogonalize`` markers of a backward graph, lowered by the same passes, and compiled once per
set of parameters.

What an exchange sends, there and in backward (``passes/exchange/``): each rank mixes momentum into its piece of the
gradient, and sends the update, in the wire dtype (compute dtype; bfloat16 for float16), to the owner of each matrix by
one all-to-all over the owner group. The owner joins the pieces, runs Newton-Schulz, and returns each rank's piece of
the direction, in the compute dtype, by a second all-to-all. Ranks that hold the same piece (HSDP) then hand directions
round their replica group. Momenta, and states at owners, never travel. Stacks of matrices that are cut between
matrices send nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule

from compile_muon.config import FrameOptions
from compile_muon.engine.frame import Lowered, Lowering, eager_codegen, lower_and_compile
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes import GraphKind, PassContext
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.markers import Orthogonalize
from compile_muon.passes.methods import matrix_method
from compile_muon.passes.torch_private import compile_fx_inner, fresh_context
from compile_muon.progress import compiling

#: sets of parameters that get generated code; later sets (a new one every step, say) interpret the lowered graph
_MAX_COMPILED = 8
#: sets of parameters that are cached
_MAX_KEPT = 64


def _build(
    sharded_params: Sequence[ShardedParam], states: Mapping[int, Sequence[Tensor]], fake: FakeTensorMode
) -> tuple[GraphModule, list[Any]]:
    """Return a graph with one marker per parameter, and its example inputs: gradients, momenta, tensors of graph
    scalars, states at owners. Outputs: directions, then new states."""
    graph = Graph()
    inputs: list[Any] = []

    def placeholder(name: str, like: Tensor) -> torch.fx.Node:
        node = graph.placeholder(name)
        if isinstance(like, FakeTensor):  # in plans; from_tensor would leave a view of it in its own mode
            with fake:
                like = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        node.meta["val"] = fake.from_tensor(like, static_shapes=True)
        inputs.append(node.meta["val"])
        return node

    grads = [placeholder(f"grad_{i}", _like_gradient(sharded)) for i, sharded in enumerate(sharded_params)]
    momenta = [placeholder(f"momentum_{i}", a.momentum) for i, a in enumerate(sharded_params)]
    all_graph_scalars = {
        id(graph_scalars): placeholder(f"hyper_{i}", graph_scalars)
        for i, graph_scalars in enumerate(_all_graph_scalars(sharded_params))
    }
    state_nodes = {
        i: [placeholder(f"state_{i}_{k}", x) for k, x in enumerate(tensors)] for i, tensors in states.items()
    }
    directions, new_states = [], []
    for place, (grad, momentum, sharded) in enumerate(zip(grads, momenta, sharded_params, strict=True)):
        marker_inputs = graph, grad, momentum, all_graph_scalars[id(sharded.graph_scalars)], sharded.now
        direction, *state_results = Orthogonalize.insert(*marker_inputs, state_nodes.get(place, ()))
        directions.append(direction)
        new_states += state_results
    graph.output((*directions, *new_states))
    return GraphModule(torch.nn.Module(), graph), inputs


def _like_gradient(sharded: ShardedParam) -> Tensor:
    """Return an example of the gradient; one that the method projects has the dtype of states."""
    local = sharded.local.detach()
    projected = matrix_method(sharded.spec.muon_settings.method).project is not None
    return local.to(decode_dtype(sharded.spec.state_dtype)) if projected else local


def _all_graph_scalars(sharded_params: Sequence[ShardedParam]) -> list[Tensor]:
    """Return the tensors of graph scalars of these parameters, each once."""
    return list({id(sharded.graph_scalars): sharded.graph_scalars for sharded in sharded_params}.values())


@dataclass
class StepGraphs:
    """Compiled step graphs by set of parameters."""

    lowering: Lowering | None = None  # tests and plans replace it; None for the one that the options name
    _compiled: dict[tuple[object, ...], Lowered] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._compiled)

    def orthogonalize(
        self,
        sharded_params: Sequence[ShardedParam],
        grads: Sequence[Tensor],
        states: Mapping[int, Sequence[Tensor]],
        options: FrameOptions,
    ) -> tuple[list[Tensor], dict[int, list[Tensor]], Traffic]:
        """Return ``(directions, new states, traffic)`` for ``grads``, one local shard a parameter; nothing is modified.
        ``states``: this rank's states at owners, by position among the parameters."""
        key = (options.codegen, options.nvtx, *(sharded.name for sharded in sharded_params))
        # A method with several graphs has another spec in each.
        key += tuple((i, a.now) for i, a in enumerate(sharded_params) if a.now is not a.spec)
        if key not in self._compiled:
            if len(self._compiled) >= _MAX_COMPILED:
                options = replace(options, codegen="eager")
            if len(self._compiled) >= _MAX_KEPT:
                self._compiled.popitem()
            self._compiled[key] = self._compile(sharded_params, states, options)
        run, traffic = self._compiled[key]
        # Backward graphs may return gradients with other strides than the shard's (convolutions).
        grads = [grad.contiguous() for grad in grads]
        flat = [state for tensors in states.values() for state in tensors]
        results = list(
            run([*grads, *(sharded.momentum for sharded in sharded_params), *_all_graph_scalars(sharded_params), *flat])
        )
        state_results = iter(results[len(sharded_params) :])
        new_states = {place: [next(state_results) for _ in tensors] for place, tensors in states.items()}
        return results[: len(sharded_params)], new_states, traffic

    def _compile(
        self, sharded_params: Sequence[ShardedParam], states: Mapping[int, Sequence[Tensor]], options: FrameOptions
    ) -> Lowered:
        fake = FakeTensorMode()
        with fresh_context(fake), compiling("the step"):
            gm, inputs = _build(sharded_params, states, fake)
            ledger = sharded_params[0].ledger
            title = f"step{len(self._compiled)}"
            ctx = PassContext(GraphKind.STEP, title, options=options, costs=ledger.costs, left=ledger.left)
            codegen = eager_codegen if options.codegen == "eager" else partial(compile_fx_inner, is_inference=True)
            lowering = self.lowering or partial(lower_and_compile, codegen=codegen)
            return lowering(gm, inputs, ctx)
