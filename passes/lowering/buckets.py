"""Bucketing: which tensors of a graph share a collective."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from ..costs import Costs, exchange_start, gather_start, reduce_start
from ..exchange.matrices import wire_dtype
from ..exchange.orthogonalize import route
from ..exchange.shares import shares
from ..formulas import bucket_bytes
from ..language.spec import ParamSpec, decode_dtype

# Least number of buckets in a graph: one in use and the next prefetched are then at most a quarter of the weights,
# however small the model. Buckets are not cut below a mebibyte, where the host's time for a collective prevails.
_COLLECTIVES = 8
_SMALLEST = 2**20

# Least number of exchanges, if each has a mebibyte for each rank: all but the last overlap with backward.
_EXCHANGES = 4
# Least number of exchanges where momenta are offloaded, whose copies are spread over backward.
_FETCHES = 16


def largest_bucket(total_bytes: int, cap_bytes: int) -> int:
    """Return the largest bucket, in bytes, for tensors of ``total_bytes`` in all: a bucket is in memory as a whole."""
    return min(cap_bytes, max(total_bytes // _COLLECTIVES, _SMALLEST))


def group_neighbours(
    specs: Sequence[ParamSpec],
    dtype_of: Callable[[ParamSpec], str],
    costs: Costs,
    cap_bytes: int,
    *,
    reduces: bool = False,
) -> list[list[int]]:
    """Group tensors into buckets: lists of indices into ``specs``, sorted by the first of each.

    Buckets are filled in graph order, for gradients (``reduces``) from its end. Their size, in bytes of full tensors in
    the dtype that is sent (``dtype_of``), is the cost model's best (:func:`~..formulas.bucket_bytes`), at most
    ``cap_bytes``, and small enough for ``_COLLECTIVES`` buckets. Nothing overlaps with a graph's first gather or last
    reduction, so buckets grow from there: none is larger than all those between it and that end together.

    PyTorch's bucketing passes sort collectives topologically, by the nodes around them, which differ between ranks
    where shards are uneven; the order of markers does not (docs/why/decisions.md).
    """
    groups: list[list[int]] = []
    sizes: dict[int, int] = {}  # bytes by group
    open_group: dict[tuple[object, ...], int] = {}  # by key, the group that is being filled
    bytes_of = [spec.layout.numel * decode_dtype(dtype_of(spec)).itemsize for spec in specs]
    keys = [(spec.layout.redistribution_key, dtype_of(spec)) for spec in specs]
    totals: Counter[tuple[object, ...]] = Counter()
    for key, nbytes in zip(keys, bytes_of, strict=True):
        totals[key] += nbytes
    layouts = {key: spec.layout for key, spec in zip(keys, specs, strict=True)}
    start_bytes = {key: (reduce_start if reduces else gather_start)(layout, costs) for key, layout in layouts.items()}
    largest_size = largest_bucket(sum(bytes_of), cap_bytes)
    full_bytes: Counter[tuple[object, ...]] = Counter()  # bytes of a key's groups that are full
    for index in reversed(range(len(specs))) if reduces else range(len(specs)):
        key, nbytes = keys[index], bytes_of[index]
        best = max(bucket_bytes(totals[key], start_bytes[key]), _SMALLEST)
        limit = min(largest_size, best, max(full_bytes[key], start_bytes[key], _SMALLEST))
        number = open_group.get(key)
        if number is not None and sizes[number] + nbytes > limit:
            full_bytes[key] += sizes[number]
            number = None
        if number is None:
            number = open_group[key] = len(groups)
            groups.append([])
            sizes[number] = 0
        groups[number].append(index)
        sizes[number] += nbytes
    return sorted(sorted(group) for group in groups)


def weight_bytes(spec: ParamSpec) -> int:
    """Bytes of the full weight in compute dtype."""
    return spec.layout.numel * decode_dtype(spec.compute_dtype).itemsize


def bucket_matrices(specs: Sequence[ParamSpec], costs: Costs, cap_bytes: int) -> list[list[int]]:
    """Group matrices into exchanges: lists of indices of neighbours, sorted by the last of each.

    - An exchange has the cost model's best size (:func:`~..formulas.bucket_bytes`) in bytes a rank, at most
      ``cap_bytes``, and small enough for ``_EXCHANGES`` of them.
    - A single rank sends nothing and needs no receive buffer beside a send buffer: its cap is twice that.
    - Each rank owns at least one share of an exchange, as a single owner's link would be the bottleneck. Where replicas
      hand round directions, which takes longer, each replica owns at least one.
    - An exchange has enough shares to fill each device (:attr:`Costs.fill_entries`), as long as ``_EXCHANGES`` remain.
    - With offloaded momenta, which arrive once an exchange, there are at least ``_FETCHES``.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault(route(spec), []).append(index)
    buckets = []
    for members in kinds.values():
        ranks = _sharers(specs[members[0]])
        sizes = [_matrix_bytes(specs[i]) / ranks for i in members]  # bytes a rank, on average
        entries = [math.prod(specs[i].layout.joined_shape) for i in members]
        total = sum(sizes)
        first = specs[members[0]]
        replicas = first.layout.replica_group.size
        sent_bytes = total * (replicas - 1) if replicas > 1 else total
        best = max(bucket_bytes(sent_bytes, exchange_start(first.layout, costs)), _SMALLEST)
        least = math.ceil(total / (cap_bytes if ranks > 1 else 2 * cap_bytes))
        count = least
        if ranks > 1:
            count = max(least, math.ceil(sent_bytes / best), min(_EXCHANGES, int(total / _SMALLEST)))
        fewest = replicas if ranks > replicas > 1 else ranks
        share_counts = [len(shares(specs[i])) for i in members]
        filling = fewest * max(1, round(costs.fill_entries * sum(share_counts) / sum(entries)))
        count = min(count, max(sum(share_counts) // filling, _EXCHANGES, least))
        if first.muon_settings.fetched:
            count = max(count, _FETCHES)
        count = max(min(count, sum(share_counts) // fewest), 1)
        buckets += _cut(members, sizes, count, share_counts, fewest)
    return sorted(buckets, key=lambda bucket: bucket[-1])


def _cut(
    members: Sequence[int], sizes: Sequence[float], count: int, share_counts: Sequence[int], fewest: int
) -> list[list[int]]:
    """Cut ``members`` in order into at most ``count`` parts of about equal size, each of at least ``fewest`` shares."""
    total, before_bytes, part_shares = sum(sizes), 0.0, 0
    parts: list[list[int]] = []
    part_number = -1
    for index, size, share_count in zip(members, sizes, share_counts, strict=True):
        number = min(int(count * (before_bytes + size / 2) / total), count - 1) if total else 0
        if not parts or (number > part_number and part_shares >= fewest):
            parts.append([])
            part_number, part_shares = number, 0
        parts[-1].append(index)
        before_bytes, part_shares = before_bytes + size, part_shares + share_count
    if len(parts) > 1 and part_shares < fewest:
        too_small = parts.pop()
        parts[-1] += too_small
    return parts


def _sharers(spec: ParamSpec) -> int:
    """Return the number of ranks to which the matrices of a parameter are dealt."""
    layout = spec.layout
    return layout.replica_group.size * (layout.owner_group.size if spec.muon_settings.exchange == "owner" else 1)


def _matrix_bytes(spec: ParamSpec) -> int:
    return math.prod(spec.layout.joined_shape) * wire_dtype(spec.muon_settings).itemsize


def exchanged_bytes(spec: ParamSpec) -> int:
    """Return the bytes of one matrix in a rank's send and receive buffers, averaged over ranks."""
    layout = spec.layout
    ranks = layout.owner_group.size * layout.replica_group.size
    received = _matrix_bytes(spec) // _sharers(spec)
    return 0 if ranks == 1 else _matrix_bytes(spec) // ranks + received
