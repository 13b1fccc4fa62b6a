"""The collectives behind the markers: eager markers call these functions, and the lowering pass records them.

*Slice* and *piece* are those of :class:`~..language.layout.Layout`. Nothing here allocates state, looks up a process
group or synchronizes with the host: groups are passed by name, and routing follows from the specs.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..language.layout import Axis
from ..language.spec import ParamSpec, decode_dtype
from ..language.work import Category
from .packing import LIFT, pack, unpack

_c10d = torch.ops._c10d_functional


def all_gather(xs: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, axis: Axis, pairwise: bool) -> Tensor:
    """Return the buckets of all ranks, concatenated, ``[axis.size * sum(widths)]`` in ``dtype``; a rank's ``xs[i]`` is
    padded to ``widths[i]`` elements. ``pairwise``, here and below, is ``Layout.pairwise``."""
    if not pairwise:
        flat = pack(xs, widths, dtype=dtype)
        return _c10d.wait_tensor(_c10d.all_gather_into_tensor(flat, axis.size, axis.group))
    flat = pack(list(xs) * axis.size, list(widths) * axis.size, dtype=dtype)
    splits = [sum(widths)] * axis.size
    return all_to_all(flat, splits, splits, axis.group)


def _reduce_scatter(flat: Tensor, axis: Axis, pairwise: bool) -> Tensor:
    """Return ``[n]``, this rank's row of ``flat`` (``[axis.size * n]``, a row for each rank), summed over ``axis``."""
    if not pairwise:
        return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(flat, "sum", axis.size, axis.group))
    splits = [flat.numel() // axis.size] * axis.size
    return all_to_all(flat, splits, splits, axis.group).view(axis.size, -1).sum(0)


def _all_reduce(
    xs: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, divisor: float, axis: Axis, pairwise: bool
) -> Tensor:
    """Return the sum of a bucket over ``axis``, ``[sum(widths)]``; each rank's values are divided by ``divisor`` first.

    With ``pairwise`` it is a reduce-scatter and an all-gather: as many bytes, and terms in the order in which gradients
    of shards are summed, so that weights have the same bits at every ZeRO stage.
    """
    if not pairwise:
        flat = pack(xs, widths, dtype=dtype, divisor=divisor)
        return _c10d.wait_tensor(_c10d.all_reduce(flat, "sum", axis.group))
    padding = -sum(widths) % axis.size
    padded = [*xs, xs[0].new_zeros(padding)] if padding else xs
    flat = pack(padded, [*widths, padding] if padding else widths, dtype=dtype, divisor=divisor)
    reduced = _reduce_scatter(flat, axis, pairwise)
    flat = all_gather([reduced], [reduced.numel()], dtype, axis, pairwise)
    return flat[: sum(widths)] if padding else flat


def hand_round(
    mine: Sequence[Tensor], holders: Sequence[int], numels: Sequence[int], axis: Axis, pairwise: bool, *, like: Tensor
) -> list[Tensor]:
    """Send this rank's tensors to all ranks of ``axis``, by one collective; return the tensors of all, in order.

    Tensor i has ``numels[i]`` elements and is on the rank at ``holders[i]``. ``mine`` are the tensors of this rank, in
    order; ``like`` has the dtype and device of all. Results are 1-D, each with its own storage.
    """
    # An all-gather takes equally many elements from every rank. Where most would be padding (a single matrix has one
    # owner), an all-to-all sends the tensors unpadded.
    held_by = [[i for i, holder in enumerate(holders) if holder == rank] for rank in range(axis.size)]
    rank_numels = [sum(numels[i] for i in indices) for indices in held_by]
    my_numels = [numels[i] for i in held_by[axis.index]]
    if pairwise or axis.size * max(rank_numels) > 2 * sum(rank_numels):
        padding = [0] * axis.size
        flat = pack(list(mine) * axis.size, my_numels * axis.size, dtype=like.dtype) if my_numels else like.new_empty(0)
        gathered = all_to_all(flat, rank_numels, [sum(my_numels)] * axis.size, axis.group)
    else:
        padding = [max(rank_numels) - size for size in rank_numels]
        # The padding is a tensor of its own, the only one that a rank without tensors sends.
        filler = like.new_zeros(padding[axis.index])
        gathered = all_gather([*mine, filler], [*my_numels, padding[axis.index]], like.dtype, axis, pairwise=False)
    # (index in the list, elements) in the order of arrival; index -1 is a rank's padding.
    order = [at for rank in range(axis.size) for at in (*((i, numels[i]) for i in held_by[rank]), (-1, padding[rank]))]
    sizes = [size for _, size in order]
    arrived = unpack(gathered, sizes, sizes)
    tensor_of = {i: tensor for (i, _), tensor in zip(order, arrived, strict=True) if i >= 0}
    return [tensor_of[i] for i in range(len(holders))]


def all_to_all(x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> Tensor:
    """Exchange 1-D pieces: ``input_splits[d]`` elements go to rank d, ``output_splits[s]`` come from rank s."""
    return _c10d.wait_tensor(_c10d.all_to_all_single(x, list(output_splits), list(input_splits), group))


class AllToAll(torch.autograd.Function):
    """:func:`all_to_all` of rows for autograd: gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, output_splits: list[int], input_splits: list[int], group: str) -> Tensor:
        ctx.way = input_splits, output_splits, group
        return all_to_all(x.contiguous(), output_splits, input_splits, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return AllToAll.apply(grad, *ctx.way), None, None, None


def shard_widths(specs: Sequence[ParamSpec]) -> list[int]:
    """Elements of each parameter's largest slice: equal on all ranks."""
    return [spec.layout.chunk * spec.layout.row_numel for spec in specs]


def piece_widths(specs: Sequence[ParamSpec]) -> list[int]:
    """Elements of the largest piece of each parameter's slice: equal on the ranks that share the slice."""
    return [spec.layout.widest_piece for spec in specs]


def gather(slices: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the full weights, ``spec.layout.shape``: by one all-gather, or by none where a slice is the whole weight.

    ``slices`` have ``spec.layout.slice_shape``, master or compute dtype, and are sent in ``dtype`` (default: compute
    dtype). ``specs`` agree on mesh, compute dtype and ``on_host``.
    """
    layout, dtype = specs[0].layout, dtype or decode_dtype(specs[0].compute_dtype)
    if specs[0].on_host:
        slices = LIFT(list(slices))
    if layout.sharded:
        world, widths = layout.shard.size, shard_widths(specs)
        # ``pack`` casts before the gather: half the bytes, and the same numbers as a cast behind it.
        flat = all_gather(slices, widths, dtype, layout.shard.serving(Category.GATHER), layout.pairwise)
    else:
        world, widths = 1, [spec.layout.numel for spec in specs]
        flat = pack(slices, widths, dtype=dtype)
    weights = unpack(flat, widths, [spec.layout.numel for spec in specs], world=world)
    return [weight.view(spec.layout.shape) for weight, spec in zip(weights, specs, strict=True)]


def gather_slices(
    pieces: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype, category: Category = Category.GATHER
) -> list[Tensor]:
    """Return this rank's slices (``spec.layout.slice_shape``, ``dtype``), gathered from the pieces of its replicas
    (``spec.layout.local_shape``), for parameters of one mesh that are cut twice."""
    layout, widths = specs[0].layout, piece_widths(specs)
    flat = all_gather(pieces, widths, dtype, layout.replicate.serving(category), layout.pairwise)
    # Pieces fill a slice from the front, so that only its end is padding.
    shapes = [spec.layout.slice_shape for spec in specs]
    slices = unpack(flat, widths, [math.prod(shape) for shape in shapes], world=layout.replicate.size)
    return [flat_slice.view(shape) for flat_slice, shape in zip(slices, shapes, strict=True)]


def gather_pieces(pieces: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype) -> list[Tensor]:
    """Return full tensors (``spec.layout.shape``, ``dtype``), gathered from the pieces of all ranks
    (``spec.layout.local_shape``), for sharded parameters of one mesh."""
    slices = gather_slices(pieces, specs, dtype) if specs[0].layout.cut_twice else pieces
    return gather(slices, specs, dtype)


def unshard(shard: Tensor, resident: Tensor | None, spec: ParamSpec) -> Tensor:
    """Return the full weight, ``spec.layout.shape`` in ``spec.compute_dtype``; it may alias ``shard`` or ``resident``.

    ``shard`` has ``spec.layout.local_shape`` and the master dtype. ``resident`` is in compute dtype: the full weight
    (stages 1 and 2), this rank's slice (stage 3 with masters cut twice), else None.
    """
    layout = spec.layout
    if layout.gathered and layout.cut_twice and resident is None:  # double backward: a gradient has no resident slice
        return gather_pieces([shard], [spec], decode_dtype(spec.compute_dtype))[0]
    if layout.resident:
        if resident is None:
            raise ValueError(f"unshard at stage {layout.stage} needs the resident weight")
        if layout.replicated_weight:
            return resident
        shard = resident
    if not layout.sharded and not spec.on_host:
        return shard.to(decode_dtype(spec.compute_dtype))
    return gather([shard], [spec])[0]


def reduce_grads(grads: Sequence[Tensor], specs: Sequence[ParamSpec]) -> list[Tensor]:
    """Return the averaged gradients of this rank's pieces in master dtype, by one collective for each axis, ``shard``
    first. ``specs`` agree on mesh, reduce dtype and sharding, over several ranks; ``grads`` have ``layout.shape``."""
    layout, dtype = specs[0].layout, decode_dtype(specs[0].reduce_dtype)
    shard, replicas = layout.shard.serving(Category.REDUCE), layout.replicate.serving(Category.REDUCE)
    # Divide before the sum: no overflow in half precision.
    if not layout.sharded:
        widths = [spec.layout.numel for spec in specs]
        flat = _all_reduce(
            grads, widths, dtype, layout.divisor, layout.everyone.serving(Category.REDUCE), layout.pairwise
        )
    else:
        widths = shard_widths(specs)
        flat = pack(grads, widths, world=shard.size, dtype=dtype, divisor=layout.divisor)
        flat = _reduce_scatter(flat, shard, layout.pairwise)
        if layout.cut_twice:
            slices = unpack(flat, widths, [math.prod(spec.layout.slice_shape) for spec in specs])
            widths = piece_widths(specs)
            flat = pack(slices, widths, world=replicas.size, dtype=dtype)
            flat = _reduce_scatter(flat, replicas, layout.pairwise)
        elif not replicas.alone:
            flat = _c10d.wait_tensor(_c10d.all_reduce(flat, "sum", replicas.group))
    pieces = unpack(flat, widths, [math.prod(spec.layout.local_shape) for spec in specs])
    return [
        piece.view(spec.layout.local_shape).to(decode_dtype(spec.dtype))
        for piece, spec in zip(pieces, specs, strict=True)
    ]


def reduce_grad(grad: Tensor, spec: ParamSpec) -> Tensor:
    """Return the averaged gradient of this rank's piece, ``spec.layout.local_shape`` in ``spec.dtype``. It may alias
    ``grad``, ``spec.layout.shape``, where no other rank has the weight."""
    if spec.layout.everyone.alone:
        # An expert may be on this rank alone and still have received tokens of other ranks, over which to average.
        mean = grad if spec.layout.divisor == 1 else grad / spec.layout.divisor
        return mean.to(decode_dtype(spec.dtype))
    return reduce_grads([grad], [spec])[0]
