"""Which nodes run as one kernel.

Under Inductor: a pointwise node whose result has one reader, itself pointwise or a reduction, runs in that reader's
kernel, and its result is never written. So a kernel is a tree that ends in its *root*: the last pointwise node, a
reduction, or whatever else runs by itself. What several nodes read is written once and read by each. Inductor also
joins kernels side by side, recomputes cheap results for each of their readers, and goes on behind a reduction: none of
it is modelled of CPUs and of memory. Under "eager" every node is a kernel of its own.

For the time of kernels on GPUs :func:`gpu_kernels` goes by the rules that Inductor writes Triton's kernels by. A
pointwise result is *inlined* in all that read it, and computed again by each, unless one of these cannot compute it
(a product, a collective, what is returned), it reads more than so many tensors, or takes more than so many operations
(:data:`_READS`, :data:`_OPERATIONS`; ``torch._inductor.ir.StorageBox``). What is left is written, and kernels of one
iteration space that share memory run as one: a reduction along rows with the pointwise work in front of it and behind
it, and sums along columns with each other, or beside a large one along rows (``mix_order_reduction``). A kernel joins
an earlier one only where all that it reads is there by then. What a kernel reads it reads once, and what only its own
nodes read it does not write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from compile_muon.passes.collectives import is_collective, is_wait
from compile_muon.passes.lowering.aliases import base, is_free, mutated, nbytes, tensors
from compile_muon.passes.pipeline import tensor_value

__all__ = ["Kernel", "function_entries", "fused_step", "gpu_kernels", "kernels", "moved_bytes"]

_aten = torch.ops.aten
#: of a table they read no more than they return
_LOOKUPS = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather)
#: made in registers by whatever reads them, or one pass over memory like pointwise ops, though they are not so tagged
_ALSO_POINTWISE = {
    _aten._to_copy, _aten.full, _aten.full_like, _aten.zeros_like, _aten.ones_like, _aten.arange, _aten.scalar_tensor,
    _aten.constant_pad_nd, torch.ops.prims.iota, *_LOOKUPS,
}  # fmt: skip
#: of a few instructions an entry, where other pointwise ops have one
_FUNCTIONS = {
    _aten.exp, _aten.exp2, _aten.expm1, _aten.log, _aten.log2, _aten.log1p, _aten.tanh, _aten.erf, _aten.sigmoid,
    _aten.sin, _aten.cos, _aten.pow, _aten.gelu, _aten.gelu_backward, _aten.silu, _aten.silu_backward, _aten._softmax,
    _aten._log_softmax, _aten._log_softmax_backward_data,
}  # fmt: skip
#: torch._inductor.config.realize_reads_threshold, of what several read, and realize_acc_reads_threshold
_READS, _READS_OF_ONE = 4, 8
#: torch._inductor.config.realize_opcount_threshold; type conversions, constants and loads count
_OPERATIONS = 30
#: torch._inductor.config.max_pointwise_cat_inputs
_CONCATENATED = 8
#: torch._inductor.scheduler.MixOrderReduction: entries and rows from which on sums along columns run beside rows
_MIXED_ENTRIES, _MIXED_ROWS = 5 * 2**20, 4096
_REDUCTIONS = {_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.var_mean, _aten.var, _aten.any, _aten.prod}


def _tagged(node: Node, tag: torch.Tag) -> bool:
    """Whether ``node`` calls an op with this tag."""
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


def _is_pointwise(node: Node) -> bool:
    """Whether ``node`` computes each entry by itself, and writes to no argument."""
    packet = getattr(node.target, "overloadpacket", None)
    return (_tagged(node, torch.Tag.pointwise) or packet in _ALSO_POINTWISE) and not mutated(node)


def _users(node: Node) -> list[Node]:
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
        if codegen != "eager" and _is_pointwise(node):
            readers = _users(node)
            if len(readers) == 1 and (_is_pointwise(readers[0]) or _tagged(readers[0], torch.Tag.reduction)):
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
    return _read_bytes(members) + (sum(nbytes(node) for node in written) if written else nbytes(last))


def _read_bytes(members: list[Node]) -> int:
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


# --------------------------------------------------------------------------------------------------- on GPUs


@dataclass
class Kernel:
    """Nodes that run together.

    Args:
        nodes: in graph order.
        moved: bytes that it reads and writes.
    """

    nodes: list[Node] = field(default_factory=list)
    moved: int = 0


@dataclass(frozen=True)
class _Space:
    """What a kernel iterates over: entries, and how many are left of them where columns are summed up (0: none are)."""

    entries: int
    columns: int = 0


@dataclass(eq=False)
class _Group:
    space: _Space | None
    place: int
    written: list[Node] = field(default_factory=list)
    reads: set[Node] = field(default_factory=set)
    rows: bool = False


def gpu_kernels(gm: GraphModule) -> dict[Node, Kernel]:
    """Kernels by the node that each runs in place of."""
    inlined = _inlined(gm)
    groups: list[_Group] = []
    of: dict[Node, _Group] = {}
    there: dict[Node, int] = {}  # how many kernels have run when a node's result is there
    for node in gm.graph.nodes:
        given = max((there[source] for source in node.all_input_nodes), default=0)
        there[node] = len(groups) if is_wait(node) or is_collective(node) else given
        if is_free(node) or node in inlined:
            continue
        space = _space(node)
        sources = {source for member in _members(node, inlined) for source in member.all_input_nodes}
        reads = {base(source) for source in sources if _maker(source) not in inlined}
        group = next((g for g in reversed(groups) if space and _joins(space, reads, given, g)), None)
        if group is None:
            group = _Group(space, len(groups) + 1)
            groups.append(group)
        group.written.append(node)
        group.reads |= reads
        group.rows |= space is not None and not space.columns and _reduces(node)
        of[node] = group
        there[node] = group.place
    outside = _outside(gm, inlined, of)
    return {group.written[0]: _kernel(group, inlined, outside) for group in groups}


def fused_step(gm: GraphModule, ahead: set[Node]) -> dict[Node, Kernel]:
    """Kernels of eager code that GPUs run as one: each input read once, and what is written to them written once.

    Args:
        ahead: nodes that a new kernel begins with.
    """
    found: dict[Node, Kernel] = {}
    kernel, own, read, written = Kernel(), set[Node](), dict[Node, int](), dict[Node, int]()
    for node in gm.graph.nodes:
        if node in ahead or is_collective(node) or not found:
            kernel, own, read, written = Kernel(), set(), {}, {}
        if is_free(node):
            continue
        if not kernel.nodes:
            found[node] = kernel
        kernel.nodes.append(node)
        changed = {base(target): nbytes(target) for target in mutated(node)}
        for source in node.all_input_nodes:
            if base(source) not in own:
                read[base(source)] = max(read.get(base(source), 0), nbytes(source))
        for target, size in changed.items():
            if target not in own:
                written[target] = max(written.get(target, 0), size)
        if not changed:
            own |= {node, *(user for user in node.users if is_free(user))}
        kernel.moved = sum(read.values()) + sum(written.values())
    return found


def _inlined(gm: GraphModule) -> set[Node]:
    """Pointwise nodes whose results are in no memory."""
    inlined: set[Node] = set()
    work: dict[Node, tuple[set[Node], int]] = {}
    for node in gm.graph.nodes:
        if is_free(node) or not _computes_entries(node):
            continue
        reads, count = set[Node](), 1 + sum(isinstance(argument, int | float) for argument in node.args)
        for source in node.all_input_nodes:
            made = _maker(source)
            if made in inlined:
                reads |= work[made][0]
                count += work[made][1]
            else:
                reads.add(base(source))
        work[node] = reads, count
        readers = list(_readers(node))
        several = len(readers) > 1
        small = len(reads) <= (_READS if several else _READS_OF_ONE) and count + len(reads) <= _OPERATIONS
        if small and readers and all(_computes_entries(reader) or _reduces(reader) for reader in readers):
            inlined.add(node)
    return inlined


def _computes_entries(node: Node) -> bool:
    if getattr(node.target, "overloadpacket", None) is _aten.cat:
        return len(node.all_input_nodes) <= _CONCATENATED and all(_is_pointwise(reader) for reader in _readers(node))
    return _is_pointwise(node)


def _reduces(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _REDUCTIONS or _tagged(node, torch.Tag.reduction)


def _maker(node: Node) -> Node:
    """Of what ``node`` shows, seen through views."""
    while node.op == "call_function" and is_free(node) and base(node) is not node:
        node = base(node)
    return node


def _readers(node: Node) -> Iterator[Node]:
    """Nodes that read what ``node`` made, seen through views: collectives and the end of the graph among them."""
    for user in node.users:
        if user.op == "call_function" and is_free(user) and not is_collective(user) and tensors(user):
            yield from _readers(user)
        else:
            yield user


def _space(node: Node) -> _Space | None:
    """None for what is no kernel of Inductor's own."""
    if _computes_entries(node):
        return _Space(sum(value.numel() for value in tensors(node)))
    if not _reduces(node):
        return None
    value = node.all_input_nodes[0].meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else range(value.ndim)
    along_rows = not value.ndim or value.ndim - 1 in {dim % value.ndim for dim in dims}
    return _Space(value.numel(), 0 if along_rows else max(tensors(node)[0].numel(), 1))


