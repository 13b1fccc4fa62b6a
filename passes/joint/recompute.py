"""The pass that recomputes unsharded weights in backward, or saves a part of them (:class:`~..pipeline.Kept`).

Recomputing means a second all-gather at stage 3; the alternative holds the gathered weights in memory. At stages 1 and
2 it means reading the resident weight, so saving anything derived from it only wastes memory. At stage 0 it is at most
a cast of the master weight, which moves three times the bytes of reading the result: ``reshard_after_forward=False``
saves that as well. Views and casts of a weight are never saved beside it.

Backward also sends the keys and values of ring attention anew: saved, each rank would hold those of all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.fx import GraphModule, Node

from ..collectives import is_hop, is_wait
from ..lowering.aliases import argument, nbytes
from ..markers import Unshard
from ..pipeline import GraphKind, GraphPass, PassContext
from ..torch_private import mark_for_backward

__all__ = ["RECOMPUTE", "gathers", "is_made", "is_view_or_cast"]

_aten = torch.ops.aten
_VIEWS_AND_CASTS = {
    _aten.view,
    _aten._unsafe_view,
    _aten.reshape,
    _aten.t,
    _aten.permute,
    _aten.transpose,
    _aten.slice,
    _aten.select,
    _aten.expand,
    _aten.squeeze,
    _aten.unsqueeze,
    _aten.as_strided,
    _aten.alias,
    _aten.clone,
    _aten.detach,
    _aten._to_copy,
    _aten.split,
    _aten.split_with_sizes,
    _aten.unbind,
    torch.ops.prims.convert_element_type,
}


def is_view_or_cast(node: Node) -> bool:
    """Whether ``node`` only reinterprets, slices, copies or casts its first argument."""
    return node.target is operator.getitem or getattr(node.target, "overloadpacket", None) in _VIEWS_AND_CASTS


def _of_forward(gm: GraphModule) -> set[Node]:
    """Return all ancestors of forward's outputs: the outputs that depend on no tangent."""
    late = set[Node]()
    for node in gm.graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.target) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    needed, pending = set[Node](), [node for node in gm.graph.output_node().all_input_nodes if node not in late]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed


def is_made(read: Unshard) -> bool:
    """Whether reading this weight takes a gather, or a cast of the master weight."""
    spec, layout = read.spec, read.spec.layout
    return layout.gathered or not (layout.resident or spec.on_host or spec.dtype == spec.compute_dtype)


def gathers(gm: GraphModule) -> bool:
    """Whether the graph gathers or casts weights."""
    return any(map(is_made, Unshard.all(gm)))


def _saved(reads: Sequence[Unshard], part: float) -> set[Node]:
    """Return the weights that stay, at most ``part`` of all bytes.

    The last reads of forward come first: backward reads these soonest, so they are held for the shortest time, and
    backward has computed nothing yet that would hide a second gather.
    """
    weights = [read.node for read in reversed(reads) if is_made(read)]
    running_bytes = accumulate(map(nbytes, weights))
    limit = part * sum(map(nbytes, weights))
    return {node for node, total in zip(weights, running_bytes, strict=True) if total <= limit}


def _draws(node: Node) -> bool:
    """Whether ``node`` draws random numbers, outside of a checkpoint, which replays them."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) or "recompute" in node.meta:
        return False
    return bool(argument(node, "dropout_p", True))  # attention without dropout counts as random, and draws nothing


def _recompute(gm: GraphModule, ctx: PassContext) -> GraphModule:
    reads = Unshard.all(gm)
    saved = _saved(reads, ctx.kept.weights)
    hops = {node for node in gm.graph.nodes if is_hop(node)}
    pending = [read.node for read in reads] + list(hops - _of_forward(gm) if hops else ())
    while pending:
        node = pending.pop()
        mark_for_backward(node, save=node in saved)
        views = (user for user in node.users if is_view_or_cast(user) and len(user.all_input_nodes) == 1)
        pending.extend((*views, *filter(is_wait, node.users)))
    if ctx.kept.activations < 1:
        # With a budget the partitioner of torch 2.13 recomputes them, and so draws other numbers.
        for node in filter(_draws, gm.graph.nodes):
            for result in (node, *(user for user in node.users if user.target is operator.getitem)):
                mark_for_backward(result, save=True)
    return gm


RECOMPUTE = GraphPass("recompute", _recompute, requires=("deduplicate",), kinds=(GraphKind.JOINT,))
