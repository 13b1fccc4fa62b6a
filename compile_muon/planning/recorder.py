"""Stands in for generated code: notes which graphs run, and returns zeros."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compile_muon.passes import PassContext
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.torch_private import expected_size
from compile_muon.planning.simulate import Played
from compile_muon.runtime.account import account_of
from compile_muon.runtime.frame import lower

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
    """A :data:`~compile_muon.runtime.frame.Lowering` that compiles nothing.

    Args:
        visits: in the order they ran in.
        tensors: a context in which results are made: that of a fake mode makes fake ones.
    """

    visits: list[Visit] = field(default_factory=list)
    tensors: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)

    def __call__(
        self, gm: GraphModule, inputs: Sequence[Any], ctx: PassContext
    ) -> tuple[Callable[[list[Any]], Any], Traffic]:
        source = copy.deepcopy(gm)
        gm, traffic = lower(gm, ctx)
        positions = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        (outputs,) = gm.graph.output_node().args
        played = Played.of(gm, ctx)

        def run(args: list[Any]) -> list[Any]:
            states = {i: account.name for i, value in enumerate(args) if (account := account_of(value)) is not None}
            self.visits.append(Visit(played, source, ctx, states))
            given, results = list(args), []
            with self.tensors:
                for node in outputs:
                    if isinstance(node, Node):
                        results.append(given[positions[node]] if node in positions else _zeros(node.meta["val"]))
                    else:
                        results.append(node)
            args.clear()
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run, traffic


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes, strides = map(expected_size, value.shape), map(expected_size, value.stride())
        made = torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype, device=value.device)
        return made.zero_()
    return expected_size(value)
