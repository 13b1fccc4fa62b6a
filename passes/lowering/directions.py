"""Lowering of ``orthogonalize`` markers: momentum, exchange and Newton-Schulz, one bucket at a time."""

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
from ..markers import Orthogonalize
from ..momentum import Updated, supports
from ..pipeline import PassContext, tensor_value
from ..record import Alike
from .buckets import bucket_matrices, exchanged_bytes

_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
_HALF = (torch.bfloat16, torch.float16)


def lower_directions(gm: GraphModule, ctx: PassContext) -> None:
    """Replace every ``orthogonalize`` marker of ``gm``; only the output may read its results."""
    markers = sorted(Orthogonalize.all(gm), key=lambda marker: bool(marker.spec.muon_settings.owners))
    specs = [marker.spec for marker in markers]
    buckets = bucket_matrices(specs, ctx.costs, ctx.options.bucket_bytes)
    # Balanced within each exchange and over all of them, but for owners that keep states: those stay.
    assigned = by_parameter(specs, assign_owners(specs, ctx.costs, buckets))
    owners = [spec.muon_settings.owners or of_marker for spec, of_marker in zip(specs, assigned, strict=True)]
    for number, bucket in enumerate(buckets):
        _lower_bucket(gm, number, [markers[i] for i in bucket], [owner for i in bucket for owner in owners[i]])
    _sum_rows(gm)


def _lower_bucket(gm: GraphModule, number: int, markers: Sequence[Orthogonalize], owners: Sequence[int]) -> None:
    """Replace the markers of exchange ``number``; ``owners``: of each share."""
    specs, count = [marker.spec for marker in markers], len(markers)
    gradients = list(map(_gradient, markers))
    added = [i for i, gradient in enumerate(gradients) if gradient.carried is not None]  # with ``carried``

    def directions(*tensors: torch.Tensor, alike: Alike) -> list[torch.Tensor]:
        """Return directions, new states, then the wide gradient and its row sums where the operator makes them."""
        rest = iter(tensors[3 * count :])
        grads, momenta, all_graph_scalars = (tensors[part * count : (part + 1) * count] for part in range(3))
        states = [[next(rest) for _ in marker.states] for marker in markers]
        carried = {i: next(rest) for i in added}
        updated: list[Updated | None] = []
        outcomes = orthogonalize_group(
            grads, momenta, all_graph_scalars, specs, owners, states, updated, carried, alike
        )
        return [*outcomes, *(tensor for each in updated if each is not None for tensor in (each.wide, each.sums))]

    states, all_graph_scalars = [marker.state for marker in markers], [marker.graph_scalars for marker in markers]
    inputs = [*(gradient.source for gradient in gradients), *states, *all_graph_scalars]
    inputs += [node for marker in markers for node in marker.states]
    inputs += [gradient.carried for gradient in gradients if gradient.carried is not None]
    work = Work(
        Category.EXCHANGE,
        number,
        nbytes=sum(map(exchanged_bytes, specs)),
        needs=frozenset(need for marker in markers for need in _reductions(marker.grad)),
        hops=hops(specs[0]),
        travels=specs[0].muon_settings.exchange != "local" and not specs[0].layout.owner_group.alone,
        handed_round=not specs[0].layout.replica_group.alone,
    )
    results = inline(gm, gm.graph.output_node(), directions, inputs, work, by_kind=True)
    rest = iter(results[count:])
    for marker, direction in zip(markers, results, strict=False):
        for node, result in zip(marker.results, [direction, *(next(rest) for _ in marker.states)], strict=True):
            replace(gm, node, result)
        gm.graph.erase_node(marker.node)
    for marker, gradient in zip(markers, gradients, strict=True):
        if not _taken(gradient.source, marker):
            continue
        wide, sums = next(rest), next(rest)
        for user in [user for user in marker.grad.users if user.target is ROW_SUMS]:
            replace(gm, user, sums)
        if gradient.cast is not None:
            gradient.cast.replace_all_uses_with(wide, delete_user_cb=lambda user: user.op == "output")


@dataclass(frozen=True)
class _Gradient:
    """The nodes that the momentum operator reads in place of a marker's gradient, which is their sum."""

    source: Node  # the averaged gradient, or the narrower tensor that ``cast`` widens
    carried: Node | None = None  # input with the ``.grad`` of earlier backwards, which the operator adds
    cast: Node | None = None  # in the output the operator's wide gradient replaces it; None without a cast


def _gradient(marker: Orthogonalize) -> _Gradient:
    """Return what the momentum operator may read in place of ``marker.grad``.

    The operator adds ``carried`` itself, where only the marker and its fingerprint would read the sum. It casts a
    half-precision gradient itself, where only these and the output read the cast: until then the gradient takes half
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


def _taken(grad: Node, marker: Orthogonalize) -> bool:
    """Whether the momentum operator takes ``grad`` with the marker's momentum."""
    return supports(tensor_value(grad), tensor_value(marker.state), marker.spec)


def _sum_rows(gm: GraphModule) -> None:
    """Lower row sums that the momentum operator does not make to ops that Inductor fuses with the gradient's."""
    for node in gm.graph.find_nodes(op="call_function", target=FINGERPRINT_OF_ROWS):
        gm.graph.output_node().prepend(node)  # behind all gradients
        unsummed = [source for source in node.args[0] if source.target is ROW_SUMS]
        if not unsummed:
            continue
        gradients = [source.args[0] for source in unsummed]
        for source, sums in zip(unsummed, inline(gm, unsummed[0], _row_sums, gradients, by_kind=True), strict=True):
            replace(gm, source, sums)


def _row_sums(*gradients: torch.Tensor, alike: Alike) -> list[torch.Tensor]:
    return [alike(row_sums, row_sums, [gradient]) for gradient in gradients]


def _reductions(grad: Node) -> set[int]:
    """Return the numbers of the buckets whose reductions make ``grad`` or a term of it."""
    work = work_of(grad)
    if work is not None and work.category is Category.REDUCE:
        return {work.bucket}
    # Between reduction and marker a gradient is at most added to ``carried``.
    terms = grad.all_input_nodes if grad.target is torch.ops.aten.add.Tensor else ()
    return {bucket for term in terms for bucket in _reductions(term)}
