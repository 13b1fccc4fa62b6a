"""One unshard and one reduction per parameter and graph (tied weights, repeated reads)."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ..edit import replace
from ..language.spec import ParamSpec
from ..markers import REDUCE_GRAD, UNSHARD, ReduceGrad, Unshard
from ..pipeline import GraphPass, PassContext, tensor_value

__all__ = ["DEDUPLICATE"]


def _drop_empty_views(gm: GraphModule) -> None:
    """DTensor wraps and unwraps its shard in views that change nothing; markers are easier to match without them."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        source = node.args[0]
        is_marked = source.target is REDUCE_GRAD or any(user.target is UNSHARD for user in node.users)
        if is_marked and tensor_value(source).shape == tensor_value(node).shape:
            replace(gm, node, source)


def _merge_unshards(gm: GraphModule) -> None:
    """The state tensor identifies the parameter, whatever view of the shard was read."""
    first: dict[tuple[Node, ParamSpec], Node] = {}
    for read in Unshard.all(gm):
        kept = first.setdefault((read.state, read.spec), read.node)
        if kept is not read.node:
            replace(gm, read.node, kept)


def _only_reduction(node: object) -> ReduceGrad | None:
    """``node`` as a reduction that has one reader."""
    if isinstance(node, Node) and node.target is REDUCE_GRAD and len(node.users) == 1:
        return ReduceGrad.of(node)
    return None


def _merge_reductions(gm: GraphModule) -> None:
    """``reduce(g1) + reduce(g2)`` -> ``reduce(g1 + g2)``: one collective, and the sum is what Muon must see."""
    adds = (torch.ops.aten.add.Tensor, operator.add)
    for node in list(gm.graph.nodes):
        if node.target not in adds or node.kwargs:
            continue
        left, right = map(_only_reduction, node.args[:2])
        if left is None or right is None or left.node is right.node:
            continue
        if (left.state, left.hyper, left.spec) != (right.state, right.hyper, right.spec):
            continue
        # The sum keeps the add's place and tags; the reduction follows it with the first reduction's meta.
        with gm.graph.inserting_before(node):
            total = gm.graph.call_function(torch.ops.aten.add.Tensor, (left.grad, right.grad))
            total.meta = {**node.meta, "val": left.grad.meta["val"]}
            reduced = ReduceGrad.insert(gm.graph, total, left.state, left.hyper, left.spec).node
            reduced.meta = dict(left.node.meta)
        replace(gm, node, reduced)
        for dead in (left.node, right.node):
            gm.graph.erase_node(dead)


def _deduplicate(gm: GraphModule, ctx: PassContext) -> GraphModule:
    _drop_empty_views(gm)
    _merge_unshards(gm)
    _merge_reductions(gm)
    return gm


DEDUPLICATE = GraphPass("deduplicate", _deduplicate, conflicts=("lower",))
