"""What the collectives of a graph are, and what they send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from .pipeline import tensor_value

__all__ = ["Traffic", "collectives", "measure_traffic"]

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


def collectives(gm: GraphModule) -> Iterator[tuple[Node, str]]:
    """``(node, kind)`` of every collective in graph order."""
    for node in gm.graph.nodes:
        if node.target in _KINDS:
            yield node, _KINDS[node.target]


@dataclass(frozen=True)
class Traffic:
    """What running a graph once sends and computes.

    Args:
        bytes_sent: bytes this rank sends (ring or pairwise algorithms).
        collectives: number of collectives by kind.
        matrices: matrices that this rank puts through Newton-Schulz.
    """

    bytes_sent: int = 0
    collectives: tuple[tuple[str, int], ...] = ()
    matrices: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        counts = dict(self.collectives)
        for kind, count in other.collectives:
            counts[kind] = counts.get(kind, 0) + count
        return Traffic(
            self.bytes_sent + other.bytes_sent, tuple(sorted(counts.items())), self.matrices + other.matrices
        )


def _sent(node: Node, kind: str, rank: int) -> float:
    value = tensor_value(node.args[0])
    nbytes = value.numel() * value.element_size()
    if kind == "all_gather":
        return nbytes * (node.args[1] - 1)
    if kind == "reduce_scatter":
        return nbytes * (node.args[2] - 1) / node.args[2]
    if kind == "all_to_all":
        return sum(size for peer, size in enumerate(node.args[2]) if peer != rank) * value.element_size()
    raise ValueError(f"no formula for {kind}")


def _matrices(node: Node) -> int:
    return sum(tensor_value(x).shape[:-2].numel() for x in node.args[0])


def measure_traffic(gm: GraphModule, *, world: int, rank: int) -> Traffic:
    """Count a lowered graph's collectives, the bytes they send, and its Newton-Schulz matrices."""
    sent = 0.0
    counts: dict[str, int] = {}
    for node, kind in collectives(gm):
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "all_reduce":
            value = tensor_value(node.args[0])
            sent += 2 * value.numel() * value.element_size() * (world - 1) / world
        else:
            sent += _sent(node, kind, rank)
    newton_schulz = gm.graph.find_nodes(op="call_function", target=torch.ops.muon_zero.newton_schulz.default)
    return Traffic(round(sent), tuple(sorted(counts.items())), sum(_matrices(node) for node in newton_schulz))
