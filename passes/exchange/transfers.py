"""What the markers mean, written once with functional collectives.

The eager implementation of a marker calls these functions; the lowering pass traces the very same functions into the
graph. Nothing here allocates state, looks up a process group or synchronizes with the host: groups travel by name and
all routing follows from the specs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..language.layout import Axis
from ..language.spec import ParamSpec, decode_dtype
from ..language.work import Category
from .lift import LIFT
from .packing import pack, unpack

__all__ = [
    "all_gather",
    "all_to_all",
    "gather",
    "gather_pieces",
    "gather_slices",
    "hand_round",
    "piece_widths",
    "reduce_grad",
    "reduce_grads",
    "shard_widths",
    "unshard",
]

_c10d = torch.ops._c10d_functional


def all_gather(xs: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, axis: Axis, pairwise: bool) -> Tensor:
    """Every rank's bucket, one behind the other, ``[axis.size * sum(widths)]``.

    Args:
        xs: tensors of up to ``widths[i]`` elements, padded to that.
        dtype: of the bucket.
        pairwise: as ``Layout.pairwise``.
    """
    if not pairwise:
        flat = pack(xs, widths, dtype=dtype)
        return _c10d.wait_tensor(_c10d.all_gather_into_tensor(flat, axis.size, axis.group))
    flat = pack(list(xs) * axis.size, list(widths) * axis.size, dtype=dtype)
    splits = [sum(widths)] * axis.size
    return all_to_all(flat, splits, splits, axis.group)


def _reduce_scatter(flat: Tensor, axis: Axis, pairwise: bool) -> Tensor:
    """The sum over ``axis`` of one's own row of ``flat``, which has a row for each of its ranks.

    Args:
        pairwise: as ``Layout.pairwise``.
    """
    if not pairwise:
        return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(flat, "sum", axis.size, axis.group))
    splits = [flat.numel() // axis.size] * axis.size
    return all_to_all(flat, splits, splits, axis.group).view(axis.size, -1).sum(0)


def _all_reduce(
    xs: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, divisor: float, axis: Axis, pairwise: bool
) -> Tensor:
    """The sum over ``axis`` of a bucket, ``[sum(widths)]``.

    Made of a reduce-scatter and a gather where those are all-to-alls: as many bytes, and sums in the order in which
    they are added where gradients are sharded, so that weights have the same bits at every stage.

    Args:
        divisor: of each rank's own.
        pairwise: as ``Layout.pairwise``.
    """
    if not pairwise:
        flat = pack(xs, widths, dtype=dtype, divisor=divisor)
        return _c10d.wait_tensor(_c10d.all_reduce(flat, "sum", axis.group))
    padding = -sum(widths) % axis.size
    filled = [*xs, xs[0].new_zeros(padding)] if padding else xs
    flat = pack(filled, [*widths, padding] if padding else widths, dtype=dtype, divisor=divisor)
    own = _reduce_scatter(flat, axis, pairwise)
    flat = all_gather([own], [own.numel()], dtype, axis, pairwise)
    return flat[: sum(widths)] if padding else flat


def hand_round(
    mine: Sequence[Tensor], holders: Sequence[int], numels: Sequence[int], axis: Axis, pairwise: bool, *, like: Tensor
) -> list[Tensor]:
    """What each rank along ``axis`` holds some of, on all of them: one collective.

    A gather takes as much from every rank. Where most of that would be padding, as of a single matrix, whose one owner
    has all there is, the pieces travel from rank to rank as they are.

    Args:
        mine: this rank's, in order.
        holders: who has each of all.
        numels: elements of each of all.
        pairwise: as ``Layout.pairwise``.
        like: a tensor of the dtype and device of all of them.
    Returns:
        All of them, 1-D, each with storage of its own.
    """
    held = [[i for i, holder in enumerate(holders) if holder == rank] for rank in range(axis.size)]
    filled = [sum(numels[i] for i in indices) for indices in held]
    own = [numels[i] for i in held[axis.index]]
    if pairwise or axis.size * max(filled) > 2 * sum(filled):
        padding = [0] * axis.size
        flat = pack(list(mine) * axis.size, own * axis.size, dtype=like.dtype) if own else like.new_empty(0)
        gathered = all_to_all(flat, filled, [sum(own)] * axis.size, axis.group)
    else:
        padding = [max(filled) - size for size in filled]
        # The padding is a tensor of its own: a rank that holds nothing sends only that.
        filler = like.new_zeros(padding[axis.index])
        gathered = all_gather([*mine, filler], [*own, padding[axis.index]], like.dtype, axis, pairwise=False)
    slots = [slot for rank in range(axis.size) for slot in (*((i, numels[i]) for i in held[rank]), (-1, padding[rank]))]
    sizes = [size for _, size in slots]
    pieces = unpack(gathered, sizes, sizes)
    found = {i: piece for (i, _), piece in zip(slots, pieces, strict=True) if i >= 0}
    return [found[i] for i in range(len(holders))]


def all_to_all(x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> Tensor:
    """Exchange of 1-D pieces: ``input_splits[d]`` elements go to rank d, ``output_splits[s]`` come from rank s."""
    return _c10d.wait_tensor(_c10d.all_to_all_single(x, list(output_splits), list(input_splits), group))


def shard_widths(specs: Sequence[ParamSpec]) -> list[int]:
    """Elements of the largest slice of each parameter: the same on every rank."""
    return [spec.layout.chunk * spec.layout.row_numel for spec in specs]


def piece_widths(specs: Sequence[ParamSpec]) -> list[int]:
    """Elements of the largest piece of each parameter's slice: the same on the ranks that share the slice."""
    return [spec.layout.widest_piece for spec in specs]


