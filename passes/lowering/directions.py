"""``orthogonalize`` markers: momentum, exchange and Newton-Schulz, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from ..edit import inline, replace
from ..exchange.orthogonalize import hops, orthogonalize_group
from ..exchange.owner import assign_owners
from ..exchange.shares import by_parameter
from ..markers import Orthogonalize, OrthogonalizeWith
from ..pipeline import PassContext
from ..work import Category, Work, work_of
from .buckets import bucket_matrices, exchanged_bytes

__all__ = ["lower_directions"]


def lower_directions(gm: GraphModule, ctx: PassContext) -> None:
    """Replace every ``orthogonalize`` marker of ``gm``, which must be read by nothing but the output.

    Owners are balanced in each exchange and over all of them; one brings up to ``bucket_bytes`` of matrices to each
    rank.
    """
    markers: list[Orthogonalize | OrthogonalizeWith] = [*Orthogonalize.all(gm), *OrthogonalizeWith.all(gm)]
    specs = [marker.spec for marker in markers]
    buckets = bucket_matrices(specs, ctx.costs, ctx.options.bucket_bytes)
    dealt = by_parameter(specs, assign_owners(specs, ctx.costs, buckets))
    owners = [spec.muon_settings.owners or own for spec, own in zip(specs, dealt, strict=True)]
    for number, bucket in enumerate(buckets):
        chosen = [markers[i] for i in bucket]
        kept = [marker.states if isinstance(marker, OrthogonalizeWith) else () for marker in chosen]
        table = [owner for i in bucket for owner in owners[i]]

        def directions(
            *tensors: torch.Tensor,
            chosen: Sequence[Orthogonalize | OrthogonalizeWith] = chosen,
            table: list[int] = table,
            kept: Sequence[Sequence[Node]] = kept,
        ) -> list[torch.Tensor]:
            count, behind = len(chosen), iter(tensors[3 * len(chosen) :])
            grads, momenta, hypers = (tensors[part * count : (part + 1) * count] for part in range(3))
            states = [[next(behind) for _ in own] for own in kept]
            return orthogonalize_group(grads, momenta, hypers, [marker.spec for marker in chosen], table, states)

        inputs = [node for nodes in zip(*((m.grad, m.state, m.hyper) for m in chosen), strict=True) for node in nodes]
        inputs += [node for own in kept for node in own]
        first = chosen[0].spec
        work = Work(
            Category.EXCHANGE,
            number,
            nbytes=sum(exchanged_bytes(marker.spec) for marker in chosen),
            needs=frozenset(need for marker in chosen for need in _reductions(marker.grad)),
            hops=hops(first),
            travels=first.muon_settings.exchange != "local" and not first.layout.owner_group.alone,
            handed_round=not first.layout.replica_group.alone,
        )
        found = inline(gm, gm.graph.output_node(), directions, inputs, work)
        behind = iter(found[len(chosen) :])
        for marker, direction, own in zip(chosen, found, kept, strict=False):
            if isinstance(marker, Orthogonalize):
                replace(gm, marker.node, direction)
                continue
            for node, result in zip(marker.found, [direction, *(next(behind) for _ in own)], strict=True):
                replace(gm, node, result)
            gm.graph.erase_node(marker.node)


def _reductions(grad: Node) -> set[int]:
    """The buckets whose reduction makes ``grad``, or is a term of it."""
    work = work_of(grad)
    if work is not None and work.category is Category.REDUCE:
        return {work.bucket}
    # What ``.grad`` holds already is added, nothing else happens to a gradient that is orthogonalized.
    terms = grad.all_input_nodes if grad.target is torch.ops.aten.add.Tensor else ()
    return {bucket for term in terms for bucket in _reductions(term)}
