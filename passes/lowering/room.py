"""What a Newton-Schulz call may hold beside its inputs and results where that is left to us (``AUTO_LIMIT``).

Backward holds most when it begins, with all that forward has saved. Calls stand behind it, when that is gone, and what
was there is room that raises no peak. A matrix more in a call is a matrix less in another, which has launches of its
own for every product.

Both sides of the difference are bounds that keep the room real. Certain to be in memory are what forward saved, to its
last reader, and what the graph returns, from its maker on; their most is a peak that backward has. Taken, where a call
stands, is everything made and still read behind it, though code generation keeps some of that in registers.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.fx import GraphModule, Node

from compile_muon.kernels.call_plan import AUTO_LIMIT, MEMORY_LIMIT

from ..collectives import is_collective, is_wait
from ..pipeline import GraphKind, GraphPass, PassContext
from .aliases import base, nbytes

__all__ = ["ROOM", "saved_by"]

_NEWTON_SCHULZ = torch.ops.muon_zero.newton_schulz.default
#: place of ``memory_limit`` among its arguments
_LIMIT = 8


def saved_by(forward: GraphModule, user_outputs: int) -> dict[str, str]:
    """What ``forward`` saves that it made and that is in no result of it: names of values, to those of their memory."""
    output = forward.graph.output_node()
    values = [value for value in output.args[0] if isinstance(value, Node)]
    returned = {base(value) for value in output.args[0][:user_outputs] if isinstance(value, Node)}
    found = {value.name: base(value) for value in values if value in output.args[0][user_outputs:]}
    return {
        name: memory.name
        for name, memory in found.items()
        if memory.op == "call_function" and memory not in returned and _is_tensor(memory)
    }


class _Live:
    """Bytes at each node of a graph: how much certainly is, and how much at most, beside what is there all the time."""

    def __init__(self, gm: GraphModule, saved: dict[str, str]) -> None:
        place = {node: i for i, node in enumerate(gm.graph.nodes)}
        end = len(place)
        last: dict[Node, int] = {}
        for node, i in place.items():
            until = i
            if is_collective(node):  # which reads what it sends until it is waited for
                until = max([i, *(place[user] for user in node.users if is_wait(user))])
            for source in node.all_input_nodes:
                last[base(source)] = max(last.get(base(source), -1), until)
        kept = {base(node) for node in gm.graph.output_node().all_input_nodes}
        certain, most = [0] * (end + 1), [0] * (end + 1)
        groups: dict[str, tuple[int, int]] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name in saved and _is_tensor(node):
                size, until = groups.get(saved[node.name], (0, 0))
                stays = end if node in kept else last.get(node, 0) + 1
                groups[saved[node.name]] = max(size, nbytes(node)), max(until, stays)
        for size, until in groups.values():
            _add(certain, size, 0, until)
            _add(most, size, 0, until)
        for node, i in place.items():
            if node.op != "call_function" or base(node) is not node or not _is_tensor(node):
                continue
            source = node.args[0] if node.args else None
            made = place[source] if isinstance(source, Node) and not _is_tensor(source) else i  # one of several
            _add(most, nbytes(node), made, end if node in kept else last.get(node, i) + 1)
            if node in kept:
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
