"""Passes over Dynamo's graph for sequence parallelism: attention over all positions, embeddings of the rank's own.

Blocks carry an annotation (``torch.fx.traceback.annotate``), which Dynamo puts on each of their nodes, also in
checkpointed regions. Attention over all positions has the shape of attention over the rank's own, so no other node
changes, and AOTAutograd traces and differentiates the replacement with the rest.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ..pipeline import GraphKind, GraphPass, PassContext
from ..sequence.exchange_heads import attention
from ..sequence.place import Place

#: key of the annotation of blocks; its value is ``Place.fields``
SEQUENCE = "muon_zero_sequence"


def _attention(*args: Any, fields: tuple[int, int, str, int], **kwargs: Any) -> Tensor:
    return attention(*args, place=Place(*fields), **kwargs)


def _attend(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Let the attention of annotated blocks exchange positions for heads, in ``gm`` and its subgraphs."""
    changed = set[GraphModule]()
    for part in (module for module in gm.modules() if isinstance(module, GraphModule)):
        for node in part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention, sort=False):
            fields = (node.meta.get("custom") or {}).get(SEQUENCE)
            if fields is not None:
                node.target = _attention
                node.kwargs = {**node.kwargs, "fields": fields}
                changed.add(part)
    for part in changed:
        part.recompile()
    return gm


def _cuts(node: Node) -> bool:
    return node.op == "call_method" and node.target == "narrow" and node.args[1] == 1


def _look_up_own(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Turn a slice of an embedding, if only slices of it are read, into an embedding of a slice."""
    for node in gm.graph.find_nodes(op="call_method", target="narrow", sort=False):
        source, dim, *bounds = node.args
        # The model looks up the whole batch, and code ahead of its blocks may read all of it.
        if getattr(source, "target", None) is not F.embedding or dim != 1 or not all(map(_cuts, source.users)):
            continue
        ids, *rest = source.args
        with gm.graph.inserting_before(node):  # where symbolic bounds are known
            own_ids = gm.graph.call_method("narrow", (ids, dim, *bounds))
            own_rows = gm.graph.call_function(F.embedding, (own_ids, *rest), source.kwargs)
        own_ids.meta = {key: value for key, value in node.meta.items() if key not in ("val", "example_value")}
        own_rows.meta = dict(node.meta)
        node.replace_all_uses_with(own_rows)
        gm.graph.erase_node(node)
        if not source.users:
            gm.graph.erase_node(source)
    return gm


ATTEND = GraphPass("attend", _attend, kinds=(GraphKind.DYNAMO,))
LOOK_UP_OWN = GraphPass("look_up_own", _look_up_own, kinds=(GraphKind.DYNAMO,))
