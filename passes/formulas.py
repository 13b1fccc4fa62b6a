"""Formulas of communication: bytes by rows, cols, ranks along each axis and dtype size.

They choose bucket sizes, appear in ``optimizer.summary()``, and tests compare counted graphs with them. Source: the
byte table in docs/why/exchange.md (one matrix of S bytes, N shards x M replicas, sent per rank).
"""

import math

#: suffix of names below for state that is sharded over all ranks (``Layout.cut_twice``)
OVER_ALL = "_over_all"


def bytes_by_axis(
    name: str, rows: int, cols: int, *, shards: int, replicas: int = 1, itemsize: int
) -> dict[str, float]:
    """Bytes that one rank sends over each axis, on average over the ranks, for one ``rows x cols`` matrix: a name of an
    exchange to orthogonalize it once, of a collective to unshard the weight or to reduce its gradient once."""
    s, n, m = rows * cols * itemsize, shards, replicas
    w = n * m
    sent_by_axis = {
        # ranks have whole matrices; replicas share the work on a stack
        "local": {"replicate": s * (m - 1) / w},
        # rows to an owner inside a replica and directions back; then each replica's directions to the others
        "owner": {"shard": 2 * s * (n - 1) / (n * w), "replicate": s * (m - 1) / w},
        # state is sharded over all ranks: experts stay on their ranks, ...
        "local_over_all": {},
        # ... and pieces travel to an owner anywhere and back
        "owner_over_all": {"all": 2 * s * (w - 1) / w**2},
        # nothing is sharded: gradients are whole, only directions travel, over both axes as one
        "owner_whole": {"all": s * (w - 1) / w},
        "all_gather": {"shard": s * (n - 1) / n},
        "reduce_scatter": {"shard": s * (n - 1) / n, "replicate": 2 * s * (m - 1) / w},
        "all_reduce": {"all": 2 * s * (w - 1) / w},
        # state over all ranks: a slice gathered from its pieces once a step; a gradient scattered to its pieces
        "slice_gather": {"replicate": s * (m - 1) / w},
        "reduce_scatter_over_all": {"shard": s * (n - 1) / n, "replicate": s * (m - 1) / w},
    }[name]
    return {axis: sent for axis, sent in sent_by_axis.items() if sent}


def bucket_bytes(total: float, start: float) -> int:
    """Best bucket size for collectives of ``total`` bytes, on a link that carries ``start`` while one of them starts.

    It exposes the least time, (total / size + 1) (start + size): every bucket starts and sends, and the first reader
    waits for a whole bucket.
    """
    return math.isqrt(round(total) * round(start))
