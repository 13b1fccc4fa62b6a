"""Which tensors of a graph share a collective."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from ..costs import Costs, exchange_start, gather_start, reduce_start
from ..exchange.matrices import wire_dtype
from ..exchange.orthogonalize import route
from ..exchange.shares import shares
from ..formulas import bucket_bytes
from ..language.spec import ParamSpec, decode_dtype

__all__ = ["bucket_matrices", "exchanged_bytes", "group_neighbours", "largest_bucket", "weight_bytes"]

# A graph's tensors are cut into this many collectives or more: with the next one prefetched, a quarter of a model's
# weights are gathered at a time, however small the model is. Below a mebibyte what a collective costs its host
# outweighs that.
_COLLECTIVES = 8
_SMALLEST = 2**20

# So many exchanges or more, where each is a mebibyte for every rank: all but the last travel under backward.
_EXCHANGES = 4
#: buckets at least, where momenta are fetched from elsewhere
_FETCHES = 16


def largest_bucket(total_bytes: int, cap_bytes: int) -> int:
    """What may share a collective of tensors that have ``total_bytes`` in all, for they are in memory together."""
    return min(cap_bytes, max(total_bytes // _COLLECTIVES, _SMALLEST))


def group_neighbours(
    specs: Sequence[ParamSpec],
    dtype_of: Callable[[ParamSpec], str],
    costs: Costs,
    cap_bytes: int,
    *,
    reduces: bool = False,
) -> list[list[int]]:
    """Indices of neighbours in graph order that can share one collective, in the order of the first of each.

    As much of full tensors as the cost model finds best (:data:`~..formulas.BUCKET_BYTES`), up to ``cap_bytes``, or
    less where that would make fewer than ``_COLLECTIVES``. Nothing hides the first gather of a graph, nor its last
    reduction: they are small, and no bucket is larger than all that come before it, or behind it.

    Args:
        dtype_of: the dtype that a tensor is sent in.
        reduces: they are gradients, and not weights to gather.

    Not PyTorch's own bucketing passes: their topological sort orders collectives by what surrounds them, which is not
    the same on every rank when shards are uneven (docs/why/decisions.md). Marker order is.
    """
    groups: list[list[int]] = []
    sizes: dict[int, int] = {}
    open_group: dict[tuple[object, ...], int] = {}
    bytes_of = [spec.layout.numel * decode_dtype(dtype_of(spec)).itemsize for spec in specs]
    keys = [(spec.layout.company, dtype_of(spec)) for spec in specs]
    totals: Counter[tuple[object, ...]] = Counter()
    for key, nbytes in zip(keys, bytes_of, strict=True):
        totals[key] += nbytes
    layouts = {key: spec.layout for key, spec in zip(keys, specs, strict=True)}
    starts = {key: (reduce_start if reduces else gather_start)(layout, costs) for key, layout in layouts.items()}
    largest = largest_bucket(sum(bytes_of), cap_bytes)
    before: Counter[tuple[object, ...]] = Counter()  # bytes of the groups of a key that are full
    for index in reversed(range(len(specs))) if reduces else range(len(specs)):
        key, nbytes = keys[index], bytes_of[index]
        best = max(bucket_bytes(totals[key], starts[key]), _SMALLEST)
        limit = min(largest, best, max(before[key], starts[key], _SMALLEST))
        number = open_group.get(key)
        if number is not None and sizes[number] + nbytes > limit:
            before[key] += sizes[number]
            number = None
        if number is None:
            number = open_group[key] = len(groups)
            groups.append([])
            sizes[number] = 0
        groups[number].append(index)
        sizes[number] += nbytes
    return sorted(sorted(group) for group in groups)


def weight_bytes(spec: ParamSpec) -> int:
    """Of the whole weight as the model sees it."""
    return spec.layout.numel * decode_dtype(spec.compute_dtype).itemsize


def bucket_matrices(specs: Sequence[ParamSpec], costs: Costs, cap_bytes: int) -> list[list[int]]:
    """Indices of neighbours that are exchanged and orthogonalized together, ordered by the last of each.

    About as many bytes of matrices for each rank as the cost model finds best (:data:`~..formulas.BUCKET_BYTES`), up to
    ``cap_bytes``, or less where that would make fewer than ``_EXCHANGES``. One rank, which sends nothing, has each
    matrix once where others have what they send beside what they receive: there it is up to twice as many. But a matrix
    for each rank at least, since one with a single owner arrives as fast as that owner's link lets it; or where
    directions are handed round among replicas, which takes longer, one for each of these. And rather as many as fill
    the device of each (:attr:`Costs.fill_entries`), as long as ``_EXCHANGES`` are left. Momenta that are fetched arrive
    for a bucket at once: there are ``_FETCHES`` then, so that they come all along backward.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault(route(spec), []).append(index)
    buckets = []
    for members in kinds.values():
        ranks = _sharers(specs[members[0]])
        sizes = [_matrix_bytes(specs[i]) / ranks for i in members]
        entries = [math.prod(specs[i].layout.joined_shape) for i in members]
        total = sum(sizes)
        first = specs[members[0]]
        copies = first.layout.replica_group.size
        sent = total * (copies - 1) if copies > 1 else total
        best = max(bucket_bytes(sent, exchange_start(first.layout, costs)), _SMALLEST)
        least = math.ceil(total / (cap_bytes if ranks > 1 else 2 * cap_bytes))
        count = least
        if ranks > 1:
            count = max(least, math.ceil(sent / best), min(_EXCHANGES, int(total / _SMALLEST)))
        fewest = copies if ranks > copies > 1 else ranks
        dealt = [len(shares(specs[i])) for i in members]
        filling = fewest * max(1, round(costs.fill_entries * sum(dealt) / sum(entries)))
        count = min(count, max(sum(dealt) // filling, _EXCHANGES, least))
        if first.muon_settings.fetched:
            count = max(count, _FETCHES)
        count = max(min(count, sum(dealt) // fewest), 1)
        buckets += _cut(members, sizes, count, dealt, fewest)
    return sorted(buckets, key=lambda bucket: bucket[-1])


def _cut(
    members: Sequence[int], sizes: Sequence[float], count: int, dealt: Sequence[int], fewest: int
) -> list[list[int]]:
    """``members`` in their order, in ``count`` parts of about the same size, or less where large ones leave no
    ``fewest`` of what is ``dealt`` for each."""
    total, before, held = sum(sizes), 0.0, 0
    parts: list[list[int]] = []
    begun = -1
    for index, size, owned in zip(members, sizes, dealt, strict=True):
        number = min(int(count * (before + size / 2) / total), count - 1) if total else 0
        if not parts or (number > begun and held >= fewest):
            parts.append([])
            begun, held = number, 0
        parts[-1].append(index)
        before, held = before + size, held + owned
    if len(parts) > 1 and held < fewest:
        short = parts.pop()
        parts[-1] += short
    return parts


def _sharers(spec: ParamSpec) -> int:
    """Ranks that orthogonalize a share of the matrices each."""
    layout = spec.layout
    return layout.replica_group.size * (layout.owner_group.size if spec.muon_settings.exchange == "owner" else 1)


def _matrix_bytes(spec: ParamSpec) -> int:
    return math.prod(spec.layout.joined_shape) * wire_dtype(spec.muon_settings).itemsize


def exchanged_bytes(spec: ParamSpec) -> int:
    """Bytes that a rank sends and receives at a time when a matrix is exchanged, on average over the ranks."""
    layout = spec.layout
    ranks = layout.owner_group.size * layout.replica_group.size
    received = _matrix_bytes(spec) // _sharers(spec)
    return 0 if ranks == 1 else _matrix_bytes(spec) // ranks + received
