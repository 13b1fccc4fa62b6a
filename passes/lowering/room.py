"""The pass that sets the memory limit of Newton-Schulz calls whose limit is ``AUTO_LIMIT``.

Backward's memory peaks at its beginning, with the activations saved by forward. Newton-Schulz runs at its end, when
they are freed, and may fill the difference without a higher peak. A larger limit batches more matrices per call, which
saves the launches of their matrix products.

Both terms of the difference are conservative. The peak is a lower bound: saved activations up to their last reader, and
graph outputs from their maker on. The memory at a call is an upper bound: every result that later nodes read, though
code generation keeps some in registers.
"""

from collections.abc import Collection
from itertools import accumulate

import torch
from torch.fx import GraphModule, Node

from compile_muon.kernels.call_plan import AUTO_LIMIT, MEMORY_LIMIT

from ..collectives import is_collective, is_wait
from ..joint.move import MOVE_OUT
from ..pipeline import GraphKind, GraphPass, PassContext
from .aliases import base, nbytes

_NEWTON_SCHULZ = torch.ops.muon_zero.newton_schulz.default
#: index of ``memory_limit`` among its arguments
_LIMIT = 8


def saved_by(forward: GraphModule, user_outputs: int, persistent: Collection[int]) -> dict[str, str]:
    """Map activations that ``forward`` makes and saves on the device but does not return to the nodes of their memory,
    by name; without the outputs at the places ``persistent``, which outlive backward."""
    output = forward.graph.output_node()
    values = [value for value in output.args[0] if isinstance(value, Node)]
    returned = {base(value) for value in output.args[0][:user_outputs] if isinstance(value, Node)}
    kept = {output.args[0][place] for place in persistent}
    saved = {
        value.name: base(value) for value in values if value in output.args[0][user_outputs:] and value not in kept
    }
    return {
        name: memory.name
        for name, memory in saved.items()
        if memory.op == "call_function"
        and memory not in returned
        and memory.target is not MOVE_OUT
        and _is_tensor(memory)
    }


class _Live:
    """Bytes in memory at each node, without inputs that stay throughout: at least ``certain``, at most ``most``."""

    def __init__(self, gm: GraphModule, saved: dict[str, str]) -> None:
        place = {node: i for i, node in enumerate(gm.graph.nodes)}
        end = len(place)
        last_read: dict[Node, int] = {}
        for node, i in place.items():
            until = i
            if is_collective(node):  # reads its input until its wait
                until = max([i, *(place[user] for user in node.users if is_wait(user))])
            for source in node.all_input_nodes:
                last_read[base(source)] = max(last_read.get(base(source), -1), until)
        returned = {base(node) for node in gm.graph.output_node().all_input_nodes}
        certain, most = [0] * (end + 1), [0] * (end + 1)
        saved_memory: dict[str, tuple[int, int]] = {}  # by name of the memory, its bytes and the end of its life
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name in saved and _is_tensor(node):
                size, until = saved_memory.get(saved[node.name], (0, 0))
                stays = end if node in returned else last_read.get(node, 0) + 1
                saved_memory[saved[node.name]] = max(size, nbytes(node)), max(until, stays)
        for size, until in saved_memory.values():
            _add(certain, size, 0, until)
            _add(most, size, 0, until)
        for node, i in place.items():
            if node.op != "call_function" or base(node) is not node or not _is_tensor(node):
                continue
            source = node.args[0] if node.args else None
            # An item of a list lives from the op that made the list.
            start = place[source] if isinstance(source, Node) and not _is_tensor(source) else i
            _add(most, nbytes(node), start, end if node in returned else last_read.get(node, i) + 1)
            if node in returned:
                _add(certain, nbytes(node), i, end)
        self.place = place
        self.certain, self.most = list(accumulate(certain[:end])), list(accumulate(most[:end]))


def _add(changes: list[int], size: int, start: int, stop: int) -> None:
    changes[start] += size
    changes[stop] -= size


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _make_room(gm: GraphModule, ctx: PassContext) -> GraphModule:
    calls = gm.graph.find_nodes(op="call_function", target=_NEWTON_SCHULZ)
    calls = [node for node in calls if node.args[_LIMIT] == AUTO_LIMIT]
    if calls or ctx.kind is GraphKind.BACKWARD:
        live = _Live(gm, ctx.saved)
        peak = ctx.left if ctx.kind is GraphKind.STEP else max(live.certain, default=0)
        for node in calls:
            node.update_arg(_LIMIT, max(MEMORY_LIMIT, peak - live.most[live.place[node]]))
        if ctx.kind is GraphKind.BACKWARD:
            ctx.left = peak - live.certain[-1]
    return gm


ROOM = GraphPass(
    "room", _make_room, requires=("lower",), conflicts=("annotate",), kinds=(GraphKind.BACKWARD, GraphKind.STEP)
)
