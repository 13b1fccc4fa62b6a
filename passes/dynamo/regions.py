"""Regions that a model has compiled once for all their calls (``torch.compiler.nested_compile_region``), at each call.

Markers of different weights in one subgraph could be neither gathered together nor given directions of their own.
"""

from typing import Any

import torch
from torch.fx import GraphModule

from ..pipeline import GraphKind, GraphPass, PassContext
from .local_inputs import example_value


def _inline_regions(gm: GraphModule, ctx: PassContext) -> GraphModule:
    for inner in gm.children():
        if isinstance(inner, GraphModule):
            _inline_regions(inner, ctx)
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        region, _, *inputs = call.args
        body: GraphModule = getattr(gm, region.target)
        copies = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
        with gm.graph.inserting_before(call):
            results: Any = gm.graph.graph_copy(body.graph, copies)
        for node in body.graph.find_nodes(op="get_attr"):
            copies[node].target = f"{region.target}_{node.target}"
            setattr(gm, copies[node].target, getattr(body, node.target))
        for item in list(call.users):
            result = results[item.args[1]]
            result.meta["example_value"] = example_value(item)  # that of the first call else
            item.replace_all_uses_with(result)
            gm.graph.erase_node(item)
        gm.graph.erase_node(call)
        if not region.users:
            gm.graph.erase_node(region)
    return gm


INLINE_REGIONS = GraphPass("inline_regions", _inline_regions, kinds=(GraphKind.DYNAMO,))
