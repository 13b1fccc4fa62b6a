"""Formulas of communication: bytes as sympy expressions in rows, cols, ranks along each axis and dtype size.

They choose bucket sizes, appear in ``optimizer.summary()``, and tests compare counted graphs with them. Source: the
byte table in docs/why/exchange.md (one matrix of S bytes, N shards x M replicas, sent per rank).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import sympy

__all__ = [
    "ACTIVATION_BYTES",
    "BUCKET_BYTES",
    "BYTES_SENT",
    "OVER_ALL",
    "PADDED_ROWS",
    "WEIGHT_BYTES",
    "activation_bytes",
    "bucket_bytes",
    "bytes_by_axis",
    "padded_rows",
]

R, C, B = sympy.symbols("rows cols itemsize", positive=True, integer=True)
#: ranks along ``shard`` and ``replicate``, and all of them
N, M = sympy.symbols("shards replicas", positive=True, integer=True)
W = N * M
S = R * C * B

#: suffix of names below for state that is sharded over all ranks (``Layout.cut_twice``)
OVER_ALL = "_over_all"

#: bytes that one rank sends over each axis for one matrix and optimizer step, on average over the ranks
BYTES_SENT: dict[str, dict[str, sympy.Expr]] = {
    # ranks have whole matrices; replicas share the work on a stack
    "local": {"replicate": S * (M - 1) / W},
    # rows to an owner inside a replica and directions back; then each replica's directions to the others
    "owner": {"shard": 2 * S * (N - 1) / (N * W), "replicate": S * (M - 1) / W},
    # state is sharded over all ranks: experts stay on their ranks, ...
    "local_over_all": {},
    # ... and pieces travel to an owner anywhere and back
    "owner_over_all": {"all": 2 * S * (W - 1) / W**2},
    # nothing is sharded: gradients are whole, only directions travel, over both axes as one
    "owner_whole": {"all": S * (W - 1) / W},
}

#: bytes that one rank sends over each axis to unshard a weight once, to reduce its gradient once
WEIGHT_BYTES: dict[str, dict[str, sympy.Expr]] = {
    "all_gather": {"shard": S * (N - 1) / N},
    "reduce_scatter": {"shard": S * (N - 1) / N, "replicate": 2 * S / N * (M - 1) / M},
    "all_reduce": {"all": 2 * S * (W - 1) / W},
    # state over all ranks: a slice gathered from its pieces once a step; a gradient scattered to its pieces
    "slice_gather": {"replicate": S / N * (M - 1) / M},
    "reduce_scatter_over_all": {"shard": S * (N - 1) / N, "replicate": S / N * (M - 1) / M},
}

#: rows of a parameter with padding, as gathers and reduce-scatters carry equally many for every rank. Rows of a stack
#: are its experts: with more ranks than experts, each rank still sends one
PADDED_ROWS: dict[str, sympy.Expr] = {
    "": N * sympy.ceiling(R / N),
    # a slice is padded to pieces of one size
    OVER_ALL: W * sympy.ceiling(sympy.ceiling(R / N) / M),
}

#: tokens of a rank, experts per token, elements of a token, ranks along the axis
TOKENS, SLOTS, HIDDEN, RANKS = sympy.symbols("tokens slots hidden ranks", positive=True, integer=True)
_AWAY = (RANKS - 1) / RANKS

#: bytes of activations and their gradients that one rank sends in one forward and backward
ACTIVATION_BYTES: dict[str, sympy.Expr] = {
    # one layer of experts over ``expert``: tokens to them and back, in backward the same; evenly balanced routers
    "dispatch": 4 * TOKENS * SLOTS * HIDDEN * B * _AWAY,
    # a column-wise and a row-wise parallel matrix over ``tensor``: an all-reduce of their output in forward, one of
    # their input's gradient in backward; or a reduce-scatter and an all-gather for each
    "tensor_pair": 4 * TOKENS * HIDDEN * B * _AWAY,
}

#: bytes of all tensors in collectives of one kind, and bytes that a link carries while one collective starts
TOTAL, START = sympy.symbols("total start", positive=True)

#: bucket size of the least exposed time, (total / size + 1) (start + size): every bucket starts and sends, and the
#: first reader waits for a whole bucket
BUCKET_BYTES: sympy.Expr = sympy.sqrt(TOTAL * START)


@functools.cache
def _function(expression: sympy.Expr) -> Callable[..., float]:
    return sympy.lambdify((R, C, N, M, B), expression, modules=[{"Min": min, "Max": max}, "math"])


def bytes_by_axis(
    name: str, rows: int, cols: int, *, shards: int, replicas: int = 1, itemsize: int
) -> dict[str, float]:
    """Bytes that one rank sends over each axis to orthogonalize one ``rows x cols`` matrix (``name`` in
    :data:`BYTES_SENT`), or for one unshard or one reduction of such a parameter (:data:`WEIGHT_BYTES`)."""
    table = {**BYTES_SENT, **WEIGHT_BYTES}[name]
    sent_by_axis = {axis: _function(formula)(rows, cols, shards, replicas, itemsize) for axis, formula in table.items()}
    return {axis: sent for axis, sent in sent_by_axis.items() if sent}


@functools.cache
def padded_rows(rows: int, *, shards: int, replicas: int = 1, state_over_all: bool = False) -> int:
    """``rows`` with padding (:data:`PADDED_ROWS`): equally many for each shard, with state over all for each rank."""
    formula = PADDED_ROWS[OVER_ALL if state_over_all else ""]
    return int(_function(formula)(rows, 1, shards, replicas, 1))


def activation_bytes(what: str, *, tokens: int, hidden: int, ranks: int, slots: int = 1, itemsize: int) -> float:
    """Bytes that one rank sends for ``what``, a key of :data:`ACTIVATION_BYTES`.

    ``tokens`` are a rank's, or for ``tensor_pair`` those that its ranks have in common; ``slots`` the experts of a
    token; ``ranks`` those along the axis.
    """
    values = {TOKENS: tokens, SLOTS: slots, HIDDEN: hidden, RANKS: ranks, B: itemsize}
    return float(ACTIVATION_BYTES[what].subs(values))


def bucket_bytes(total: float, start: float) -> int:
    """Best bucket size for collectives of ``total`` bytes in all, see :data:`BUCKET_BYTES`."""
    return math.isqrt(round(total) * round(start))
