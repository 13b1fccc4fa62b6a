"""Put ``orthogonalize`` behind the gradient of every Muon matrix of the joint graph.

The node is tagged must-be-in-backward, so the partitioner saves the momentum for the backward graph. Each backward
lowering then decides whether the node becomes the Muon direction or hands the gradient through.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..markers import ORTHOGONALIZE, REDUCE_GRAD
from ..pipeline import GraphPass, Half, PassContext
from ..spec import ParamSpec

__all__ = ["INSERT_ORTHOGONALIZE"]


def _insert(gm: GraphModule, ctx: PassContext) -> GraphModule:
    output = gm.graph.output_node()
    for node in gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        spec = ParamSpec.decode(node.args[3])
        # A gradient that anything else consumes is left raw: step() orthogonalizes it.
        if spec.muon is None or set(node.users) != {output}:
            continue
        with gm.graph.inserting_after(node):
            direction = gm.graph.call_function(ORTHOGONALIZE, node.args)
        node.replace_all_uses_with(direction)
        direction.args = (node, *node.args[1:])
        direction.meta = {**node.meta, "partitioner_tag": "must_be_in_backward"}
    return gm


INSERT_ORTHOGONALIZE = GraphPass(
    "insert_orthogonalize", _insert, requires=("deduplicate",), conflicts=("lower",), halves=(Half.JOINT,)
)
