"""Lowering of ``unshard`` markers: resident weights, or gathers."""

import torch
from torch.fx import GraphModule, Node

from ..edit import inline, replace
from ..exchange import transfers
from ..joint.recompute import is_view_or_cast
from ..language.work import Category, Work
from ..markers import Unshard
from ..pipeline import PassContext
from .buckets import group_neighbours, weight_bytes
from .refresh import note_resident


def lower_weights(gm: GraphModule, ctx: PassContext) -> None:
    """Replace every ``unshard`` marker of ``gm``; a gather makes at most ``bucket_bytes`` of full weights."""
    output = gm.graph.output_node()
    gathered = []
    for unshard in Unshard.all(gm):
        if unshard.resident is not None:
            note_resident(unshard.resident, unshard.state)
        if unshard.spec.layout.gathered or unshard.spec.on_host:
            gathered.append(unshard)
        else:
            cast = unshard.resident is None and unshard.spec.dtype != unshard.spec.compute_dtype  # memory of its own
            _lower_resident(gm, unshard, copy=not cast and _escapes(unshard.node, output))
    groups = group_neighbours(
        [unshard.spec for unshard in gathered], lambda spec: spec.compute_dtype, ctx.costs, ctx.options.bucket_bytes
    )
    for number, group in enumerate(groups):
        unshards = [gathered[i] for i in group]
        _gather(
            gm, unshards, Work(Category.GATHER, number, nbytes=sum(weight_bytes(unshard.spec) for unshard in unshards))
        )


def _escapes(node: Node, output: Node) -> bool:
    """Whether the graph returns ``node`` or a view of it."""
    return any(user is output or (is_view_or_cast(user) and _escapes(user, output)) for user in node.users)


def _lower_resident(gm: GraphModule, unshard: Unshard, *, copy: bool) -> None:
    def weight(shard: torch.Tensor, resident: torch.Tensor | None = None) -> list[torch.Tensor]:
        full = transfers.unshard(shard, resident, unshard.spec)
        # A weight handed out of the graph must not change when the resident copy is refreshed.
        return [full.clone() if copy else full]

    inputs = [unshard.shard] if unshard.resident is None else [unshard.shard, unshard.resident]
    replace(gm, unshard.node, inline(gm, unshard.node, weight, inputs)[0])


def _gather(gm: GraphModule, unshards: list[Unshard], work: Work) -> None:
    """Lower one bucket ahead of its first read: an all-gather, or of whole weights a copy from host memory."""
    specs = [unshard.spec for unshard in unshards]
    inputs = [unshard.shard if unshard.resident is None else unshard.resident for unshard in unshards]
    weights = inline(gm, unshards[0].node, lambda *slices: transfers.gather(slices, specs), inputs, work)
    for unshard, weight in zip(unshards, weights, strict=True):
        replace(gm, unshard.node, weight)
