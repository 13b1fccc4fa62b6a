"""Flat buckets of tensors, as opaque ops ``pack`` and ``unpack``, and ``lift`` for shards in host memory.

Inductor would generate one kernel for every copy into and out of a bucket, since offsets differ: five times as many as
a 12-layer model has kernels of its own. An op is one batched copy, and the kernels of equal layers, without offsets,
stay equal and are compiled once.

With ``offload_param``, shards are CUDA tensors whose memory is pinned host memory (unified addressing), which a GPU
reads and writes over its link: optimizers, checkpoints and weight averages need no special case. Gathers read the
shards at every use of the weights, so they read copies on the device that the copy engine makes ahead.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..language.spec import decode_dtype, encode_dtype
from ..operators import operator

#: Attribute of a copy: the event that ends the copying. An op can return tensors only, so the event travels on them.
_ARRIVED = "_muon_zero_arrived"


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """Return the one stream of the device on which all copies of shards queue up."""
    return torch.Stream(device)


def _lift(shards: Sequence[Tensor]) -> list[Tensor]:
    copies = _like(shards)
    if not shards[0].is_cuda:
        return [out.copy_(shard) for out, shard in zip(copies, shards, strict=True)]
    stream = _copy_stream(shards[0].device)
    # Kernels queued before may still read the memory that the allocator reused here, or write the shards (the step).
    stream.wait_event(torch.accelerator.current_stream(shards[0].device).record_event())
    with stream:
        for out, shard in zip(copies, shards, strict=True):
            out.copy_(shard, non_blocking=True)
        arrived = stream.record_event()
    for out in copies:
        setattr(out, _ARRIVED, arrived)
    return copies


def _like(shards: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(shard, memory_format=torch.contiguous_format) for shard in shards]


#: ``lift(shards)``: copies on the device, still under way at return. Only ``pack`` may read them, as it waits.
LIFT = operator("lift(Tensor[] shards) -> Tensor[]", _lift, _like, calls_python=True)


def _rows(x: Tensor, world: int, width: int) -> Tensor:
    """Return ``x`` flattened and zero-padded as ``[world, width]``."""
    missing = world * width - x.numel()
    if not missing:
        return x.reshape(world, width)
    return torch.cat([x.reshape(-1), x.new_zeros(missing)]).view(world, width)


def _pack(xs: Sequence[Tensor], widths: Sequence[int], world: int, dtype: str, divisor: float) -> Tensor:
    packed = xs[0].new_empty((world, sum(widths)), dtype=decode_dtype(dtype))
    for arrived in {event for x in xs if (event := getattr(x, _ARRIVED, None)) is not None}:
        torch.accelerator.current_stream(xs[0].device).wait_event(arrived)
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
