"""Stands in for generated code: notes which graphs run, and returns zeros."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compile_muon.engine.frame import Lowered, lower
from compile_muon.engine.sharded_param import sharded_param_of
from compile_muon.passes import PassContext
from compile_muon.passes.torch_private import expected_size
from compile_muon.planning.simulate import Played

__all__ = ["Recorder", "Visit"]


@dataclass(frozen=True)
class Visit:
    """One run of a graph.

    Args:
        played: it, lowered.
        source: it ahead of that.
        ctx: what it was lowered with.
        states: name of the parameter by the position of its state tensor among the inputs.
    """

    played: Played
    source: GraphModule
    ctx: PassContext
    states: Mapping[int, str]


@dataclass
class Recorder:
    """A :data:`~compile_muon.engine.frame.Lowering` that compiles nothing.

    Args:
        tensors: a context in which results are made: that of a fake mode makes fake ones.
        visits: in the order they ran in.
    """

    tensors: AbstractContextManager[Any]
    visits: list[Visit] = field(default_factory=list)

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], ctx: PassContext) -> Lowered:
        source = copy.deepcopy(gm)
        gm, traffic = lower(gm, ctx)
        placeholders = gm.graph.find_nodes(op="placeholder")
        (outputs,) = gm.graph.output_node().args
        played = Played.of(gm, ctx)

        def run(args: list[Any]) -> list[Any]:
            states = {
                i: sharded.name for i, value in enumerate(args) if (sharded := sharded_param_of(value)) is not None
            }
            self.visits.append(Visit(played, source, ctx, states))
            given = dict(zip(placeholders, args, strict=True))
            args.clear()
            with self.tensors:
                return [given[n] if n in given else _zeros(n) for n in outputs]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run, traffic


def _zeros(output: Any) -> Any:
    if not isinstance(output, Node):
        return output
    value = output.meta["val"]
    if isinstance(value, Tensor):
        sizes, strides = map(expected_size, value.shape), map(expected_size, value.stride())
        made = torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype, device=value.device)
        return made.zero_()
    return expected_size(value)
