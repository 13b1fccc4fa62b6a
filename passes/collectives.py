"""What the collectives of a graph are, and what they send."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .language.layout import Axis
from .language.work import Category, work_of
from .pipeline import tensor_value
from .torch_private import expected_size, group_named

__all__ = [
    "Traffic",
    "axis_of_group",
    "bytes_received",
    "bytes_sent",
    "collectives",
    "is_collective",
    "is_hop",
    "is_wait",
    "matrices",
    "measure_traffic",
]

_c10d = torch.ops._c10d_functional
_KINDS = {
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.all_gather_into_tensor_out.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_reduce_.default: "all_reduce",
    _c10d.all_to_all_single.default: "all_to_all",
}
_WAITS = (_c10d.wait_tensor.default, torch.ops.c10d_functional.wait_tensor.default)


def is_wait(node: Node) -> bool:
    """Whether ``node`` waits for a collective."""
    return node.target in _WAITS


def is_collective(node: Node) -> bool:
    """Whether ``node`` starts a collective."""
    return node.target in _KINDS


def is_hop(node: Node) -> bool:
    """Whether ``node`` starts to send all it has to one rank, as in a ring."""
    return (
        node.target is _c10d.all_to_all_single.default
        and len([n for n in node.args[2] if isinstance(n, Node) or n != 0]) == 1
    )


def collectives(gm: GraphModule) -> Iterator[tuple[Node, str]]:
    """``(node, kind)`` of every collective in graph order."""
    for node in gm.graph.nodes:
        if is_collective(node):
            work = work_of(node)
            # Of all-to-alls and a local sum, where that is what the backend is best at.
            reduces = work is not None and work.category is Category.REDUCE and _KINDS[node.target] == "all_to_all"
            yield node, "reduce_scatter" if reduces else _KINDS[node.target]


@dataclass(frozen=True)
class Traffic:
    """What running a graph once sends and computes.

    Args:
        bytes_sent: bytes this rank sends (ring or pairwise algorithms).
        collectives: number of collectives by kind.
        matrices: matrices that this rank puts through Newton-Schulz.
        by_axis: ``bytes_sent`` by axis of the mesh.
        calls: of Newton-Schulz, each of many matrices.
    """

    bytes_sent: int = 0
    collectives: tuple[tuple[str, int], ...] = ()
    matrices: int = 0
    by_axis: tuple[tuple[str, int], ...] = ()
    calls: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            _sums(self.collectives, other.collectives),
            self.matrices + other.matrices,
            _sums(self.by_axis, other.by_axis),
            self.calls + other.calls,
        )


def _sums(left: tuple[tuple[str, int], ...], right: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    counts = dict(left)
    for name, number in right:
        counts[name] = counts.get(name, 0) + number
    return tuple(sorted(counts.items()))


def _size(size: Any) -> int:
    """Of a split or a dimension; 0 where only the data say, as of tokens that a model sends to its experts."""
    return expected_size(size.meta["val"] if isinstance(size, Node) else size)


def _sent(node: Node, kind: str, axis: Axis) -> float:
    value = tensor_value(node.args[0])
    if kind == "all_to_all":
        sizes = [_size(size) for peer, size in enumerate(node.args[2]) if peer != axis.index]
        return sum(sizes) * math.prod(_size(size) for size in value.shape[1:]) * value.element_size()
    nbytes = math.prod(_size(size) for size in value.shape) * value.element_size()
    if kind == "all_gather":
        return nbytes * (axis.size - 1)
    if kind == "reduce_scatter":
        return nbytes * (axis.size - 1) / axis.size
    if kind == "all_reduce":
        return 2 * nbytes * (axis.size - 1) / axis.size
    raise ValueError(f"no formula for {kind}")


def axis_of_group(name: str) -> Axis:
    """Of a collective in a group that no parameter names, as the model makes itself."""
    group = group_named(name)
    desc = group.group_desc
    # That of a dimension of a mesh is called by it, and one of ours by its purpose: `sequence`.
    called = next((desc.removeprefix(own) for own in ("mesh_", "muon_zero ") if desc.startswith(own)), "other")
    return Axis(called, group.size(), group.rank(), name)


def bytes_sent(node: Node, kind: str, axis: Axis | None = None) -> int:
    """What this rank sends in one collective, as in :class:`Traffic`.

    Args:
        axis: of its group; default: asked of the group itself.
    """
    return round(_sent(node, kind, axis_of_group(node.args[-1]) if axis is None else axis))


def bytes_received(node: Node, axis: Axis) -> int:
    """What others send this rank in an all-to-all, of which it may take more than it gives."""
    sizes = [_size(size) for peer, size in enumerate(node.args[1]) if peer != axis.index]
    value = tensor_value(node.args[0])
    return sum(sizes) * math.prod(_size(size) for size in value.shape[1:]) * value.element_size()


def matrices(node: Node) -> int:
    """How many go through one Newton-Schulz call."""
    return sum(tensor_value(x).shape[:-2].numel() for x in node.args[0])


def measure_traffic(gm: GraphModule, axes: Iterable[Axis]) -> Traffic:
    """Count a lowered graph's collectives, the bytes they send, and its Newton-Schulz matrices.

    Args:
        axes: of the parameters whose collectives these are; all others count as axis "other".
    """
    known = {group: axis for axis in axes for group in axis.groups}
    sent: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for node, kind in collectives(gm):
        name = node.args[-1]  # the group comes last in each of them
        axis = known[name] if name in known else axis_of_group(name)
        counts[kind] += 1
        sent[axis.name] += _sent(node, kind, axis)
    newton_schulz = gm.graph.find_nodes(op="call_function", target=torch.ops.muon_zero.newton_schulz.default)
    return Traffic(
        round(sum(sent.values())),
        tuple(sorted(counts.items())),
        sum(matrices(node) for node in newton_schulz),
        tuple(sorted((name, round(nbytes)) for name, nbytes in sent.items())),
        len(newton_schulz),
    )
