"""The forward of a frame whose gathered weights stay between the micro-batches of a step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.fx import GraphModule

from compile_muon.config import FrameOptions
from compile_muon.engine.dtensors import edits_of
from compile_muon.engine.frame import ForwardGraph, Lowering, params_at
from compile_muon.passes import PassContext, persistent_weights, take_weights
from compile_muon.passes.torch_private import SavedContext
from compile_muon.progress import compiling


class PersistentForward:
    """Two forward graphs: one gathers the persistent weights, the other takes those of an earlier micro-batch.

    Frames of several shapes share the weights, and equal layers a frame, so :attr:`.FrameMemory.persistent` has them by
    parameter. A step's last micro-batch takes them out, and its backward frees them as it goes. Weights that were
    edited since their gather, by ``step()`` too, are gathered again.
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
        place = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        weights = persistent_weights(gm, ctx)
        self._outputs = list(weights)
        self._specs = [read.spec for read in weights.values()]
        self._shards = [place[read.shard] for read in weights.values()]
        self._states = [place[read.state] for read in weights.values()]
        self._trained = [i for node, i in place.items() if node.name in trained][:1]
        taking = copy.deepcopy(gm)
        take_weights(taking, ctx)
        ctx = replace(ctx, persistent=tuple(self._outputs))
        make = partial(ForwardGraph, inputs=inputs, lowering=lowering, options=options, trained=trained)
        self._context, self._frame = SavedContext(), ctx.frame
        self._make_again = partial(make, taking, ctx=replace(ctx, again=True, timings={}))
        self._again: ForwardGraph | None = None
        self._first = make(gm, ctx=ctx)

    def __call__(self, args: list[Any]) -> Any:
        params = params_at(args, self._states)
        shards = [args[i].untyped_storage()._cdata for i in self._shards]
        memory = params[0].ledger.memory
        if memory is None or shards != [sharded.local.untyped_storage()._cdata for sharded in params]:
            return self._first(args)  # a copied module, or weights that torch.func.functional_call passes
        versions = [(edits_of(sharded.param), spec) for sharded, spec in zip(params, self._specs, strict=True)]
        last = self._is_last(args)
        kept = [memory.persistent.pop(sharded, (None, None)) for sharded in params]
        forward = self._first
        if [version for version, _ in kept] == versions:
            args.extend(weight for _, weight in kept)
            forward = self._again or self._compile_again()
        del kept
        results = forward(args)
        if not last:
            for sharded, version, i in zip(params, versions, self._outputs, strict=True):
                memory.persistent[sharded] = version, results[i]
        return results

    def _is_last(self, args: Sequence[Any]) -> bool:
        """Return whether the backward of this forward can be the step's last; equal on all ranks."""
        return any(
            not sharded.ledger.accumulating and sharded.visits.backwards + 1 >= (sharded.ledger.accumulation_steps or 1)
            for sharded in params_at(args, self._trained)
        )

    def _compile_again(self) -> ForwardGraph:
        with self._context.restored(), compiling(f"the forward of {self._frame}"):
            self._again = self._make_again()
        return self._again
