"""What the markers mean, written once with functional collectives.

The eager implementation of a marker calls these functions; the lowering pass traces the very same functions into the
graph. Nothing here allocates state, looks up a process group or synchronizes with the host: groups travel by name and
all routing follows from the specs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec import ParamSpec, decode_dtype
from .packing import pack, unpack

__all__ = [
    "all_gather",
    "all_gather_start",
    "all_to_all",
    "gather_finish",
    "gather_start",
    "reduce_finish",
    "reduce_grad",
    "reduce_start",
    "shard_widths",
    "unshard",
]

_c10d = torch.ops._c10d_functional


def all_gather_start(xs: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, spec: ParamSpec) -> Tensor:
    """Start the gather of one bucket; the result, ``[world * sum(widths)]``, must be waited for.

    Args:
        xs: tensors of up to ``widths[i]`` elements, padded to that.
        dtype: of the bucket.
        spec: whose ``world``, ``group`` and ``gather`` say how.
    """
    if spec.gather == "all_gather":
        return _c10d.all_gather_into_tensor(pack(xs, widths, dtype=dtype), spec.world, spec.group)
    flat = pack(list(xs) * spec.world, list(widths) * spec.world, dtype=dtype)
    splits = [sum(widths)] * spec.world
    return _c10d.all_to_all_single(flat, splits, splits, spec.group)


def all_gather(xs: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype, spec: ParamSpec) -> Tensor:
    """:func:`all_gather_start`, waited for: every rank's bucket, one behind the other."""
    return _c10d.wait_tensor(all_gather_start(xs, widths, dtype, spec))


def all_to_all(x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> Tensor:
    """Exchange of 1-D pieces: ``input_splits[d]`` elements go to rank d, ``output_splits[s]`` come from rank s."""
    return _c10d.wait_tensor(_c10d.all_to_all_single(x, list(output_splits), list(input_splits), group))


def shard_widths(specs: Sequence[ParamSpec]) -> list[int]:
    """Elements of the largest shard of each parameter: the same on every rank."""
    return [spec.chunk * spec.row_numel for spec in specs]


def gather_start(shards: Sequence[Tensor], specs: Sequence[ParamSpec]) -> Tensor:
    """Start one all-gather of several shards in compute dtype; the result must be waited for.

    Args:
        shards: this rank's rows of each parameter, ``spec.local_shape``, master dtype.
        specs: of parameters that share group and compute dtype.
    """
    # Cast before the gather: half the bytes, and the same numbers as casting behind it.
    return all_gather_start(shards, shard_widths(specs), decode_dtype(specs[0].compute_dtype), specs[0])


def gather_finish(handle: Tensor, specs: Sequence[ParamSpec]) -> list[Tensor]:
    """Wait for :func:`gather_start` and cut out the full weights, ``spec.shape`` each."""
    flat = _c10d.wait_tensor(handle)
    pieces = unpack(flat, shard_widths(specs), [spec.numel for spec in specs], world=specs[0].world)
    return [piece.view(spec.shape) for piece, spec in zip(pieces, specs, strict=True)]


def unshard(shard: Tensor, replica: Tensor | None, spec: ParamSpec) -> Tensor:
    """The full weight in compute dtype.

    Args:
        shard: this rank's rows, ``spec.local_shape``, master dtype.
        replica: the resident full copy in compute dtype (stages 1 and 2), else None.
    Returns:
        ``spec.shape`` in ``spec.compute_dtype``; may alias ``shard`` or ``replica``.
    """
    if spec.replicated_weight:
        if replica is None:
            raise ValueError(f"unshard at stage {spec.stage} needs the resident replica")
        return replica
    if not spec.sharded:
        return shard.to(decode_dtype(spec.compute_dtype))
    return gather_finish(gather_start([shard], [spec]), [spec])[0]


def reduce_start(grads: Sequence[Tensor], specs: Sequence[ParamSpec]) -> Tensor:
    """Start one reduction (reduce-scatter, or all-reduce where nothing is sharded) of several gradients.

    Args:
        grads: gradients of the full weights, ``spec.shape``.
        specs: of parameters that share group, reduce dtype and whether they are sharded; world > 1.
    """
    world, group, dtype = specs[0].world, specs[0].group, decode_dtype(specs[0].reduce_dtype)
    # Divide before the sum: no overflow in half precision.
    if not specs[0].sharded:
        flat = pack(grads, [spec.numel for spec in specs], dtype=dtype, divisor=world)
        return _c10d.all_reduce(flat, "sum", group)
    flat = pack(grads, shard_widths(specs), world=world, dtype=dtype, divisor=world)
    return _c10d.reduce_scatter_tensor(flat, "sum", world, group)


def reduce_finish(handle: Tensor, specs: Sequence[ParamSpec]) -> list[Tensor]:
    """Wait for :func:`reduce_start`; the averaged gradients of the local shards in master dtype."""
    flat = _c10d.wait_tensor(handle)
    widths = shard_widths(specs) if specs[0].sharded else [spec.numel for spec in specs]
    pieces = unpack(flat, widths, [spec.shard_numel(spec.rank) for spec in specs])
    return [
        piece.view(spec.local_shape).to(decode_dtype(spec.dtype)) for piece, spec in zip(pieces, specs, strict=True)
    ]


def reduce_grad(grad: Tensor, spec: ParamSpec) -> Tensor:
    """The gradient of the shard, averaged over the ranks.

    Args:
        grad: gradient of the full weight, ``spec.shape``.
    Returns:
        ``spec.local_shape`` in ``spec.dtype``; may alias ``grad`` when the world is 1.
    """
    if spec.world == 1:
        return grad.to(decode_dtype(spec.dtype))
    return reduce_finish(reduce_start([grad], [spec]), [spec])[0]
