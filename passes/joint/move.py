"""Moves of saved activations to pinned host memory, between forward and backward.

Forward starts the copy of an activation as soon as it is made, and backward starts the copy back ahead of its first
reader, each on a stream of its own. The activations that forward makes first are moved: backward reads them last, so
they are held longest.

The copies under way hold at most ``2 * largest`` bytes of device memory, where ``largest`` is the largest moved
activation: forward waits for a copy once those behind it would hold more, and backward starts a copy once those ahead
of it leave room. Forward has waited for all copies when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..edit import outputs
from ..errors import VerificationError
from ..lowering.aliases import base, nbytes
from ..markers import Unshard
from ..pipeline import tensor_value
from ..torch_private import fake_mode_of
from .recompute import is_view_or_cast

__all__ = ["AWAIT_MOVE", "BRING_BACK", "MOVE_OUT", "move_activations", "verify_moves"]

#: part of all saved bytes below which an activation stays
_SMALL = 1e-3
_COPIED = "_muon_zero_copied"

_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")
for _schema in (
    "move_out(Tensor activation) -> Tensor",
    "bring_back(Tensor host, Device device) -> Tensor",
    # The declared write orders the wait: behind all readers of what left, ahead of all readers of what came back.
    "await_move(Tensor(a!) activation, Tensor host) -> ()",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))


@cache
def _stream(device: torch.device, way: str) -> torch.Stream:
    """Return the stream of the device on which all copies of one way ("out", "in") queue up."""
    return torch.Stream(device)


def _copy(to: Tensor, source: Tensor, host: Tensor, device: torch.device, way: str) -> Tensor:
    """Start the copy behind the kernels queued so far; ``host`` carries the event of its end."""
    stream = _stream(device, way)
    # The allocator may hand out memory that queued kernels still read.
    stream.wait_event(torch.accelerator.current_stream(device).record_event())
    with stream:
        to.copy_(source, non_blocking=True)
        setattr(host, _COPIED, stream.record_event())
    return to


@torch.library.impl(_LIBRARY, "move_out", "CompositeExplicitAutograd")
def _move_out(activation: Tensor) -> Tensor:
    on_gpu = activation.is_cuda
    host = torch.empty(activation.shape, dtype=activation.dtype, device="cpu", pin_memory=on_gpu)
    return _copy(host, activation, host, activation.device, "out") if on_gpu else host.copy_(activation)


@torch.library.impl(_LIBRARY, "bring_back", "CompositeExplicitAutograd")
def _bring_back(host: Tensor, device: torch.device) -> Tensor:
    activation = torch.empty(host.shape, dtype=host.dtype, device=device)
    return _copy(activation, host, host, device, "in") if activation.is_cuda else activation.copy_(host)


@torch.library.impl(_LIBRARY, "await_move", "CompositeExplicitAutograd")
def _await_move(activation: Tensor, host: Tensor) -> None:
    copied = getattr(host, _COPIED, None)
    if copied is not None:
        torch.accelerator.current_stream(activation.device).wait_event(copied)


@torch.library.register_fake("muon_zero::move_out", lib=_LIBRARY)
def _(activation: Tensor) -> Tensor:
    return torch.empty(activation.shape, dtype=activation.dtype, device="cpu")


@torch.library.register_fake("muon_zero::bring_back", lib=_LIBRARY)
def _(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty(host.shape, dtype=host.dtype, device=device)


torch.library.register_fake("muon_zero::await_move", lambda activation, host: None, lib=_LIBRARY)

#: ``move_out(activation)``: a copy in host memory, under way at return
MOVE_OUT = torch.ops.muon_zero.move_out.default
#: ``bring_back(host, device)``: a copy on the device, under way at return
BRING_BACK = torch.ops.muon_zero.bring_back.default
#: ``await_move(activation, host)``: the current stream waits for the copy; its first argument is on the device
AWAIT_MOVE = torch.ops.muon_zero.await_move.default


def _movable(forward: GraphModule, user_outputs: int) -> tuple[list[Node], int]:
    """Return saved activations that can move, in the order of their makers, and the bytes of all saved activations.

    Views stay, and whatever shares its memory with another output; inputs of the graph are saved for free. Gathered
    weights stay as well: a second gather is faster.
    """
    weights = {read.node for read in Unshard.all(forward)}
    returned = [node for node in outputs(forward) if node is not None and isinstance(node.meta.get("val"), Tensor)]
    shown = Counter(map(base, returned))
    kept = {base(node) for node in outputs(forward)[:user_outputs] if node in returned}
    made = [node for node in forward.graph.nodes if node.op == "call_function" and node in shown and node not in kept]
    total = sum(map(nbytes, made))
    for node in forward.graph.nodes:
        if is_view_or_cast(node) and node.args[0] in weights:
            weights.add(node)
    alone = [node for node in made if node in returned and shown[node] == 1 and node not in weights]
    return [x for x in alone if nbytes(x) > _SMALL * total and tensor_value(x).is_contiguous()], total


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
    movable, total = _movable(forward, user_outputs)
    saved = outputs(forward)[user_outputs:]
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    moved, moved_bytes = list[Node](), 0
    for activation in movable:
        if moved_bytes + nbytes(activation) <= part * total and inputs[activation.name].users:
            moved.append(activation)
            moved_bytes += nbytes(activation)
    if not moved:
        return
    pool = 2 * max(map(nbytes, moved))
    hosts = dict[Node, Node]()
    for activation in moved:
        with forward.graph.inserting_after(activation):
            hosts[activation] = host = forward.graph.call_function(MOVE_OUT, (activation,))
        value = tensor_value(activation)
        host.meta = {k: v for k, v in activation.meta.items() if k == "saved_tensor_with_no_vc_check"}
        with fake_mode_of([value]):
            host.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    _await_copies(forward, moved, pool)
    kept = outputs(forward)[:user_outputs]
    forward.graph.output_node().args = ((*kept, *(hosts.get(node, node) for node in saved)),)
    _bring_back_all(backward, [(inputs[activation.name], host) for activation, host in hosts.items()], pool)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


def _bring_back_all(backward: GraphModule, moved: Sequence[tuple[Node, Node]], pool: int) -> None:
    """Replace the inputs of backward that moved: ``(placeholder, node of forward that holds the host's copy)``."""
    graph, place = backward.graph, {node: i for i, node in enumerate(backward.graph.nodes)}
    reader = {activation: min(activation.users, key=place.__getitem__) for activation, _ in moved}
    in_order = sorted(moved, key=lambda pair: place[reader[pair[0]]])
    first = next(node for node in graph.nodes if node.op != "placeholder")
    ahead, under_way = 0, 0  # the first of the copies that share the pool, and their bytes
    for activation, host_in_forward in in_order:
        under_way += nbytes(activation)
        while under_way > pool:
            under_way -= nbytes(in_order[ahead][0])
            ahead += 1
        with graph.inserting_before(activation):
            host = graph.placeholder(host_in_forward.name)
        host.meta = dict(host_in_forward.meta)
        with graph.inserting_before(reader[in_order[ahead - 1][0]] if ahead else first):
            back = graph.call_function(BRING_BACK, (host, tensor_value(activation).device))
        back.meta["val"] = activation.meta["val"]
        with graph.inserting_before(reader[activation]):
            graph.call_function(AWAIT_MOVE, (back, host))
        activation.replace_all_uses_with(back)
        graph.erase_node(activation)


def verify_moves(gm: GraphModule) -> None:
    """Raise :class:`VerificationError` where a copy is read before its wait, or memory that left is read again."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        if node.target not in (MOVE_OUT, BRING_BACK):
            continue
        activation = node.args[0] if node.target is MOVE_OUT else node
        waits = [user for user in activation.users if user.target is AWAIT_MOVE]
        if len(waits) != 1:
            raise VerificationError(f"the copy {node.name} has {len(waits)} waits; every copy needs exactly one")
        places = [i for i in _users(activation, place) if i != place[waits[0]]]
        if node.target is MOVE_OUT and max(places) > place[waits[0]]:
            raise VerificationError(f"{activation.name} is read behind {waits[0].name}, which frees it")
        if node.target is BRING_BACK and min(places) < place[waits[0]]:
            raise VerificationError(f"{activation.name} is read ahead of {waits[0].name}, its copy's end")
