"""Which nodes run as one kernel.

Under Inductor: a pointwise node whose result has one reader, itself pointwise or a reduction, runs in that reader's
kernel, and its result is never written. So a kernel is a tree that ends in its *root*: the last pointwise node, a
reduction, or whatever else runs by itself. What several nodes read is written once and read by each. Inductor also
joins kernels side by side, recomputes cheap results for each of their readers, and goes on behind a reduction: for the
time of kernels on GPUs :mod:`.gpu_kernels` has that, and none of it is modelled of CPUs and of memory. Under "eager"
every node is a kernel of its own.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from compile_muon.passes.lowering.aliases import base, is_free, mutated, nbytes
from compile_muon.passes.pipeline import tensor_value

__all__ = ["function_entries", "is_pointwise", "kernels", "moved_bytes", "read_bytes", "tagged"]

_aten = torch.ops.aten
#: of a table they read no more than they return
_LOOKUPS = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather)
#: made in registers by whatever reads them, or one pass over memory like pointwise ops, though they are not so tagged
_ALSO_POINTWISE = {
    _aten._to_copy,
    _aten.full,
    _aten.full_like,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.arange,
    _aten.scalar_tensor,
    _aten.constant_pad_nd,
    torch.ops.prims.iota,
    *_LOOKUPS,
}
#: of a few instructions an entry, where other pointwise ops have one
_FUNCTIONS = {
    _aten.exp,
    _aten.exp2,
    _aten.expm1,
    _aten.log,
    _aten.log2,
    _aten.log1p,
    _aten.tanh,
    _aten.erf,
    _aten.sigmoid,
    _aten.sin,
    _aten.cos,
    _aten.pow,
    _aten.gelu,
    _aten.gelu_backward,
    _aten.silu,
    _aten.silu_backward,
    _aten._softmax,
    _aten._log_softmax,
    _aten._log_softmax_backward_data,
}


def tagged(node: Node, tag: torch.Tag) -> bool:
    """Whether ``node`` calls an op with this tag."""
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


def is_pointwise(node: Node) -> bool:
    """Whether ``node`` computes each entry by itself, and writes to no argument."""
    packet = getattr(node.target, "overloadpacket", None)
    return (tagged(node, torch.Tag.pointwise) or packet in _ALSO_POINTWISE) and not mutated(node)


def _readers(node: Node) -> list[Node]:
    """Nodes that read what ``node`` made, seen through views."""
    found, pending = [], [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "call_function" and is_free(user):
                pending.append(user)
            else:
                found.append(user)
    return found


def kernels(gm: GraphModule, codegen: str) -> dict[Node, list[Node]]:
    """Nodes of each kernel by its root, in graph order; nodes that are free are in none.

    Args:
        codegen: "inductor" or "eager".
    """
    root: dict[Node, Node] = {}
    for node in reversed(gm.graph.nodes):
        if is_free(node):
            continue
        root[node] = node
        if codegen != "eager" and is_pointwise(node):
            readers = _readers(node)
            if len(readers) == 1 and (is_pointwise(readers[0]) or tagged(readers[0], torch.Tag.reduction)):
                root[node] = root.get(readers[0], node)
    found: dict[Node, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node in root:
            found[root[node]].append(node)
    return dict(found)


def moved_bytes(members: list[Node]) -> int:
    """What a kernel of these nodes reads and writes: each input once, and the result of the last."""
    last = members[-1]
    written = mutated(last)
    return read_bytes(members) + (sum(nbytes(node) for node in written) if written else nbytes(last))


def read_bytes(members: list[Node]) -> int:
    """What a kernel of these nodes reads, each input once: of what they make themselves, nothing."""
    own = {base(node) for node in members}
    inputs: dict[Node, int] = {}
    for node in members:
        packet = getattr(node.target, "overloadpacket", None)
        for place, source in enumerate(node.all_input_nodes):
            memory = base(source)
            if memory in own:
                continue
            size = min(nbytes(source), nbytes(memory))
            if packet in _LOOKUPS and place == 0:
                size = min(size, nbytes(node))
            inputs[memory] = max(inputs.get(memory, 0), size)
    return sum(inputs.values())


def function_entries(members: list[Node]) -> int:
    """Of how many entries a kernel of these nodes takes an exponential or the like."""
    functions = [node for node in members if getattr(node.target, "overloadpacket", None) in _FUNCTIONS]
    return sum(tensor_value(node).numel() for node in functions)
