"""Aliasing between nodes of a graph, from the schemas of their ops: views, writes, and nodes that compute nothing."""

import math
import operator
from functools import cache
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
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def nbytes(node: Node) -> int:
    """Return the bytes of a node's result; an expanded tensor counts with its visible size."""
    return sum(math.prod(map(expected_size, value.shape)) * value.element_size() for value in tensors(node))


def argument(node: Node, name: str, default: Any) -> Any:
    """Return the argument ``name`` of a torch op, or ``default`` where the call leaves it out or the op has none."""
    names = [x.name for x in node.target._schema.arguments]
    return (dict(zip(names, node.args, strict=False)) | node.kwargs).get(name, default)


@cache
def _aliased_arguments(op: torch._ops.OpOverload, *, writes: bool) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that ``op`` writes, or of those that its result may be a view of."""
    if not writes and not any(result.alias_info for result in op._schema.returns):
        return ()
    places = enumerate(op._schema.arguments)
    return tuple((i, x.name) for i, x in places if x.alias_info and (x.alias_info.is_write or not writes))


def _aliased(node: Node, *, writes: bool) -> list[Any]:
    """Return the values of :func:`_aliased_arguments` in a call."""
    places = _aliased_arguments(node.target, writes=writes)
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in places]


def mutated(node: Node) -> list[Node]:
    """Return the nodes whose memory ``node`` writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = _aliased(node, writes=True)
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Node)] if arguments else []


def _source(node: Node) -> Node | None:
    """Return the node whose memory ``node`` is a view of; None if it has its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem or is_wait(node) or node.target in _HANDED_ON:
        source = node.args[0]
        return source if isinstance(source, Node) else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    return next((value for value in _aliased(node, writes=False) if isinstance(value, Node)), None)


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
