"""Trace a Python function of tensors and splice the result into a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .pipeline import tensor_value
from .torch_private import decomposition_table, fake_mode_of
from .work import Work, note_work

__all__ = ["inline"]


def _distinct(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor per input: tracing takes two inputs that share a fake tensor for one, and reads the wrong one."""
    distinct: list[torch.Tensor] = []
    with fake_mode_of(values):
        for value in values:
            if any(value is other for other in distinct):
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            distinct.append(value)
    return distinct


def inline(
    gm: GraphModule,
    before: Node,
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Node],
    work: Work | None = None,
) -> list[Node]:
    """Insert ``function(*inputs)`` ahead of ``before`` and return the nodes of its results.

    Args:
        function: takes one tensor per node of ``inputs``; returns tensors.
        work: noted at every new node.
    """
    values = _distinct([tensor_value(node) for node in inputs])
    with fake_mode_of(values):
        traced = make_fx(lambda *t: tuple(function(*t)), decomposition_table=decomposition_table())(*values)
    traced.graph.eliminate_dead_code()
    env: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with gm.graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return [env[result] for result in node.args[0]]
            if node.op == "get_attr":
                raise RuntimeError(f"tracing {function} captured the constant {node.target}; pass it as an input")
            env[node] = gm.graph.node_copy(node, env.__getitem__)
            if work is not None:
                note_work(env[node], work)
    raise RuntimeError("traced graph has no output")
