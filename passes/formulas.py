"""Formulas of communication, once: bytes as sympy expressions in rows, cols, ranks along each axis and dtype size.

They choose bucket sizes, print in ``optimizer.summary()``, and are what the tests compare counted graphs with. Source:
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

#: what the name of a strategy ends with below where state is cut over all ranks (``Layout.cut_twice``)
OVER_ALL = "_over_all"

#: bytes that one rank sends over each axis for one matrix and optimizer step, on average over the ranks
BYTES_SENT: dict[str, dict[str, sympy.Expr]] = {
    # whole matrices are where they are needed; replicas share a stack of them
    "local": {"replicate": S * (M - 1) / W},
    # rows to an owner inside a replica and directions back; then the rows of each replica's part to the others
    "owner": {"shard": 2 * S * (N - 1) / (N * W), "replicate": S * (M - 1) / W},
    # state is cut over all ranks: experts stay where they are, ...
    "local_over_all": {},
    # ... and pieces travel to an owner anywhere and back
    "owner_over_all": {"all": 2 * S * (W - 1) / W**2},
    # nothing is cut: gradients are whole already, only the directions travel, over both axes as one
    "owner_whole": {"all": S * (W - 1) / W},
}

#: bytes that one rank sends over each axis to unshard a weight once, to reduce its gradient once
WEIGHT_BYTES: dict[str, dict[str, sympy.Expr]] = {
    "all_gather": {"shard": S * (N - 1) / N},
    "reduce_scatter": {"shard": S * (N - 1) / N, "replicate": 2 * S / N * (M - 1) / M},
    "all_reduce": {"all": 2 * S * (W - 1) / W},
    # state over all ranks: a slice out of its pieces once a step; a gradient to its pieces
    "slice_gather": {"replicate": S / N * (M - 1) / M},
    "reduce_scatter_over_all": {"shard": S * (N - 1) / N, "replicate": S / N * (M - 1) / M},
}

#: rows of a parameter with those that pad it: a gather and a reduce-scatter carry as many from every rank. Rows of a
#: stack are its experts: over more ranks than it has of them, each rank still sends one
PADDED_ROWS: dict[str, sympy.Expr] = {
    "": N * sympy.ceiling(R / N),
    # a slice is padded to pieces of one size
    OVER_ALL: W * sympy.ceiling(sympy.ceiling(R / N) / M),
}

#: tokens of a rank, experts each goes to, elements of one, ranks along the axis
TOKENS, SLOTS, HIDDEN, RANKS = sympy.symbols("tokens slots hidden ranks", positive=True, integer=True)
_AWAY = (RANKS - 1) / RANKS

#: bytes of activations and their gradients that one rank sends in one forward and backward, by what the model does
ACTIVATION_BYTES: dict[str, sympy.Expr] = {
    # one layer of experts over ``expert``: to them and back, and in backward the same; routers that choose evenly
    "dispatch": 4 * TOKENS * SLOTS * HIDDEN * B * _AWAY,
    # a matrix cut by columns and the one behind it, cut by rows, over ``tensor``: an all-reduce of what they make in
    # forward, one of their input's gradient in backward; or a reduce-scatter and a gather for each
    "tensor_pair": 4 * TOKENS * HIDDEN * B * _AWAY,
}

#: bytes of all tensors that go through collectives of one kind, and of what a link carries in the time that one starts
TOTAL, START = sympy.symbols("total start", positive=True)

#: the size of those that share a collective for which all have come soonest where nothing hides it, (total / size + 1)
#: (start + size): every collective starts and sends, and whoever needs the first one waits for it whole
BUCKET_BYTES: sympy.Expr = sympy.sqrt(TOTAL * START)


@functools.cache
def _function(expression: sympy.Expr) -> Callable[..., float]:
    return sympy.lambdify((R, C, N, M, B), expression, modules=[{"Min": min, "Max": max}, "math"])


def bytes_by_axis(
    name: str, rows: int, cols: int, *, shards: int, replicas: int = 1, itemsize: int
) -> dict[str, float]:
    """Bytes one rank sends over each axis, of :data:`BYTES_SENT` to orthogonalize one ``rows x cols`` matrix, or of
    :data:`WEIGHT_BYTES` for one unshard or one gradient reduction of such a parameter."""
    table = {**BYTES_SENT, **WEIGHT_BYTES}[name]
    found = {axis: _function(formula)(rows, cols, shards, replicas, itemsize) for axis, formula in table.items()}
    return {axis: sent for axis, sent in found.items() if sent}


@functools.cache
def padded_rows(rows: int, *, shards: int, replicas: int = 1, state_over_all: bool = False) -> int:
    """``rows`` with what pads them, see :data:`PADDED_ROWS`; a rank has at most ``1 / shards`` of them, or of all."""
    formula = PADDED_ROWS[OVER_ALL if state_over_all else ""]
    return int(_function(formula)(rows, 1, shards, replicas, 1))


def activation_bytes(what: str, *, tokens: int, hidden: int, ranks: int, slots: int = 1, itemsize: int) -> float:
    """Bytes one rank sends for its activations, see :data:`ACTIVATION_BYTES`.

    Args:
        what: "dispatch", of one layer of experts, or "tensor_pair".
        tokens: of a rank; of ``tensor_pair``, which its ranks have in common.
        slots: experts that a token goes to.
        ranks: along the axis.
    """
    given = {TOKENS: tokens, SLOTS: slots, HIDDEN: hidden, RANKS: ranks, B: itemsize}
    return float(ACTIVATION_BYTES[what].subs(given))


def bucket_bytes(total: float, start: float) -> int:
    """The best size of collectives that send ``total`` bytes in all; see :data:`BUCKET_BYTES`."""
    return math.isqrt(round(total) * round(start))
