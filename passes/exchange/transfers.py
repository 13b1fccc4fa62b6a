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

from ..layout import Axis, Layout
from ..spec import ParamSpec, decode_dtype
from .packing import pack, unpack

__all__ = [
    "all_gather",
    "all_gather_start",
    "all_to_all",
    "gather_finish",
    "gather_matrices",
    "gather_pieces",
    "gather_slices",
    "gather_start",
    "hand_round",
    "piece_widths",
    "reduce_across",
    "reduce_finish",
    "reduce_grad",
    "reduce_start",
    "reduces_across",
    "shard_widths",
    "unshard",
]

_c10d = torch.ops._c10d_functional


def all_gather_start(xs: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, axis: Axis, how: str) -> Tensor:
    """Start the gather of one bucket over ``axis``; the result, ``[axis.size * sum(widths)]``, must be waited for.

    Args:
        xs: tensors of up to ``widths[i]`` elements, padded to that.
        dtype: of the bucket.
        how: ``Layout.gather``.
    """
    if how == "all_gather":
        return _c10d.all_gather_into_tensor(pack(xs, widths, dtype=dtype), axis.size, axis.group)
    flat = pack(list(xs) * axis.size, list(widths) * axis.size, dtype=dtype)
    splits = [sum(widths)] * axis.size
    return _c10d.all_to_all_single(flat, splits, splits, axis.group)


def all_gather(xs: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, axis: Axis, how: str) -> Tensor:
    """:func:`all_gather_start`, waited for: every rank's bucket, one behind the other."""
    return _c10d.wait_tensor(all_gather_start(xs, widths, dtype, axis, how))


def hand_round(
    mine: Sequence[Tensor], holders: Sequence[int], numels: Sequence[int], axis: Axis, how: str, *, like: Tensor
) -> list[Tensor]:
    """What each rank along ``axis`` holds some of, on all of them: one collective.

    A gather takes as much from every rank. Where most of that would be padding, as of a single matrix, whose one owner
    has all there is, the pieces travel from rank to rank as they are.

    Args:
        mine: this rank's, in order.
        holders: who has each of all.
        numels: elements of each of all.
        how: ``Layout.gather``.
        like: a tensor of the dtype and device of all of them.
    Returns:
        All of them, 1-D, each with storage of its own.
    """
    held = [[i for i, holder in enumerate(holders) if holder == rank] for rank in range(axis.size)]
    filled = [sum(numels[i] for i in indices) for indices in held]
    own = [numels[i] for i in held[axis.index]]
    if axis.size * max(filled) > 2 * sum(filled):
        padding = [0] * axis.size
        flat = pack(list(mine) * axis.size, own * axis.size, dtype=like.dtype) if own else like.new_empty(0)
        gathered = all_to_all(flat, filled, [sum(own)] * axis.size, axis.group)
    else:
        padding = [max(filled) - size for size in filled]
        # The padding is a tensor of its own: a rank that holds nothing sends only that.
        filler = like.new_zeros(padding[axis.index])
        gathered = all_gather([*mine, filler], [*own, padding[axis.index]], like.dtype, axis, how)
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


def gather_start(slices: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype | None = None) -> Tensor:
    """Start one all-gather of several slices; the result must be waited for.

    Args:
        slices: this rank's rows of each weight, ``spec.layout.slice_shape``, master or compute dtype.
        specs: of parameters that share a mesh and compute dtype.
        dtype: to send them in; default: compute dtype.
    """
    layout, dtype = specs[0].layout, dtype or decode_dtype(specs[0].compute_dtype)
    # Cast before the gather: half the bytes, and the same numbers as casting behind it.
    return all_gather_start(slices, shard_widths(specs), dtype, layout.shard, layout.gather)


def gather_finish(handle: Tensor, specs: Sequence[ParamSpec]) -> list[Tensor]:
    """Wait for :func:`gather_start` and cut out the full weights, ``spec.layout.shape`` each."""
    flat = _c10d.wait_tensor(handle)
    pieces = unpack(flat, shard_widths(specs), [spec.layout.numel for spec in specs], world=specs[0].layout.shard.size)
    return [piece.view(spec.layout.shape) for piece, spec in zip(pieces, specs, strict=True)]


def gather_slices(pieces: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype) -> list[Tensor]:
    """This rank's slices, of the pieces that its replicas hold of them.

    Args:
        pieces: this rank's, ``spec.layout.local_shape``.
        specs: of parameters that share a mesh and are cut twice.
        dtype: of the slices, ``spec.layout.slice_shape`` each.
    """
    layout, widths = specs[0].layout, piece_widths(specs)
    flat = all_gather(pieces, widths, dtype, layout.replicate, layout.gather)
    # Pieces fill a slice from the front, so that only its end is padding.
    shapes = [spec.layout.slice_shape for spec in specs]
    found = unpack(flat, widths, [math.prod(shape) for shape in shapes], world=layout.replicate.size)
    return [piece.view(shape) for piece, shape in zip(found, shapes, strict=True)]


