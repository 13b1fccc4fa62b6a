"""Moves of saved activations to pinned host memory, between forward and backward.

Forward starts the copy of an activation as soon as it is made, and backward starts the copy back ahead of its first
reader, each on a stream of its own. The activations that forward makes first are moved: backward reads them last, so
they are held longest.

The copies under way hold at most ``2 * largest`` bytes of device memory, where ``largest`` is the largest moved
activation: forward waits for a copy once those behind it would hold more, and backward starts a copy once those ahead
of it leave room. Forward has waited for all copies when it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..collectives import is_collective
from ..edit import outputs, replace
from ..errors import VerificationError
from ..lowering.aliases import base, nbytes
from ..markers import Unshard
from ..operators import operator
from ..pipeline import tensor_value
from ..torch_private import fake_mode_of
from .recompute import is_view_or_cast

#: part of all saved bytes below which an activation stays
_SMALL = 1e-3
_COPIED = "_muon_zero_copied"


@cache
def _stream(device: torch.device, way: str) -> torch.Stream:
    """Return the stream of the device on which all copies of one way ("out", "in") queue up."""
    return torch.Stream(device)


def _copy(to: Tensor, source: Tensor, host: Tensor, device: torch.device, way: str) -> Tensor:
    """Start the copy behind the kernels queued so far; ``host`` carries the event of its end, and its source."""
    stream = _stream(device, way)
    # The allocator may hand out memory that queued kernels still read.
    stream.wait_event(torch.accelerator.current_stream(device).record_event())
    with stream:
        to.copy_(source, non_blocking=True)
        # Inductor may pass a copy of its own, which nothing else keeps.
        setattr(host, _COPIED, (stream.record_event(), source))
    return to


def _move_out(activation: Tensor) -> Tensor:
    on_gpu = activation.is_cuda
    host = torch.empty_like(activation, device="cpu", pin_memory=on_gpu)
    return _copy(host, activation, host, activation.device, "out") if on_gpu else host.copy_(activation)


def _bring_back(host: Tensor, device: torch.device) -> Tensor:
    activation = torch.empty_like(host, device=device)
    return _copy(activation, host, host, device, "in") if activation.is_cuda else activation.copy_(host)


def _await_move(activation: Tensor, host: Tensor) -> None:
    if hasattr(host, _COPIED):
        copied, _ = getattr(host, _COPIED)
        delattr(host, _COPIED)
        torch.accelerator.current_stream(activation.device).wait_event(copied)


#: ``move_out(activation)``: a copy in host memory, under way at return
MOVE_OUT = operator(
    "move_out(Tensor activation) -> Tensor",
    _move_out,
    lambda activation: torch.empty_like(activation, device="cpu"),
    calls_python=True,
    exact_strides=True,
)
#: ``bring_back(host, device)``: a copy on the device, under way at return
BRING_BACK = operator(
    "bring_back(Tensor host, Device device) -> Tensor",
    _bring_back,
    lambda host, device: torch.empty_like(host, device=device),
    calls_python=True,
    exact_strides=True,
)
#: ``await_move(activation, host)``: the current stream waits for the copy of ``activation``, which is on the device.
#: The declared write orders the wait: behind all readers of what left, ahead of all readers of what came back.
AWAIT_MOVE = operator(
    "await_move(Tensor(a!) activation, Tensor host) -> ()",
    _await_move,
    lambda activation, host: None,
    calls_python=True,
    exact_strides=True,
)


def _views(node: Node) -> list[Node] | None:
    """Return the views from the memory of ``node`` to ``node``; None where they depend on more than their input."""
    views = list[Node]()
    while node is not base(node):
        if len(node.all_input_nodes) != 1:
            return None
        views.insert(0, node)
        (node,) = node.all_input_nodes
    return views


def _is_dense(value: Tensor) -> bool:
    """Whether a copy has the strides of ``value``."""
    return torch.empty_like(value).stride() == value.stride()


def _movable(forward: GraphModule, user_outputs: int) -> tuple[dict[Node, list[Node]], int]:
    """Return saved memory that can move, in the order of its makers, and the bytes of all saved memory.

    Memory is a node, to the saved values that show it. Inputs of the graph are saved for free. Gathered weights stay:
    a second gather is faster.
    """
    weights = {read.node for read in Unshard.all(forward)}
    for node in forward.graph.nodes:
        if is_view_or_cast(node) and node.args[0] in weights:
            weights.add(node)
    shown = defaultdict[Node, list[Node]](list)
    for node in dict.fromkeys(outputs(forward)[user_outputs:]):
        if node is not None and isinstance(node.meta.get("val"), Tensor):
            shown[base(node)].append(node)
    returned = {base(node) for node in outputs(forward)[:user_outputs] if node is not None}
    saved_values = {node: shown[node] for node in forward.graph.nodes if node in shown and node not in returned}
    saved_values = {memory: values for memory, values in saved_values.items() if memory.op == "call_function"}
    total = sum(map(nbytes, saved_values))
    movable = {
        memory: values
        for memory, values in saved_values.items()
        if memory not in weights
        and not is_collective(memory)
        and nbytes(memory) > _SMALL * total
        and _is_dense(tensor_value(memory))
        and all(_views(value) is not None for value in values)
    }
    return movable, total


def _users(node: Node, place: dict[Node, int]) -> Iterator[int]:
    """Yield the places of all readers of a node's memory but the output's."""
    for user in node.users:
        if user.op != "output":
            yield place[user]
            if base(user) is base(node):
                yield from _users(user, place)


def _await_copies(forward: GraphModule, moved: Sequence[Node], pool: int) -> None:
    """Insert the waits of forward; ``moved`` are in the order of their makers."""
    graph, nodes = forward.graph, list(forward.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    for number, activation in enumerate(moved):
        behind, under_way = number, nbytes(activation)
        while under_way <= pool and (behind := behind + 1) < len(moved):
            under_way += nbytes(moved[behind])
        full = place[moved[behind]] if behind < len(moved) else len(nodes) - 2
        (host,) = (user for user in activation.users if user.target is MOVE_OUT)
        with graph.inserting_after(nodes[max(full, place[host], *_users(activation, place))]):
            graph.call_function(AWAIT_MOVE, (activation, host))


def move_activations(forward: GraphModule, backward: GraphModule, user_outputs: int, part: float) -> None:
    """Move at most ``part`` of the bytes that forward saves; both graphs are changed in place."""
    if not part:
        return
    movable, total = _movable(forward, user_outputs)
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    moved, remaining_bytes = dict[Node, list[Node]](), part * total
    for activation, values in movable.items():
        if nbytes(activation) <= remaining_bytes and all(inputs[value.name].users for value in values):
            moved[activation] = values
            remaining_bytes -= nbytes(activation)
    if not moved:
        return
    pool = 2 * max(map(nbytes, moved))
    replaced = dict[Node, Node | None]()  # the first value that shows a memory, by the copy; others by nothing
    backs = list[_Back]()
    for activation, values in moved.items():
        with forward.graph.inserting_after(activation):
            host = forward.graph.call_function(MOVE_OUT, (activation,))
        host.meta = {k: v for k, v in values[0].meta.items() if k == "saved_tensor_with_no_vc_check"}
        with fake_mode_of([value := tensor_value(activation)]):
            host.meta["val"] = torch.empty_like(value, device="cpu")
        replaced |= dict.fromkeys(values) | {values[0]: host}
        backs.append(_Back(activation, host, [(inputs[value.name], _views(value) or []) for value in values]))
    _await_copies(forward, list(moved), pool)
    returned = [*outputs(forward)[:user_outputs], *(replaced.get(x, x) for x in outputs(forward)[user_outputs:])]
    forward.graph.output_node().args = (tuple(x for i, x in enumerate(returned) if x is not None or i < user_outputs),)
    _bring_back_all(backward, backs, pool)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


@dataclass
class _Back:
    """An activation that comes back; the first two are nodes of forward."""

    activation: Node
    host: Node
    values: list[tuple[Node, list[Node]]]  # inputs of backward, and the views of forward that lead to each


def _bring_back_all(backward: GraphModule, moved: Sequence[_Back], pool: int) -> None:
    """Replace the inputs of backward that moved."""
    graph, place = backward.graph, {node: i for i, node in enumerate(backward.graph.nodes)}
    readers = [min((user for value, _ in back.values for user in value.users), key=place.__getitem__) for back in moved]
    in_order = sorted(zip(readers, moved, strict=True), key=lambda pair: place[pair[0]])
    start = next(node for node in graph.nodes if node.op != "placeholder")
    ahead, under_way = 0, 0  # the first of the copies that share the pool, and their bytes
    for reader, back in in_order:
        under_way += nbytes(back.activation)
        while under_way > pool:
            under_way -= nbytes(in_order[ahead][1].activation)
            ahead += 1
        with graph.inserting_before(back.values[0][0]):
            host = graph.placeholder(back.host.name)
        host.meta = dict(back.host.meta)
        with graph.inserting_before(in_order[ahead - 1][0] if ahead else start):
            activation = graph.call_function(BRING_BACK, (host, tensor_value(back.activation).device))
        activation.meta["val"] = back.activation.meta["val"]
        with graph.inserting_before(reader):
            graph.call_function(AWAIT_MOVE, (activation, host))
            for value, views in back.values:
                shown = activation
                for view in views:
                    shown = graph.node_copy(view, dict(zip(view.all_input_nodes, [shown], strict=True)).__getitem__)
                replace(backward, value, shown)


def verify_moves(gm: GraphModule) -> None:
    """Raise :class:`VerificationError` where a copy is read before its wait, or memory that left is read again."""
    copies = [n for move in (MOVE_OUT, BRING_BACK) for n in gm.graph.find_nodes(op="call_function", target=move)]
    place = {node: i for i, node in enumerate(gm.graph.nodes)} if copies else {}
    for node in copies:
        activation = node.args[0] if node.target is MOVE_OUT else node
        waits = [user for user in activation.users if user.target is AWAIT_MOVE]
        if len(waits) != 1:
            raise VerificationError(f"the copy {node.name} has {len(waits)} waits; every copy needs exactly one")
        places = [i for i in _users(activation, place) if i != place[waits[0]]]
        if node.target is MOVE_OUT and max(places) > place[waits[0]]:
            raise VerificationError(f"{activation.name} is read behind {waits[0].name}, which frees it")
        if node.target is BRING_BACK and min(places) < place[waits[0]]:
            raise VerificationError(f"{activation.name} is read ahead of {waits[0].name}, its copy's end")
