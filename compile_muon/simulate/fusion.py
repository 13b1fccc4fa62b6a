"""Group the nodes of a graph into kernels.

:func:`kernels` models CPUs: a pointwise node whose result has one reader, itself pointwise or a reduction,
runs in the kernel of that reader, and its result is never written. So a kernel is a tree that ends in its *root*: the
last pointwise node, a reduction, or any op that runs by itself. A result with several readers is written once and read
by each. Not modelled: Inductor also joins kernels side by side, recomputes cheap results for each reader, and fuses
behind a reduction. In eager code every node is its own kernel.

:func:`gpu_kernels` models kernels on GPUs, their time and memory, by the rules of Inductor's Triton code. A pointwise
result is *inlined* in all its readers, each of which computes it again, unless a reader cannot (a product, a
collective, the output), or it reads more than :data:`_READS` tensors, or takes more than :data:`_OPERATIONS` operations
(``torch._inductor.ir.StorageBox``). Other results are written. Kernels of one iteration space that share memory run as
one: a reduction along rows with the pointwise work before and behind it, and sums along columns with each other, or
beside a large reduction along rows (``mix_order_reduction``). A kernel joins an earlier one only if all its inputs
exist by then. A kernel reads each input once, and does not write what only its own nodes read.
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

_aten = torch.ops.aten
#: ops that read of a table no more than they return
_LOOKUPS = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather)
#: ops without the pointwise tag that a reader inlines, or that pass over memory once
_ALSO_POINTWISE = {
    _aten._to_copy, _aten.full, _aten.full_like, _aten.zeros_like, _aten.ones_like, _aten.arange, _aten.scalar_tensor,
    _aten.constant_pad_nd, torch.ops.prims.iota, *_LOOKUPS,
}  # fmt: skip
#: pointwise ops of several instructions an entry
_FUNCTIONS = {
    _aten.exp, _aten.exp2, _aten.expm1, _aten.log, _aten.log2, _aten.log1p, _aten.tanh, _aten.erf, _aten.sigmoid,
    _aten.sin, _aten.cos, _aten.pow, _aten.gelu, _aten.gelu_backward, _aten.silu, _aten.silu_backward, _aten._softmax,
    _aten._log_softmax, _aten._log_softmax_backward_data,
}  # fmt: skip
#: most tensors that an inlined result reads, with several readers and with one: torch._inductor.config's
#: realize_reads_threshold and realize_acc_reads_threshold
_READS, _READS_OF_ONE = 4, 8
#: most operations of an inlined result, type conversions, constants and loads counted:
#: torch._inductor.config.realize_opcount_threshold
_OPERATIONS = 30
#: torch._inductor.config.max_pointwise_cat_inputs
_CONCATENATED = 8
#: entries and rows from which on sums along columns join a reduction along rows:
#: torch._inductor.scheduler.MixOrderReduction
_MIXED_ENTRIES, _MIXED_ROWS = 5 * 2**20, 4096
_REDUCTIONS = {_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.var_mean, _aten.var, _aten.any, _aten.prod}


def _tagged(node: Node, tag: torch.Tag) -> bool:
    """Return whether `node` calls an op with this tag."""
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


def is_pointwise(node: Node) -> bool:
    """Return whether `node` computes each entry by itself, and writes to no argument."""
    packet = getattr(node.target, "overloadpacket", None)
    return (_tagged(node, torch.Tag.pointwise) or packet in _ALSO_POINTWISE) and not mutated(node)


def _readers(node: Node) -> Iterator[Node]:
    """Yield the nodes that read the result of `node`, seen through views, collectives and the output among them."""
    for user in node.users:
        if user.op == "call_function" and is_free(user) and not is_collective(user) and tensors(user):
            yield from _readers(user)
        else:
            yield user


@dataclass
class Kernel:
    """Nodes that run as one kernel."""

    nodes: list[Node]  # in graph order
    moved: int  # bytes read and written
    results: list[Node]  # nodes whose results are written to memory


def kernels(gm: GraphModule, *, fuses: bool) -> dict[Node, Kernel]:
    """Return each kernel by its root; free nodes (views) are in none. `fuses`: as Inductor does, or not at all."""
    root: dict[Node, Node] = {}
    for node in reversed(gm.graph.nodes):
        if not is_free(node):
            root[node] = node
            readers = list(_readers(node)) if fuses and is_pointwise(node) else []
            if len(readers) == 1 and (is_pointwise(readers[0]) or _tagged(readers[0], torch.Tag.reduction)):
                root[node] = root.get(readers[0], node)
    members: dict[Node, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node in root:
            members[root[node]].append(node)
    return {root: Kernel(nodes, moved_bytes(nodes), [root]) for root, nodes in members.items()}


def moved_bytes(members: list[Node]) -> int:
    """Return the bytes that a kernel of these nodes moves: each input once, and the result of the last node."""
    return _read_bytes(members) + sum(map(nbytes, mutated(members[-1]) or members[-1:]))


def _read_bytes(members: list[Node]) -> int:
    """Return the bytes that a kernel of these nodes reads: each input once, its own intermediates not at all."""
    results = {base(node) for node in members}
    inputs: dict[Node, int] = {}
    for node in members:
        packet = getattr(node.target, "overloadpacket", None)
        for place, source in enumerate(node.all_input_nodes):
            memory = base(source)
            if memory in results:
                continue
            size = min(nbytes(source), nbytes(memory))
            if packet in _LOOKUPS and place == 0:
                size = min(size, nbytes(node))
            inputs[memory] = max(inputs.get(memory, 0), size)
    return sum(inputs.values())


def function_entries(members: list[Node]) -> int:
    """Return for how many entries a kernel of these nodes computes an exponential or the like."""
    functions = [node for node in members if getattr(node.target, "overloadpacket", None) in _FUNCTIONS]
    return sum(tensor_value(node).numel() for node in functions)


# --------------------------------------------------------------------------------------------------- on GPUs


@dataclass(frozen=True)
class _Space:
    """The iteration space of a kernel."""

    entries: int
    columns: int = 0  # entries left by a sum along columns; 0 for any other kernel


@dataclass(eq=False)
class _Group:
    """Results that one kernel writes."""

    space: _Space | None
    place: int  # position among the kernels, from 1
    written: list[Node] = field(default_factory=list)
    reads: set[Node] = field(default_factory=set)  # memory that its nodes read
    rows: bool = False  # some node reduces along rows


def gpu_kernels(gm: GraphModule) -> dict[Node, Kernel]:
    """Return the kernels of a graph on a GPU, each by the node in whose place it runs."""
    inlined = _inlined(gm)
    groups: list[_Group] = []
    group_of: dict[Node, _Group] = {}
    place_of_result: dict[Node, int] = {}  # place of the kernel that makes a node's result, 0 for inputs
    for node in gm.graph.nodes:
        last_place = max((place_of_result[source] for source in node.all_input_nodes), default=0)
        # No kernel that reads a collective's result joins one from ahead of the collective.
        place_of_result[node] = len(groups) if is_wait(node) or is_collective(node) else last_place
        if is_free(node) or node in inlined:
            continue
        space = _space(node)
        sources = {source for member in _members(node, inlined) for source in member.all_input_nodes}
        reads = {base(source) for source in sources if _maker(source) not in inlined}
        group = next((g for g in reversed(groups) if space and _joins(space, reads, last_place, g)), None)
        if group is None:
            group = _Group(space, len(groups) + 1)
            groups.append(group)
        group.written.append(node)
        group.reads |= reads
        group.rows |= space is not None and not space.columns and _reduces(node)
        group_of[node] = group
        place_of_result[node] = group.place
    return {group.written[0]: _kernel(group, inlined, group_of) for group in groups}


def fused_step(gm: GraphModule, ahead: set[Node]) -> dict[Node, Kernel]:
    """Return the kernels of eager step code that GPUs fuse, each by the node in whose place it runs.

    A kernel reads each input once and writes each mutated tensor once. A new one begins at each node in `ahead` and at
    each collective.
    """
    parts: list[list[Node]] = [[]]
    for node in gm.graph.nodes:
        if node in ahead or is_collective(node):
            parts.append([])
        if not is_free(node):
            parts[-1].append(node)
    return {nodes[0]: Kernel(nodes, _moved_in_step(nodes), nodes) for nodes in parts if nodes}


def _moved_in_step(nodes: list[Node]) -> int:
    """Return the bytes of inputs and mutated tensors, each read and written once."""
    results, moved = set[Node](), dict[tuple[str, Node], int]()
    for node in nodes:
        mutated_nodes = mutated(node)
        for way, memory in [*(("read", x) for x in node.all_input_nodes), *(("written", x) for x in mutated_nodes)]:
            if base(memory) not in results:
                moved[way, base(memory)] = max(moved.get((way, base(memory)), 0), nbytes(memory))
        if not mutated_nodes:
            results |= {node, *(user for user in node.users if is_free(user))}
    return sum(moved.values())


def _inlined(gm: GraphModule) -> set[Node]:
    """Return the pointwise nodes whose results are never written to memory."""
    inlined: set[Node] = set()
    work: dict[Node, tuple[set[Node], int]] = {}
    for node in gm.graph.nodes:
        if is_free(node) or not _computes_entries(node):
            continue
        reads, count = set[Node](), 1 + sum(isinstance(argument, int | float) for argument in node.args)
        for source in node.all_input_nodes:
            maker = _maker(source)
            if maker in inlined:
                reads |= work[maker][0]
                count += work[maker][1]
            else:
                reads.add(base(source))
        work[node] = reads, count
        readers = list(_readers(node))
        shared = len(readers) > 1
        small = len(reads) <= (_READS if shared else _READS_OF_ONE) and count + len(reads) <= _OPERATIONS
        if small and readers and all(_computes_entries(reader) or _reduces(reader) for reader in readers):
            inlined.add(node)
    return inlined


def _computes_entries(node: Node) -> bool:
    if getattr(node.target, "overloadpacket", None) is _aten.cat:
        return len(node.all_input_nodes) <= _CONCATENATED and all(is_pointwise(reader) for reader in _readers(node))
    return is_pointwise(node)


def _reduces(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _REDUCTIONS or _tagged(node, torch.Tag.reduction)


def _maker(node: Node) -> Node:
    """Return the node that computed the value of `node`, seen through views."""
    while node.op == "call_function" and is_free(node) and base(node) is not node:
        node = base(node)
    return node


def _space(node: Node) -> _Space | None:
    """Return the iteration space of a node; None if Inductor generates no kernel for it."""
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
    """Return whether a node can join `group`; `given` is the place of the last kernel that makes an input of it."""
    if group.space is None or given > group.place:
        return False
    write_set = {base(node) for node in group.written} | set(group.written)
    if space == group.space:
        return not reads.isdisjoint(group.reads | write_set)
    rows = space.entries // space.columns if space.columns else 0
    large = space.entries >= _MIXED_ENTRIES and rows >= max(_MIXED_ROWS, 2 * space.columns)
    mixed = group.rows and large and group.space == _Space(space.entries) and reads.isdisjoint(write_set)
    return mixed and not reads.isdisjoint(group.reads)


def _members(node: Node, inlined: set[Node]) -> Iterator[Node]:
    """Yield the nodes inlined in `node`, then `node`."""
    for source in node.all_input_nodes:
        if (maker := _maker(source)) in inlined:
            yield from _members(maker, inlined)
    yield node


def _kernel(group: _Group, inlined: set[Node], group_of: dict[Node, _Group]) -> Kernel:
    """Return the kernel of a group; only results that another kernel reads, or the graph returns, are written."""

    def outlives(node: Node) -> bool:
        readers = _readers(node)
        return any(outlives(reader) if reader in inlined else group_of.get(reader) is not group for reader in readers)

    nodes = list(dict.fromkeys(member for node in group.written for member in _members(node, inlined)))
    results = [node for node in group.written if mutated(node) or outlives(node)]
    written = [memory for node in results for memory in mutated(node) or [node]]
    return Kernel(nodes, _read_bytes(nodes) + sum(map(nbytes, written)), results)
