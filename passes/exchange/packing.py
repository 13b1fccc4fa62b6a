"""Flat buckets of tensors, as opaque ops ``pack`` and ``unpack``.

Inductor would generate one kernel for every copy into and out of a bucket, since offsets differ: five times as many as
a 12-layer model has kernels of its own. An op is one batched copy, and kernels of equal layers stay equal: they are
compiled once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..language.spec import decode_dtype, encode_dtype
from ..operators import operator
from .lift import land


def _rows(x: Tensor, world: int, width: int) -> Tensor:
    """Return ``x`` flattened and zero-padded as ``[world, width]``."""
    missing = world * width - x.numel()
    if not missing:
        return x.reshape(world, width)
    return torch.cat([x.reshape(-1), x.new_zeros(missing)]).view(world, width)


def _pack(xs: Sequence[Tensor], widths: Sequence[int], world: int, dtype: str, divisor: float) -> Tensor:
    packed = xs[0].new_empty((world, sum(widths)), dtype=decode_dtype(dtype))
    land(xs)
    # cat casts while it copies: one pass over the tensors.
    torch.cat([_rows(x, world, width) for x, width in zip(xs, widths, strict=True)], dim=1, out=packed)
    return packed.view(-1) if divisor == 1 else packed.view(-1).div_(divisor)


_PACK = operator(
    "pack(Tensor[] xs, SymInt[] widths, SymInt world, str dtype, float divisor) -> Tensor",
    _pack,
    lambda xs, widths, world, dtype, _: xs[0].new_empty(world * sum(widths), dtype=decode_dtype(dtype)),
)


def _unpack(flat: Tensor, widths: Sequence[int], numels: Sequence[int], world: int) -> list[Tensor]:
    pieces = [flat.new_empty(world * width) for width in widths]
    unpack_into(flat, [piece.view(world, width) for piece, width in zip(pieces, widths, strict=True)])
    return [x if x.numel() == numel else x[:numel] for x, numel in zip(pieces, numels, strict=True)]


_UNPACK = operator(
    "unpack(Tensor flat, SymInt[] widths, SymInt[] numels, SymInt world) -> Tensor[]",
    _unpack,
    lambda flat, widths, numels, world: [flat.new_empty(numel) for numel in numels],
)


def pack(
    xs: Sequence[Tensor], widths: Sequence[int], *, world: int = 1, dtype: torch.dtype, divisor: float = 1.0
) -> Tensor:
    """Return a flat bucket of ``world`` rows, one for each rank: row r is the r-th ``widths[i]`` elements of every
    ``xs[i]``, in order. Shorter tensors are zero-padded; elements are cast to ``dtype`` and divided by ``divisor``."""
    return _PACK(list(xs), list(widths), world, encode_dtype(dtype), float(divisor))


def unpack_into(flat: Tensor, rows: Sequence[Tensor]) -> None:
    """Unpack into ``rows``, tensors ``[world, widths[i]]``; eager only."""
    # With out= this is one kernel on CUDA, without it one for each piece.
    torch.split_with_sizes_copy(flat.view(len(rows[0]), -1), [x.shape[1] for x in rows], 1, out=list(rows))


def unpack(flat: Tensor, widths: Sequence[int], numels: Sequence[int], *, world: int = 1) -> list[Tensor]:
    """Invert :func:`pack`: return 1-D tensors of ``numels[i]`` elements, without padding, each with its own storage."""
    return _UNPACK(flat, list(widths), list(numels), world)
