"""The pass that leaves one unshard and one reduction per parameter and graph (tied weights, repeated reads)."""

import operator

import torch
from torch.fx import GraphModule, Node

from ..edit import replace
from ..language.spec import ParamSpec
from ..markers import REDUCE_GRAD, UNSHARD, ReduceGrad, Unshard
from ..pipeline import GraphPass, PassContext, tensor_value


def _drop_empty_views(gm: GraphModule) -> None:
    """Remove the no-op views that DTensor puts around its shard, so that markers read each other directly."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        source = node.args[0]
        is_marked = source.target is REDUCE_GRAD or any(user.target is UNSHARD for user in node.users)
        if is_marked and tensor_value(source).shape == tensor_value(node).shape:
            replace(gm, node, source)


def _merge_unshards(gm: GraphModule) -> None:
    """Merge unshards of one parameter; its state tensor identifies it, whatever view of the shard a marker reads."""
    first: dict[tuple[Node, ParamSpec], Node] = {}
    for read in Unshard.all(gm):
        first_read = first.setdefault((read.state, read.spec), read.node)
        if first_read is not read.node:
            replace(gm, read.node, first_read)


def _only_reduction(node: object) -> ReduceGrad | None:
    """Return ``node`` as a reduction if it is one and has a single reader."""
    if isinstance(node, Node) and node.target is REDUCE_GRAD and len(node.users) == 1:
        return ReduceGrad.of(node)
    return None


def _merge_reductions(gm: GraphModule) -> None:
    """``reduce(g1) + reduce(g2)`` -> ``reduce(g1 + g2)``: one collective, and the sum that Muon orthogonalizes."""
    adds = (torch.ops.aten.add.Tensor, operator.add)
    for node in list(gm.graph.nodes):
        if node.target not in adds or node.kwargs:
            continue
        left, right = map(_only_reduction, node.args[:2])
        if left is None or right is None or left.node is right.node:
            continue
        if (left.state, left.graph_scalars, left.spec) != (right.state, right.graph_scalars, right.spec):
            continue
        # The sum keeps the add's place and tags; the reduction follows it with the first reduction's meta.
        with gm.graph.inserting_before(node):
            grad_sum = gm.graph.call_function(torch.ops.aten.add.Tensor, (left.grad, right.grad))
            grad_sum.meta = {**node.meta, "val": left.grad.meta["val"]}
            reduced = ReduceGrad.insert(gm.graph, grad_sum, left.state, left.graph_scalars, left.spec).node
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
