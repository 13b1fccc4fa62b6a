"""The pass that makes shards inputs of a frame, in place of their DTensors.

Dynamo's graph begins with ``to_local`` of each parameter. Done ahead of the frame, all of them take one autograd node,
which knows the placements of gradients; AOTAutograd would work these out again in every backward. AOTAutograd also
refuses graphs that have subclass inputs and return two views of one tensor, as frames between graph breaks do.
"""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from ..markers import UNSHARD
from ..pipeline import GraphKind, GraphPass, PassContext


def example_value(node: Node) -> Any:
    """Return the value with which Dynamo traced a node."""
    return node.meta.get("example_value")


def called(node: Node) -> str:
    """Return the name of a node's callee; ``to_local`` is a method, in torch 2.11 and 2.12 Dynamo's function."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _returns_views(gm: GraphModule) -> bool:
    """Whether two results of Dynamo's graph share memory."""
    (results,) = gm.graph.output_node().args
    values = [example_value(node) for node in dict.fromkeys(results) if isinstance(node, Node)]
    storages = [x.untyped_storage()._cdata for x in values if isinstance(x, Tensor) and not isinstance(x, DTensor)]
    return len(set(storages)) < len(storages)


def _take_shards(gm: GraphModule, ctx: PassContext) -> GraphModule:
    must, positions = _returns_views(gm), []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        users = list(node.users)
        local = [user for user in users if "to_local" in called(user) and user.args == (node,)]
        if not isinstance(example_value(node), DTensor) or not users or len(local) < len(users):
            continue
        # Where AOTAutograd would refuse the graph, shards that the model's own code reads are replaced too.
        if not (must or all(reader.target is UNSHARD for user in local for reader in user.users)):
            continue  # the model's own ``to_local`` may set ``grad_placements``
        node.meta = {**node.meta, "example_value": example_value(local[0])}
        for user in local:
            user.replace_all_uses_with(node)
            gm.graph.erase_node(user)
        positions.append(position)
    ctx.shards = tuple(positions)
    return gm


TAKE_SHARDS = GraphPass("take_shards", _take_shards, kinds=(GraphKind.DYNAMO,))
