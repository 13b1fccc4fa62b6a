"""``orthogonalize`` markers: momentum, exchange and Newton-Schulz, behind everything else of the graph."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from ..edit import replace
from ..exchange.orthogonalize import orthogonalize_group
from ..exchange.owner import assign_owners
from ..inline import inline
from ..markers import Orthogonalize
from .buckets import bucket_matrices

__all__ = ["lower_directions"]


def lower_directions(gm: GraphModule, cap_bytes: int) -> None:
    """Replace every ``orthogonalize`` marker of ``gm``, which must be read by nothing but the output.

    Owners are balanced over all of them; each exchange takes up to ``cap_bytes`` of full matrices.
    """
    markers = Orthogonalize.all(gm)
    owners = assign_owners([marker.spec for marker in markers])
    for bucket in bucket_matrices([marker.spec for marker in markers], cap_bytes):
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
        for marker, result in zip(chosen, inline(gm, gm.graph.output_node(), directions, inputs), strict=True):
            replace(gm, marker.node, result)
