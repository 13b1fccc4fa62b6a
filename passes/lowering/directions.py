"""``orthogonalize`` markers: momentum, exchange and Newton-Schulz, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..edit import inline, replace
from ..exchange.orthogonalize import hops, orthogonalize_group
from ..exchange.owner import assign_owners
from ..exchange.shares import by_parameter
from ..fingerprint import FINGERPRINT_OF_ROWS, ROW_SUMS, row_sums
from ..language.work import Category, Work, work_of
from ..markers import Orthogonalize, OrthogonalizeWith
from ..momentum import Updated, takes
from ..pipeline import PassContext, tensor_value
from ..record import Alike, call
from .buckets import bucket_matrices, exchanged_bytes

__all__ = ["lower_directions"]

_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
_HALF = (torch.bfloat16, torch.float16)


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

        gradients = list(map(_gradient, chosen))
        added = [i for i, gradient in enumerate(gradients) if gradient.carried is not None]

        def directions(
            *tensors: torch.Tensor,
            chosen: Sequence[Orthogonalize | OrthogonalizeWith] = chosen,
            table: list[int] = table,
            kept: Sequence[Sequence[Node]] = kept,
            added: Sequence[int] = added,
            alike: Alike = call,
        ) -> list[torch.Tensor]:
            count, behind = len(chosen), iter(tensors[3 * len(chosen) :])
            grads, momenta, hypers = (tensors[part * count : (part + 1) * count] for part in range(3))
            states = [[next(behind) for _ in own] for own in kept]
            carried = {i: next(behind) for i in added}
            updated: list[Updated | None] = []
            specs = [marker.spec for marker in chosen]
            made = orthogonalize_group(grads, momenta, hypers, specs, table, states, updated, carried, alike)
            return [*made, *(tensor for each in updated if each is not None for tensor in (each.wide, each.sums))]

        states, hypers = [marker.state for marker in chosen], [marker.hyper for marker in chosen]
        inputs = [*(gradient.source for gradient in gradients), *states, *hypers]
        inputs += [node for own in kept for node in own]
        inputs += [gradient.carried for gradient in gradients if gradient.carried is not None]
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
        found = inline(gm, gm.graph.output_node(), directions, inputs, work, by_kind=True)
        behind = iter(found[len(chosen) :])
        for marker, direction, own in zip(chosen, found, kept, strict=False):
            if isinstance(marker, Orthogonalize):
                replace(gm, marker.node, direction)
                continue
            for node, result in zip(marker.found, [direction, *(next(behind) for _ in own)], strict=True):
                replace(gm, node, result)
            gm.graph.erase_node(marker.node)
        for marker, gradient in zip(chosen, gradients, strict=True):
            if not _taken(gradient.source, marker):
                continue
            wide, sums = next(behind), next(behind)
            for user in [user for user in marker.grad.users if user.target is ROW_SUMS]:
                replace(gm, user, sums)
            if gradient.cast is not None:
                gradient.cast.replace_all_uses_with(wide, delete_user_cb=lambda user: user.op == "output")
    _sum_rows(gm)


@dataclass(frozen=True)
class _Gradient:
    """What the momentum's operator reads in place of a marker's gradient.

    Args:
        source: the gradient, or what it is cast from.
        carried: what ``.grad`` holds and the gradient is added to; None for nothing.
        cast: the node whose result the operator makes as well; None where the source is the gradient.
    """

    source: Node
    carried: Node | None = None
    cast: Node | None = None


def _gradient(marker: Orthogonalize | OrthogonalizeWith) -> _Gradient:
    """The operator adds to what ``.grad`` holds, rather than reading a sum that nobody else needs. Where only it and
    whoever is given ``.grad`` read a gradient that is cast, it casts that as well: until then the gradient has half of
    the memory.
    """
    grad, carried = marker.grad, None
    readers = {marker.node, *(user for user in grad.users if user.target is ROW_SUMS)}
    if grad.target is torch.ops.aten.add.Tensor and not grad.kwargs and set(grad.users) <= readers:
        left, right = grad.args[:2]
        if left.op == "placeholder" and tensor_value(left).is_contiguous() and _taken(right, marker):
            grad, carried, readers = right, left, {grad}
    source = grad.args[0] if grad.target in _CASTS else None
    if not isinstance(source, Node) or source.op == "placeholder":
        return _Gradient(grad, carried)
    narrow, wide = tensor_value(source), tensor_value(grad)
    narrower = narrow.dtype in _HALF and wide.dtype is torch.float32 and narrow.device == wide.device
    read_late = all(user.op == "output" or user in readers for user in grad.users)
    if not (narrower and read_late and _taken(source, marker)):
        return _Gradient(grad, carried)
    return _Gradient(source, carried, grad)


def _taken(grad: Node, marker: Orthogonalize | OrthogonalizeWith) -> bool:
    return takes(tensor_value(grad), tensor_value(marker.state), marker.spec)


def _sum_rows(gm: GraphModule) -> None:
    """Behind all gradients: the sums that no operator gives, in operations that Inductor fuses with what makes them."""
    for node in gm.graph.find_nodes(op="call_function", target=FINGERPRINT_OF_ROWS):
        gm.graph.output_node().prepend(node)
        left = [source for source in node.args[0] if source.target is ROW_SUMS]
        if not left:
            continue
        gradients = [source.args[0] for source in left]
        for source, sums in zip(left, inline(gm, left[0], _row_sums, gradients, by_kind=True), strict=True):
            replace(gm, source, sums)


def _row_sums(*gradients: torch.Tensor, alike: Alike) -> list[torch.Tensor]:
    return [alike(row_sums, row_sums, [gradient]) for gradient in gradients]


def _reductions(grad: Node) -> set[int]:
    """The buckets whose reduction makes ``grad``, or is a term of it."""
    work = work_of(grad)
    if work is not None and work.category is Category.REDUCE:
        return {work.bucket}
    # What ``.grad`` holds already is added, nothing else happens to a gradient that is orthogonalized.
    terms = grad.all_input_nodes if grad.target is torch.ops.aten.add.Tensor else ()
    return {bucket for term in terms for bucket in _reductions(term)}
