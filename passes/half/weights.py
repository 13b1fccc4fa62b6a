"""``unshard`` markers: full weights, resident or gathered."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..edit import replace
from ..exchange import transfers
from ..inline import inline
from ..joint.recompute import is_view_or_cast
from ..markers import Unshard
from ..spec import ParamSpec
from .buckets import group_neighbours

__all__ = ["lower_weights"]


def lower_weights(gm: GraphModule, cap_bytes: int) -> None:
    """Replace every ``unshard`` marker of ``gm``; gathers send up to ``cap_bytes`` of full weights each."""
    output = gm.graph.output_node()
    gathered = []
    for read in Unshard.all(gm):
        if read.spec.layout.gathered:
            gathered.append(read)
        else:
            _lower_resident(gm, read, copy=_escapes(read.node, output))
    groups = group_neighbours([read.spec for read in gathered], lambda spec: spec.compute_dtype, cap_bytes)
    _lower_gathers(gm, [[gathered[i] for i in group] for group in groups])


def _escapes(node: Node, output: Node) -> bool:
    """Whether the graph returns ``node`` or a view of it."""
    return any(user is output or (is_view_or_cast(user) and _escapes(user, output)) for user in node.users)


def _lower_resident(gm: GraphModule, read: Unshard, *, copy: bool) -> None:
    def weight(shard: torch.Tensor, replica: torch.Tensor | None = None) -> list[torch.Tensor]:
        full = transfers.unshard(shard, replica, read.spec)
        # A weight handed out of the graph must not change when the resident copy is refreshed.
        return [full.clone() if copy else full]

    inputs = [read.shard] if read.replica is None else [read.shard, read.replica]
    replace(gm, read.node, inline(gm, read.node, weight, inputs)[0])


def _lower_gathers(gm: GraphModule, groups: list[list[Unshard]]) -> None:
    """Stage 3: each group is gathered while the one before it is in use (prefetch by one group)."""
    firsts = [group[0].node for group in groups]
    handles = []
    for number, group in enumerate(groups):

        def start(*slices: torch.Tensor, group: list[Unshard] = group) -> list[torch.Tensor]:
            return [transfers.gather_start(slices, _specs(group))]

        # Shards and resident slices are graph inputs, so a gather can start anywhere.
        at = firsts[max(0, number - 1)]
        handles += inline(gm, at, start, [read.shard if read.replica is None else read.replica for read in group])
    for group, handle in zip(groups, handles, strict=True):

        def finish(handle: torch.Tensor, group: list[Unshard] = group) -> list[torch.Tensor]:
            return transfers.gather_finish(handle, _specs(group))

        for read, full in zip(group, inline(gm, group[0].node, finish, [handle]), strict=True):
            replace(gm, read.node, full)


def _specs(group: list[Unshard]) -> list[ParamSpec]:
    return [read.spec for read in group]