def gather_pieces(pieces: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype) -> list[Tensor]:
    """Whole tensors, ``spec.layout.shape`` in ``dtype``, of the pieces that all ranks hold of them.

    Args:
        pieces: this rank's, ``spec.layout.local_shape``.
        specs: of sharded parameters that share a mesh.
    """
    slices = gather_slices(pieces, specs, dtype) if specs[0].layout.cut_twice else pieces
    return gather_finish(gather_start(slices, specs, dtype), specs)


def gather_matrices(pieces: Sequence[Tensor], specs: Sequence[ParamSpec], dtype: torch.dtype) -> list[Tensor]:
    """Whole matrices, ``spec.layout.joined_shape`` in ``dtype``, of the pieces that all ranks hold of them.

    Args:
        pieces: this rank's, ``spec.layout.local_shape``.
        specs: of parameters that share a mesh, and meet over several ranks.
    """
    layout = specs[0].layout
    if not layout.joined:
        return gather_pieces(pieces, specs, dtype)
    ranks = range(layout.meeting.size)
    numels = [[math.prod(spec.layout.meeting_shape(r)) for spec in specs] for r in ranks]
    widths = [max(column) for column in zip(*numels, strict=True)]
    flat = all_gather(pieces, widths, dtype, layout.meeting, layout.gather)
    padded = unpack(flat, widths * len(ranks), [numel for row in numels for numel in row])
    return [spec.layout.join(padded[k :: len(specs)]) for k, spec in enumerate(specs)]


def unshard(shard: Tensor, replica: Tensor | None, spec: ParamSpec) -> Tensor:
    """The full weight in compute dtype.

    Args:
        shard: this rank's rows, ``spec.layout.local_shape``, master dtype.
        replica: what is resident in compute dtype: the full weight (stages 1 and 2), this rank's slice (stage 3 where
            masters are cut twice), else None.
    Returns:
        ``spec.layout.shape`` in ``spec.compute_dtype``; may alias ``shard`` or ``replica``.
    """
    layout = spec.layout
    if layout.resident:
        if replica is None:
            raise ValueError(f"unshard at stage {layout.stage} needs the resident replica")
        if layout.replicated_weight:
            return replica
        shard = replica
    if not layout.sharded:
        return shard.to(decode_dtype(spec.compute_dtype))
    return gather_finish(gather_start([shard], [spec]), [spec])[0]


def reduce_start(grads: Sequence[Tensor], specs: Sequence[ParamSpec]) -> Tensor:
    """Start one reduction (reduce-scatter, or all-reduce where nothing is sharded) of several gradients.

    Args:
        grads: gradients of the full weights, ``spec.layout.shape``.
        specs: of parameters that share a mesh, reduce dtype and whether they are sharded; several ranks.
    """
    layout, dtype = specs[0].layout, decode_dtype(specs[0].reduce_dtype)
    shard = layout.shard
    # Divide before the sum: no overflow in half precision.
    if not layout.sharded:
        flat = pack(grads, [spec.layout.numel for spec in specs], dtype=dtype, divisor=layout.divisor)
        return _c10d.all_reduce(flat, "sum", layout.everyone.group)
    flat = pack(grads, shard_widths(specs), world=shard.size, dtype=dtype, divisor=layout.divisor)
    return _c10d.reduce_scatter_tensor(flat, "sum", shard.size, shard.group)


def reduces_across(layout: Layout) -> bool:
    """Whether a reduction goes on over the replicas, with :func:`reduce_across`."""
    return layout.sharded and not layout.replicate.alone


def reduce_across(handle: Tensor, specs: Sequence[ParamSpec]) -> Tensor:
    """Wait for :func:`reduce_start`, and start the sum of the slices over the replicas; to be waited for as that is.

    Every replica gets the sum of the slices, or of its piece of them where they are cut twice.
    """
    flat = _c10d.wait_tensor(handle)
    layout = specs[0].layout
    replicas = layout.replicate
    if not layout.cut_twice:
        return _c10d.all_reduce(flat, "sum", replicas.group)
    slices = unpack(flat, shard_widths(specs), [math.prod(spec.layout.slice_shape) for spec in specs])
    by_piece = pack(slices, piece_widths(specs), world=replicas.size, dtype=flat.dtype)
    return _c10d.reduce_scatter_tensor(by_piece, "sum", replicas.size, replicas.group)


def reduce_finish(handle: Tensor, specs: Sequence[ParamSpec]) -> list[Tensor]:
    """Wait for the last of a reduction; the averaged gradients of the local pieces in master dtype."""
    flat = _c10d.wait_tensor(handle)
    widths = piece_widths(specs) if specs[0].layout.sharded else [spec.layout.numel for spec in specs]
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
    handle = reduce_start([grad], [spec])
    if reduces_across(spec.layout):
        handle = reduce_across(handle, [spec])
    return reduce_finish(handle, [spec])[0]