def gather(
    slices: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    dtype: torch.dtype | None = None,
    category: Category = Category.GATHER,
) -> list[Tensor]:
    """The weights that slices are of, ``spec.layout.shape`` each: one all-gather, or none where they are all of them.

    Args:
        slices: this rank's rows of each weight, ``spec.layout.slice_shape``, master or compute dtype.
        specs: of parameters that share a mesh, compute dtype, and whether they are in host memory.
        dtype: to send them in; default: compute dtype.
        category: of what they are gathered for.
    """
    layout, dtype = specs[0].layout, dtype or decode_dtype(specs[0].compute_dtype)
    if specs[0].on_host:
        slices = LIFT(list(slices))
    if layout.sharded:
        world, widths = layout.shard.size, shard_widths(specs)
        # Cast before the gather: half the bytes, and the same numbers as casting behind it.
        flat = all_gather(slices, widths, dtype, layout.shard.serving(category), layout.pairwise)
    else:
        world, widths = 1, [spec.layout.numel for spec in specs]
        flat = pack(slices, widths, dtype=dtype)
    pieces = unpack(flat, widths, [spec.layout.numel for spec in specs], world=world)
    return [piece.view(spec.layout.shape) for piece, spec in zip(pieces, specs, strict=True)]


def gather_slices(
    pieces: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype, category: Category = Category.GATHER
) -> list[Tensor]:
    """This rank's slices, of the pieces that its replicas hold of them.

    Args:
        pieces: this rank's, ``spec.layout.local_shape``.
        specs: of parameters that share a mesh and are cut twice.
        dtype: of the slices, ``spec.layout.slice_shape`` each.
    """
    layout, widths = specs[0].layout, piece_widths(specs)
    flat = all_gather(pieces, widths, dtype, layout.replicate.serving(category), layout.pairwise)
    # Pieces fill a slice from the front, so that only its end is padding.
    shapes = [spec.layout.slice_shape for spec in specs]
    found = unpack(flat, widths, [math.prod(shape) for shape in shapes], world=layout.replicate.size)
    return [piece.view(shape) for piece, shape in zip(found, shapes, strict=True)]


def gather_pieces(
    pieces: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype, category: Category = Category.GATHER
) -> list[Tensor]:
    """Whole tensors, ``spec.layout.shape`` in ``dtype``, of the pieces that all ranks hold of them.

    Args:
        pieces: this rank's, ``spec.layout.local_shape``.
        specs: of sharded parameters that share a mesh.
    """
    slices = gather_slices(pieces, specs, dtype, category) if specs[0].layout.cut_twice else pieces
    return gather(slices, specs, dtype, category)


def unshard(shard: Tensor, resident: Tensor | None, spec: ParamSpec) -> Tensor:
    """The full weight in compute dtype.

    Args:
        shard: this rank's rows, ``spec.layout.local_shape``, master dtype.
        resident: what is resident in compute dtype: the full weight (stages 1 and 2), this rank's slice (stage 3 where
            masters are cut twice), else None.
    Returns:
        ``spec.layout.shape`` in ``spec.compute_dtype``; may alias ``shard`` or ``resident``.
    """
    layout = spec.layout
    if layout.gathered and layout.cut_twice and resident is None:  # not a weight, of which nothing is resident
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
    """The averaged gradients of the local pieces, in master dtype: one collective, or one an axis.

    Args:
        grads: gradients of the full weights, ``spec.layout.shape``.
        specs: of parameters that share a mesh, reduce dtype and whether they are sharded; several ranks.
    """
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
    pieces = unpack(flat, widths, [spec.layout.local_numel for spec in specs])
    return [
        piece.view(spec.layout.local_shape).to(decode_dtype(spec.dtype))
        for piece, spec in zip(pieces, specs, strict=True)
    ]


def reduce_grad(grad: Tensor, spec: ParamSpec) -> Tensor:
    """The gradient of the local piece, averaged over the ranks.

    Args:
        grad: gradient of the full weight, ``spec.layout.shape``.
    Returns:
        ``spec.layout.local_shape`` in ``spec.dtype``; may alias ``grad`` when nobody else has the same weight.
    """
    if spec.layout.everyone.alone:
        # Experts that are nowhere else may have had tokens from elsewhere.
        mean = grad if spec.layout.divisor == 1 else grad / spec.layout.divisor
        return mean.to(decode_dtype(spec.dtype))
    return reduce_grads([grad], [spec])[0]