def _joins(space: _Space, reads: set[Node], given: int, group: _Group) -> bool:
    if group.space is None or given > group.place:
        return False
    written = {base(node) for node in group.written} | set(group.written)
    if space == group.space:
        return not reads.isdisjoint(group.reads | written)
    rows = space.entries // space.columns if space.columns else 0
    large = space.entries >= _MIXED_ENTRIES and rows >= max(_MIXED_ROWS, 2 * space.columns)
    mixed = group.rows and large and group.space == _Space(space.entries) and reads.isdisjoint(written)
    return mixed and not reads.isdisjoint(group.reads)


def _members(node: Node, inlined: set[Node]) -> Iterator[Node]:
    """``node``, behind what is inlined in it."""
    for source in node.all_input_nodes:
        if (made := _maker(source)) in inlined:
            yield from _members(made, inlined)
    yield node


def _outside(gm: GraphModule, inlined: set[Node], of: dict[Node, _Group]) -> set[Node]:
    """What is read by another kernel than the one that makes it, or returned."""
    found: set[Node] = set()
    for node, group in of.items():
        pending = list(_readers(node))
        while pending:
            reader = pending.pop()
            if reader in inlined:
                pending += _readers(reader)
            elif of.get(reader) is not group:
                found.add(node)
                break
    return found


def _kernel(group: _Group, inlined: set[Node], outside: set[Node]) -> Kernel:
    nodes = list(dict.fromkeys(member for node in group.written for member in _members(node, inlined)))
    results = 0
    for node in group.written:
        changed = mutated(node)
        results += sum(map(nbytes, changed)) if changed else nbytes(node) * (node in outside)
    return Kernel(nodes, _read_bytes(nodes) + results)
