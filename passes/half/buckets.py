"""Which tensors of a graph share a collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..exchange.matrices import wire_dtype
from ..exchange.orthogonalize import route
from ..spec import ParamSpec, decode_dtype

__all__ = ["bucket_matrices", "exchanged_bytes", "group_neighbours"]

# A graph's tensors are cut into this many collectives or more: with the next one prefetched, a quarter of a model's
# weights are gathered at a time, however small the model is. Below a mebibyte latency outweighs that.
_COLLECTIVES = 8
_SMALLEST = 2**20

# So many exchanges or more, where each is a mebibyte for every rank: all but the last travel under backward.
_EXCHANGES = 4


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
    """Indices of neighbours that are exchanged and orthogonalized together, ordered by the last of each.

    About ``cap_bytes`` of matrices for each rank, or less where that would make fewer than ``_EXCHANGES``; but a matrix
    for each rank at least, since one with a single owner arrives as fast as that owner's link lets it.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault(route(spec), []).append(index)
    buckets = []
    for members in kinds.values():
        ranks = _sharers(specs[members[0]])
        sizes = [_matrix_bytes(specs[i]) / ranks for i in members]
        total = sum(sizes)
        count = max(math.ceil(total / cap_bytes), min(_EXCHANGES, int(total / _SMALLEST)) if ranks > 1 else 0)
        count = max(min(count, len(members) // ranks), 1)
        cut: list[list[int]] = [[] for _ in range(count)]
        before = 0.0
        for index, size in zip(members, sizes, strict=True):
            middle = before + size / 2
            cut[min(int(count * middle / total), count - 1) if total else 0].append(index)
            before += size
        buckets += [bucket for bucket in cut if bucket]
    return sorted(buckets, key=lambda bucket: bucket[-1])


def _sharers(spec: ParamSpec) -> int:
    """Ranks that orthogonalize a share of the matrices each."""
    layout = spec.layout
    return layout.copying.size * (layout.meeting.size if spec.muon_settings.exchange == "owner" else 1)


def _matrix_bytes(spec: ParamSpec) -> int:
    return math.prod(spec.layout.joined_shape) * wire_dtype(spec.muon_settings).itemsize


def exchanged_bytes(spec: ParamSpec) -> int:
    """Bytes that a rank sends and receives at a time when a matrix is exchanged, on average over the ranks."""
    layout = spec.layout
    ranks = layout.meeting.size * layout.copying.size
    received = _matrix_bytes(spec) // _sharers(spec)
    return 0 if ranks == 1 else _matrix_bytes(spec) // ranks + received
