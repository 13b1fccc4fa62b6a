"""``orthogonalize`` markers: momentum, exchange and Newton-Schulz, bucket by bucket."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from ..edit import replace
from ..exchange.orthogonalize import orthogonalize_group
from ..exchange.owner import assign_owners
from ..inline import inline
from ..markers import Orthogonalize
from ..work import Category, Work
from .buckets import bucket_matrices, exchanged_bytes

__all__ = ["lower_directions"]


def lower_directions(gm: GraphModule, cap_bytes: int) -> None:
    """Replace every ``orthogonalize`` marker of ``gm``, which must be read by nothing but the output.

    Owners are balanced over all of them; an exchange brings about ``cap_bytes`` of matrices to each rank.
    """
    markers = Orthogonalize.all(gm)
    specs = [marker.spec for marker in markers]
    buckets = bucket_matrices(specs, cap_bytes)
    owners = assign_owners(specs)
    for number, bucket in enumerate(buckets):
        chosen = [markers[i] for i in bucket]
        table = [owners[i] for i in bucket]

        def directions(
            *tensors: torch.Tensor, chosen: list[Orthogonalize] = chosen, table: list[int] = table
        ) -> list[torch.Tensor]:
            count = len(chosen)
            grads, momenta, hypers = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
            return orthogonalize_group(grads, momenta, hypers, [marker.spec for marker in chosen], table)

        inputs = [marker.grad for marker in chosen]
        inputs += [marker.state for marker in chosen]
        inputs += [marker.hyper for marker in chosen]
        work = Work(Category.EXCHANGE, number, sum(map(exchanged_bytes, (specs[i] for i in bucket))))
        found = inline(gm, gm.graph.output_node(), directions, inputs, work)
        for marker, result in zip(chosen, found, strict=True):
            replace(gm, marker.node, result)
