"""The collectives of a graph, and the bytes that they send."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .language.layout import Axis
from .language.work import Category, work_of
from .pipeline import tensor_value
from .torch_private import expected_size, group_named

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
    """Whether ``node`` starts an all-to-all that sends to one rank only, as in a ring."""
    return (
        node.target is _c10d.all_to_all_single.default
        and len([n for n in node.args[2] if isinstance(n, Node) or n != 0]) == 1
    )


def collectives(gm: GraphModule) -> Iterator[tuple[Node, str]]:
    """Yield ``(node, kind)`` of every collective, in graph order."""
    for node in gm.graph.nodes:
        if is_collective(node):
            work = work_of(node)
            # With ``Layout.pairwise`` a reduce-scatter is an all-to-all and a local sum.
            reduces = work is not None and work.category is Category.REDUCE and _KINDS[node.target] == "all_to_all"
            yield node, "reduce_scatter" if reduces else _KINDS[node.target]


@dataclass(frozen=True)
class Traffic:
    """Bytes, collectives and Newton-Schulz calls of one run of a graph, on this rank."""

    bytes_sent: int = 0  # by ring or pairwise algorithms
    collectives: tuple[tuple[str, int], ...] = ()  # number by kind
    matrices: int = 0  # orthogonalized by this rank
    by_axis: tuple[tuple[str, int], ...] = ()  # ``bytes_sent`` by mesh axis
    calls: int = 0  # of Newton-Schulz, each with many matrices

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            _sums(self.collectives, other.collectives),
            self.matrices + other.matrices,
            _sums(self.by_axis, other.by_axis),
            self.calls + other.calls,
        )


def _sums(left: tuple[tuple[str, int], ...], right: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    counts = Counter(dict(left))
    counts.update(dict(right))
    return tuple(sorted(counts.items()))


def _size(size: Any) -> int:
    """Return a split or dimension as a number; 0 if it depends on data, as with tokens sent to experts."""
    return expected_size(size.meta["val"] if isinstance(size, Node) else size)


def _sent(node: Node, kind: str, axis: Axis) -> float:
    if kind == "all_to_all":
        return _beyond(node, node.args[2], axis)
    value = tensor_value(node.args[0])
    others = math.prod(map(_size, value.shape)) * value.element_size() * (axis.size - 1)
    return {"all_gather": others, "reduce_scatter": others / axis.size, "all_reduce": 2 * others / axis.size}[kind]


def _beyond(node: Node, splits: Sequence[Any], axis: Axis) -> int:
    """Bytes of the ``splits`` of an all-to-all that are other ranks'."""
    value = tensor_value(node.args[0])
    rows = sum(_size(size) for peer, size in enumerate(splits) if peer != axis.index)
    return rows * math.prod(map(_size, value.shape[1:])) * value.element_size()


def axis_of_group(name: str) -> Axis:
    """Return the axis of a group that no parameter uses, for collectives of the model's own."""
    group = group_named(name)
    desc = group.group_desc
    # DeviceMesh describes a group as ``mesh_<dim>``, this library as ``muon_zero <purpose>``, such as `sequence`.
    axis_name = next(
        (desc.removeprefix(prefix) for prefix in ("mesh_", "muon_zero ") if desc.startswith(prefix)), "other"
    )
    return Axis(axis_name, group.size(), group.rank(), name)


def bytes_sent(node: Node, kind: str, axis: Axis | None = None) -> int:
    """Bytes that this rank sends in one collective, see :class:`Traffic`; ``axis`` defaults to that of its group."""
    return round(_sent(node, kind, axis_of_group(node.args[-1]) if axis is None else axis))


def bytes_received(node: Node, axis: Axis) -> int:
    """Bytes that this rank receives in an all-to-all; the splits in and out may differ."""
    return _beyond(node, node.args[1], axis)


def matrices(node: Node) -> int:
    """Number of matrices in one Newton-Schulz call."""
    return sum(tensor_value(x).shape[:-2].numel() for x in node.args[0])


def measure_traffic(gm: GraphModule, axes: Iterable[Axis]) -> Traffic:
    """Count a lowered graph's collectives, the bytes they send along ``axes`` and in other groups, and its matrices."""
    axis_by_group = {group: axis for axis in axes for group in axis.groups}
    bytes_by_axis: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for node, kind in collectives(gm):
        name = node.args[-1]  # the group comes last in each of them
        axis = axis_by_group[name] if name in axis_by_group else axis_of_group(name)
        counts[kind] += 1
        bytes_by_axis[axis.name] += _sent(node, kind, axis)
    newton_schulz = gm.graph.find_nodes(op="call_function", target=torch.ops.muon_zero.newton_schulz.default)
    return Traffic(
        round(sum(bytes_by_axis.values())),
        tuple(sorted(counts.items())),
        sum(matrices(node) for node in newton_schulz),
        tuple(sorted((name, round(nbytes)) for name, nbytes in bytes_by_axis.items())),
        len(newton_schulz),
    )
