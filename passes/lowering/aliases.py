"""Which nodes compute nothing, and whose memory each has: by the schemas of their ops."""

from __future__ import annotations

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

__all__ = ["base", "is_free", "mutated", "nbytes", "tensors"]

_aten = torch.ops.aten
#: share their argument's memory, though the schema calls the result new
_HANDED_ON = (_aten._unsafe_view.default, _aten._reshape_alias.default, _aten.reshape.default)


def tensors(node: Node) -> list[torch.Tensor]:
    """What a node results in, one or several."""
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def nbytes(node: Node) -> int:
    """Of all tensors that a node results in, expanded ones as large as they look."""
    return sum(math.prod(map(expected_size, value.shape)) * value.element_size() for value in tensors(node))


def _arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """``(of the schema, given)`` for every argument of an op of torch."""
    given = dict(node.kwargs)
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args):
            yield argument, node.args[place]
        elif argument.name in given:
            yield argument, given[argument.name]


def mutated(node: Node) -> list[Node]:
    """The nodes whose memory ``node`` writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = [given for argument, given in _arguments(node) if argument.alias_info and argument.alias_info.is_write]
    return [found for found in tree_leaves(written) if isinstance(found, Node)]


def _source(node: Node) -> Node | None:
    """The node of whose memory ``node`` is a view; None if it has its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem or is_wait(node) or node.target in _HANDED_ON:
        source = node.args[0]
        return source if isinstance(source, Node) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    shows = any(result.alias_info for result in node.target._schema.returns)
    shown = [given for argument, given in _arguments(node) if argument.alias_info and isinstance(given, Node)]
    return shown[0] if shows and shown else None


def base(node: Node) -> Node:
    """The node that made the memory which ``node`` shows; of several results in lists, the ``getitem`` of each."""
    while (source := _source(node)) is not None:
        if node.target is operator.getitem and _source(source) is None:
            return node
        node = source
    return node


def is_free(node: Node) -> bool:
    """Whether ``node`` computes nothing on the device: views, items of lists, sizes, waits, graph ends."""
    if node.op != "call_function" or is_wait(node) or is_collective(node) or node.target is AWAIT_REFRESH_OP:
        return True
    if getattr(node.target, "namespace", "") == "profiler":  # ranges
        return True
    return not mutated(node) and (not tensors(node) or _source(node) is not None)
