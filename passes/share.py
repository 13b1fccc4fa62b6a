"""One node for what many parameters compute alike, in a graph that was just traced.

A bucket's parameters read the same rates and weigh the rows of a fingerprint by the same numbers. Traced one by one
they would make Inductor lower each anew: half of the nodes that Muon adds to a backward graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["share_values"]

#: hand on what they are given, where they change no size
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.alias.default)


def share_values(graph: Graph) -> None:
    """Merge nodes of at most one dimension that compute the same, and leave out views that change nothing.

    Larger ones stay as they are: AOTAutograd has merged those of the model, and what a merged one keeps in memory
    counts. A graph that writes to a tensor is left alone, since a read before it is none behind it.
    """
    if any(_writes(node) for node in graph.nodes):
        return
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if not _computes(node):
            continue
        kept = node
        if node.target in _VIEWS and node.args[0].op != "placeholder" and _changes_nothing(node):
            kept = node.args[0]
        elif node.meta["val"].ndim <= 1:
            kept = first.setdefault(_key(node), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _computes(node: Node) -> bool:
    """Whether ``node`` is an operator of PyTorch's whose one result depends on its arguments alone."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return isinstance(node.meta.get("val"), Tensor) and torch.Tag.nondeterministic_seeded not in target.tags


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _changes_nothing(node: Node) -> bool:
    made, of = node.meta["val"], node.args[0].meta["val"]
    return made.dtype == of.dtype and made.shape == of.shape and made.stride() == of.stride()


def _key(node: Node) -> Any:
    """What decides on the result: numbers of other types are not the same, though Python has 1 == 1.0 == True."""

    def typed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(typed, value))
        return value if isinstance(value, Node) else (type(value), str(value))

    return node.target, typed(node.args), tuple((name, typed(value)) for name, value in sorted(node.kwargs.items()))
