"""Parameters that a compiled forward reads otherwise than as attributes of their modules.

``self._parameters["weight"]`` and ``self.parameters()`` give Dynamo the parameter itself: a shard, or at stage 0 a
tensor whose gradient nobody averages. In such a frame it becomes what the attribute is, whole and averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from compile_muon.engine.dtensors import edits_of
from compile_muon.engine.sharded_param import ShardedParam, sharded_param_of
from compile_muon.errors import UnsupportedModelError
from compile_muon.passes.dynamo.local_inputs import called, example_value
from compile_muon.passes.markers import UNSHARD

__all__ = ["read_whole"]

_OF_DTENSORS = ("to_local", "full_tensor", "redistribute", "from_local", "distribute_tensor")


def read_whole(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Put markers between parameters and what is computed of them directly, in a frame that has markers.

    A frame that treats them as the DTensors they are (``to_local``, other DTensors) is left as it is, and so is a
    penalty at stage 0, whose gradient is the same on all ranks.

    Args:
        gm: Dynamo's graph.
        inputs: of it.
    Raises:
        UnsupportedModelError: such a parameter is not read as an attribute in this frame, and has no marker.
    """
    nodes = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False))
    found = {node: sharded for node, value in nodes.items() if (sharded := sharded_param_of(value)) is not None}
    ledger = next((sharded.ledger for sharded in found.values()), None)
    if ledger is None:
        return
    by_param = {
        id(sharded.param): sharded for sharded in ledger.sharded_params if not sharded.spec.layout.everyone.alone
    }
    direct = {node: by_param[id(value)] for node, value in nodes.items() if id(value) in by_param and _direct(node)}
    direct = {node: sharded for node, sharded in direct.items() if not edits_of(example_value(node))}
    made = _computed_of(direct)
    shards = any(sharded.distributed for sharded in direct.values())
    if not direct or (_treats_dtensors(made, direct) if shards else not _meets_data(made, direct)):
        return
    states = {sharded: node for node, sharded in found.items()}
    for node, sharded in direct.items():
        _put_marker(gm, node, sharded, states.get(sharded))
    for node in made:
        if isinstance(example_value(node), DTensor):
            del node.meta["example_value"]
    gm.recompile()


def _of_dtensors(node: Node) -> bool:
    """Whether this is a function of DTensors, as a method or as Dynamo's own."""
    return any(word in called(node) for word in _OF_DTENSORS)


def _direct(node: Node) -> list[Node]:
    """What uses a parameter, but for its marker and regions that have graphs of their own."""
    return [
        user
        for user in node.users
        if user.target is not UNSHARD
        and not (_of_dtensors(user) and all(reader.target is UNSHARD for reader in user.users))
        and not any(arg.op == "get_attr" for arg in user.all_input_nodes)
    ]


def _computed_of(roots: Iterable[Node]) -> set[Node]:
    """All that is computed of these directly."""
    made = set[Node]()
    waiting = [user for root in roots for user in _direct(root)]
    while waiting:
        node = waiting.pop()
        if node not in made and node.op != "output":
            made.add(node)
            waiting += node.users
    return made


def _others(made: set[Node], roots: dict[Node, ShardedParam]) -> list[Any]:
    """Values, beside what is made of the roots, that it is made of."""
    return [example_value(arg) for node in made for arg in node.all_input_nodes if arg not in made and arg not in roots]


def _treats_dtensors(made: set[Node], roots: dict[Node, ShardedParam]) -> bool:
    return any(map(_of_dtensors, made)) or any(isinstance(value, DTensor) for value in _others(made, roots))


def _meets_data(made: set[Node], roots: dict[Node, ShardedParam]) -> bool:
    return any(isinstance(value, Tensor) and value.ndim for value in _others(made, roots))


def _put_marker(gm: GraphModule, node: Node, sharded: ShardedParam, state: Node | None) -> None:
    users = _direct(node)
    marker = None if state is None else next((user for user in state.users if user.target is UNSHARD), None)
    if marker is None:
        raise UnsupportedModelError(
            f"{sharded.name}: is read by a compiled forward as module._parameters or module.parameters() gives it, "
            "where each rank has its own part or gradient; read it as an attribute of its module (self.weight), or "
            "compute with model.parameters() outside of forward"
        )
    last = list(gm.graph.find_nodes(op="placeholder"))[-1]
    copies: dict[Node, Node] = {}
    with gm.graph.inserting_after(last):
        shard: Any = marker.args[0]
        if shard.op != "placeholder":
            copies[shard] = gm.graph.node_copy(shard)
    with gm.graph.inserting_after(copies.get(shard, last)):
        whole = gm.graph.node_copy(marker, lambda arg: copies.get(arg, arg))
    for user in users:
        user.replace_input_with(node, whole)
