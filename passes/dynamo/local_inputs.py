"""Shards as inputs of a frame in place of the DTensors they are of.

In Dynamo's graph the first thing that happens to a parameter is ``to_local``. It can happen ahead of the frame, for one
node of autograd, which then knows how gradients are placed: AOTAutograd would work that out anew for each in each
backward. Nor does it compile graphs that have inputs of a subclass and return two views of one tensor, as frames
between graph breaks do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from ..markers import UNSHARD
from ..pipeline import GraphKind, GraphPass, PassContext

__all__ = ["TAKE_SHARDS", "called", "example_value"]


def example_value(node: Node) -> Any:
    """What Dynamo has traced a node of its graph with."""
    return node.meta.get("example_value")


def called(node: Node) -> str:
    """The name of what a node of Dynamo's graph calls: of a method of DTensors, or as torch 2.11 and 2.12 trace it of a
    function of Dynamo's own."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_to_local(node: Node) -> bool:
    return "to_local" in called(node)


def _returns_views(gm: GraphModule) -> bool:
    """Whether two results of a graph of Dynamo share memory."""
    (results,) = gm.graph.output_node().args
    values = [example_value(node) for node in dict.fromkeys(results) if isinstance(node, Node)]
    held = [x.untyped_storage()._cdata for x in values if isinstance(x, Tensor) and not isinstance(x, DTensor)]
    return len(set(held)) < len(held)


def _take_shards(gm: GraphModule, ctx: PassContext) -> GraphModule:
    must, positions = _returns_views(gm), []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        users = list(node.users)
        local = [user for user in users if _is_to_local(user) and user.args == (node,)]
        if not isinstance(example_value(node), DTensor) or not users or len(local) < len(users):
            continue
        if not (must or all(reader.target is UNSHARD for user in local for reader in user.users)):
            continue  # whoever asks for a shard may say how its gradient is placed
        node.meta = {**node.meta, "example_value": example_value(local[0])}
        for user in local:
            user.replace_all_uses_with(node)
            gm.graph.erase_node(user)
        positions.append(position)
    ctx.shards = tuple(positions)
    return gm


TAKE_SHARDS = GraphPass("take_shards", _take_shards, kinds=(GraphKind.DYNAMO,))
