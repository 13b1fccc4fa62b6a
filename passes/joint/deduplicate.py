"""One unshard and one reduction per parameter and graph (tied weights, repeated reads)."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ..markers import REDUCE_GRAD, UNSHARD
from ..pipeline import GraphPass, PassContext, tensor_value

__all__ = ["DEDUPLICATE"]


def _drop_empty_views(gm: GraphModule) -> None:
    """DTensor wraps and unwraps its shard in views that change nothing; markers are easier to match without them."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        source = node.args[0]
        is_marked = source.target is REDUCE_GRAD or any(user.target is UNSHARD for user in node.users)
        if is_marked and tensor_value(source).shape == tensor_value(node).shape:
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def _merge_unshards(gm: GraphModule) -> None:
    """The state tensor identifies the parameter, whatever view of the shard was read."""
    first: dict[tuple[object, ...], Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        kept = first.setdefault((node.args[1], node.args[4]), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)


def _same_parameter(a: object, b: object) -> bool:
    return (
        isinstance(a, Node)
        and isinstance(b, Node)
        and a.target is REDUCE_GRAD
        and b.target is REDUCE_GRAD
        and a.args[1:] == b.args[1:]
        and len(a.users) == 1
        and len(b.users) == 1
    )


def _merge_reductions(gm: GraphModule) -> None:
    """``reduce(g1) + reduce(g2)`` -> ``reduce(g1 + g2)``: one collective, and the sum is what Muon must see."""
    adds = (torch.ops.aten.add.Tensor, operator.add)
    for node in list(gm.graph.nodes):
        if node.target not in adds or node.kwargs or not _same_parameter(*node.args[:2]):
            continue
        left, right = node.args[:2]
        # The sum keeps the add's place and tags; the reduction follows it with the first reduction's meta.
        with gm.graph.inserting_before(node):
            total = gm.graph.call_function(torch.ops.aten.add.Tensor, (left.args[0], right.args[0]))
            total.meta = {**node.meta, "val": left.args[0].meta["val"]}
            reduced = gm.graph.call_function(REDUCE_GRAD, (total, *left.args[1:]))
            reduced.meta = dict(left.meta)
        node.replace_all_uses_with(reduced)
        for dead in (node, left, right):
            gm.graph.erase_node(dead)


def _deduplicate(gm: GraphModule, ctx: PassContext) -> GraphModule:
    _drop_empty_views(gm)
    _merge_unshards(gm)
    _merge_reductions(gm)
    return gm


DEDUPLICATE = GraphPass("deduplicate", _deduplicate, conflicts=("lower",))
