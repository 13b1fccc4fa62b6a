"""Gathered weights are recomputed in backward, or saved for it where that was asked for.

At stage 3 recomputing means a second all-gather, which ``reshard_after_forward=False`` trades for the memory of the
gathered weights. At stages 1 and 2 the "recomputed" weight is the resident copy, so saving anything derived from it
would be memory spent for nothing. At stage 0 it is a cast of the master weight, if anything, which moves three
times its bytes: ``reshard_after_forward=False`` keeps that, too. Views and casts of a weight are never saved beside it.

Keys and values that go around a ring are sent anew in backward, too: kept, they would be those of all ranks.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ..collectives import is_hop, is_wait
from ..markers import Unshard
from ..pipeline import GraphKind, GraphPass, PassContext
from ..torch_private import mark_for_backward

__all__ = ["RECOMPUTE", "is_view_or_cast"]

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
    """All that the results of forward are made of: those outputs that no gradient of the loss is in."""
    late = set[Node]()
    for node in gm.graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.target) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    found, pending = set[Node](), [node for node in gm.graph.output_node().all_input_nodes if node not in late]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _is_made(read: Unshard) -> bool:
    """Whether reading this weight takes more than to look at what is resident."""
    spec, layout = read.spec, read.spec.layout
    return layout.gathered or not (layout.resident or spec.on_host or spec.dtype == spec.compute_dtype)


def _recompute(gm: GraphModule, ctx: PassContext) -> GraphModule:
    keep = not ctx.options.reshard_after_forward
    reads = Unshard.all(gm)
    saved = {read.node for read in reads if keep and _is_made(read)}
    hops = {node for node in gm.graph.nodes if is_hop(node)}
    pending = [read.node for read in reads] + list(hops - _of_forward(gm) if hops else ())
    while pending:
        node = pending.pop()
        mark_for_backward(node, save=node in saved)
        views = (user for user in node.users if is_view_or_cast(user) and len(user.all_input_nodes) == 1)
        pending.extend((*views, *filter(is_wait, node.users)))
    return gm


RECOMPUTE = GraphPass("recompute", _recompute, requires=("deduplicate",), kinds=(GraphKind.JOINT,))
