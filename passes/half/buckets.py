"""Which tensors of a graph share a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..spec import ParamSpec, decode_dtype

__all__ = ["bucket_matrices", "group_neighbours"]

# A graph's tensors are cut into this many collectives or more: with the next one prefetched, a quarter of a model's
# weights are gathered at a time, however small the model is. Below a mebibyte latency outweighs that.
_COLLECTIVES = 8
_SMALLEST = 2**20


def group_neighbours(
    specs: Sequence[ParamSpec], dtype_of: Callable[[ParamSpec], str], cap_bytes: int
) -> list[list[int]]:
    """Indices of neighbours in graph order that can share one collective.

    Up to ``cap_bytes`` of full tensors each, or less where that would make fewer than ``_COLLECTIVES``.

    Not PyTorch's own bucketing passes: their topological sort orders collectives by what surrounds them, which is not
    the same on every rank when shards are uneven (docs/decisions.md). Marker order is.
    """
    groups: list[list[int]] = []
    sizes: dict[int, int] = {}
    open_group: dict[tuple[object, ...], int] = {}
    bytes_of = [spec.layout.numel * decode_dtype(dtype_of(spec)).itemsize for spec in specs]
    cap_bytes = min(cap_bytes, max(sum(bytes_of) // _COLLECTIVES, _SMALLEST))
    for index, (spec, nbytes) in enumerate(zip(specs, bytes_of, strict=True)):
        key = (spec.layout.company, dtype_of(spec))
        number = open_group.get(key)
        if number is None or sizes[number] + nbytes > cap_bytes:
            number = open_group[key] = len(groups)
            groups.append([])
            sizes[number] = 0
        groups[number].append(index)
        sizes[number] += nbytes
    return groups


def bucket_matrices(specs: Sequence[ParamSpec], cap_bytes: int) -> list[list[int]]:
    """Indices of neighbours up to ``cap_bytes`` of full matrices each: bounds the memory of one exchange."""
    buckets: list[list[int]] = []
    size = 0
    for index, spec in enumerate(specs):
        nbytes = spec.layout.numel * decode_dtype(spec.dtype).itemsize
        if not buckets or size + nbytes > cap_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += nbytes
    return buckets
