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
    for read in Unshard.all(gm):
        if read.resident is not None:
            note_resident(read.resident, read.state)
        if read.spec.layout.gathered or read.spec.on_host:
            gathered.append(read)
        else:
            cast = read.resident is None and read.spec.dtype != read.spec.compute_dtype  # memory of its own
            _lower_resident(gm, read, copy=not cast and _escapes(read.node, output))
    groups = group_neighbours(
        [read.spec for read in gathered], lambda spec: spec.compute_dtype, ctx.costs, ctx.options.bucket_bytes
    )
    for number, group in enumerate(groups):
        reads = [gathered[i] for i in group]
        _gather(gm, reads, Work(Category.GATHER, number, nbytes=sum(weight_bytes(read.spec) for read in reads)))


def _escapes(node: Node, output: Node) -> bool:
    """Whether the graph returns ``node`` or a view of it."""
    return any(user is output or (is_view_or_cast(user) and _escapes(user, output)) for user in node.users)


def _lower_resident(gm: GraphModule, read: Unshard, *, copy: bool) -> None:
    def weight(shard: torch.Tensor, resident: torch.Tensor | None = None) -> list[torch.Tensor]:
        full = transfers.unshard(shard, resident, read.spec)
        # A weight handed out of the graph must not change when the resident copy is refreshed.
        return [full.clone() if copy else full]

    inputs = [read.shard] if read.resident is None else [read.shard, read.resident]
    replace(gm, read.node, inline(gm, read.node, weight, inputs)[0])


def _gather(gm: GraphModule, reads: list[Unshard], work: Work) -> None:
    """Lower one bucket ahead of its first read: an all-gather, or of whole weights a copy from host memory."""
    specs = [read.spec for read in reads]
    inputs = [read.shard if read.resident is None else read.resident for read in reads]
    weights = inline(gm, reads[0].node, lambda *slices: transfers.gather(slices, specs), inputs, work)
    for read, weight in zip(reads, weights, strict=True):
        replace(gm, read.node, weight)
