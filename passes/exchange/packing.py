"""Buckets: many tensors to one buffer and back, as opaque ops.

Left to the code generator, every copy in and out of a bucket has an offset of its own and becomes a kernel of its own:
for a 12-layer model that was five times as many kernels to compile as the model has. As ops they are one batched copy
each, and the layers' own kernels stay equal and are compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec import decode_dtype

__all__ = ["pack", "unpack"]


def _rows(x: Tensor, world: int, width: int) -> Tensor:
    """``x`` flattened, zero-padded to ``world * width`` elements, as ``[world, width]``."""
    flat = x.reshape(-1)
    missing = world * width - flat.numel()
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(world, width)


@torch.library.custom_op("muon_zero::pack", mutates_args=())
def _pack(xs: Sequence[Tensor], widths: Sequence[int], world: int, dtype: str, divisor: float) -> Tensor:
    rows = [_rows(x.to(decode_dtype(dtype)), world, width) for x, width in zip(xs, widths, strict=True)]
    packed = torch.cat(rows, dim=1).reshape(-1)
    if packed.untyped_storage()._cdata in {x.untyped_storage()._cdata for x in xs}:
        packed = packed.clone()
    return packed if divisor == 1 else packed.div_(divisor)


@_pack.register_fake
def _(xs: Sequence[Tensor], widths: Sequence[int], world: int, dtype: str, divisor: float) -> Tensor:
    return xs[0].new_empty(world * sum(widths), dtype=decode_dtype(dtype))


@torch.library.custom_op("muon_zero::unpack", mutates_args=())
def _unpack(flat: Tensor, widths: Sequence[int], numels: Sequence[int], world: int) -> list[Tensor]:
    pieces = torch.ops.aten.split_with_sizes_copy.default(flat.view(world, -1), list(widths), 1)
    return [piece.view(-1)[:numel] for piece, numel in zip(pieces, numels, strict=True)]


@_unpack.register_fake
def _(flat: Tensor, widths: Sequence[int], numels: Sequence[int], world: int) -> list[Tensor]:
    return [flat.new_empty(numel) for numel in numels]


def pack(
    xs: Sequence[Tensor], widths: Sequence[int], *, world: int = 1, dtype: torch.dtype, divisor: float = 1.0
) -> Tensor:
    """One 1-D buffer of ``world`` rows; row r holds the r-th ``widths[i]`` elements of every ``xs[i]``, in order.

    Args:
        xs: tensors of up to ``world * widths[i]`` elements; shorter ones are padded with zeros.
        dtype: of the buffer; tensors are cast on the way in.
        divisor: the buffer is divided by it.
    """
    return torch.ops.muon_zero.pack(list(xs), list(widths), world, str(dtype).removeprefix("torch."), float(divisor))


def unpack(flat: Tensor, widths: Sequence[int], numels: Sequence[int], *, world: int = 1) -> list[Tensor]:
    """Inverse of :func:`pack`: 1-D tensors of ``numels[i]`` elements, each with storage of its own."""
    return torch.ops.muon_zero.unpack(flat, list(widths), list(numels), world)
