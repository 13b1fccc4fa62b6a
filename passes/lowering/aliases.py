"""Aliasing between nodes of a graph, from the schemas of their ops: views, writes, and nodes that compute nothing."""

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ..collectives import is_collective, is_wait
from ..torch_private import expected_size
from .refresh import AWAIT_REFRESH_OP

_aten = torch.ops.aten
#: ops that may return a view of their argument although their schema declares new memory
_HANDED_ON = (_aten._unsafe_view.default, _aten._reshape_alias.default, _aten.reshape.default)


def tensors(node: Node) -> list[torch.Tensor]:
    """Return the fake tensors of a node's result, one or several."""
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def nbytes(node: Node) -> int:
    """Return the bytes of a node's result; an expanded tensor counts with its visible size."""
    return sum(math.prod(map(expected_size, value.shape)) * value.element_size() for value in tensors(node))


def arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """Yield ``(schema argument, value)`` for each argument of a torch op."""
    keywords = dict(node.kwargs)
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args):
            yield argument, node.args[place]
        elif argument.name in keywords:
            yield argument, keywords[argument.name]


def mutated(node: Node) -> list[Node]:
    """Return the nodes whose memory ``node`` writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = [value for argument, value in arguments(node) if argument.alias_info and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Node)]


def _source(node: Node) -> Node | None:
    """Return the node whose memory ``node`` is a view of; None if it has its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem or is_wait(node) or node.target in _HANDED_ON:
        source = node.args[0]
        return source if isinstance(source, Node) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returns_alias = any(result.alias_info for result in node.target._schema.returns)
    aliased = [value for argument, value in arguments(node) if argument.alias_info and isinstance(value, Node)]
    return aliased[0] if returns_alias and aliased else None


def base(node: Node) -> Node:
    """Return the node that allocated the memory of ``node``; of an op with several results, the ``getitem``."""
    while (source := _source(node)) is not None:
        if node.target is operator.getitem and _source(source) is None:
            return node
        node = source
    return node


def is_free(node: Node) -> bool:
    """Whether ``node`` launches no kernel: views, list items, sizes, waits, placeholders and the output."""
    if node.op != "call_function" or is_wait(node) or is_collective(node) or node.target is AWAIT_REFRESH_OP:
        return True
    if getattr(node.target, "namespace", "") == "profiler":  # profiler ranges
        return True
    return not mutated(node) and (not tensors(node) or _source(node) is not None)
