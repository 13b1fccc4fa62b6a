"""Formulas of communication and arithmetic, once.

Bytes and operations as sympy expressions in rows, cols, world size, steps and dtype size. They choose the exchange
strategy, balance the owners, print in ``optimizer.summary()``, and are what the tests compare counted graphs with.

Sources: byte table in docs/exchange.md (one matrix of S bytes, W ranks, sent per rank); operation counts of
Newton-Schulz, dense products at 2 per multiply-add, from ``kernels/operations.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import sympy

from compile_muon.kernels.operations import gram_flops, standard_flops

__all__ = [
    "BYTES_SENT",
    "OWNER_WORK",
    "WEIGHT_BYTES",
    "bytes_sent",
    "choose_exchange",
    "gram_operations",
    "owner_work",
    "standard_operations",
    "weight_bytes",
]

R, C, W, T, B = sympy.symbols("rows cols world steps itemsize", positive=True, integer=True)
K = sympy.Min(R, C)
L = sympy.Max(R, C)
S = R * C * B

#: bytes that one rank sends for one matrix and optimizer step, on average over the ranks
BYTES_SENT: dict[str, sympy.Expr] = {
    "local": sympy.Integer(0),
    "replicate": S * (W - 1) / W,
    "owner": 2 * S * (W - 1) / W**2,
    # stage 0: gradients are whole already, only the directions travel back
    "owner_whole": S * (W - 1) / W,
}

#: bytes that one rank sends to unshard a weight once, to reduce-scatter or all-reduce its gradient once
WEIGHT_BYTES: dict[str, sympy.Expr] = {
    "all_gather": S * (W - 1) / W,
    "reduce_scatter": S * (W - 1) / W,
    "all_reduce": 2 * S * (W - 1) / W,
}

#: operations of the standard form, and of the gram form with one restart
STANDARD_OPERATIONS: sympy.Expr = sympy.expand(standard_flops(K, L, T))
GRAM_OPERATIONS: sympy.Expr = sympy.expand(gram_flops(K, L, T, 1))

#: what the owner of a matrix pays for it: multiply-adds of the standard form, steps k^2 (2 l + k)
OWNER_WORK: sympy.Expr = sympy.expand(STANDARD_OPERATIONS / 2)

# Nominal machine of the exchange choice: it only has to rank two strategies, so orders of magnitude do.
_LINK_BYTES_PER_SECOND = 2.0e10
_OPERATIONS_PER_SECOND = 2.0e13
_LATENCY_SECONDS = 2.0e-5


@functools.cache
def _function(expression: sympy.Expr) -> Callable[..., float]:
    return sympy.lambdify((R, C, W, T, B), expression, modules=[{"Min": min, "Max": max}, "math"])


def _evaluate(expression: sympy.Expr, rows: int, cols: int, world: int = 1, steps: int = 1, itemsize: int = 1) -> float:
    return _function(expression)(rows, cols, world, steps, itemsize)


def bytes_sent(strategy: str, rows: int, cols: int, *, world: int, itemsize: int) -> float:
    """Bytes one rank sends, on average, to orthogonalize one ``rows x cols`` matrix under ``strategy``."""
    return _evaluate(BYTES_SENT[strategy], rows, cols, world, 1, itemsize)


def weight_bytes(collective: str, rows: int, cols: int, *, world: int, itemsize: int) -> float:
    """Bytes one rank sends for one unshard or one gradient reduction of a ``rows x cols`` parameter."""
    return _evaluate(WEIGHT_BYTES[collective], rows, cols, world, 1, itemsize)


def owner_work(rows: int, cols: int, *, steps: int) -> float:
    """Multiply-adds of Newton-Schulz on one matrix: the weight of the owner balance."""
    return _evaluate(OWNER_WORK, rows, cols, 1, steps, 1)


def standard_operations(rows: int, cols: int, *, steps: int) -> float:
    """Operations of the standard form with dense products."""
    return _evaluate(STANDARD_OPERATIONS, rows, cols, 1, steps, 1)


def gram_operations(rows: int, cols: int, *, steps: int) -> float:
    """Operations of the gram form with dense products and one restart."""
    return _evaluate(GRAM_OPERATIONS, rows, cols, 1, steps, 1)


def choose_exchange(rows: int, cols: int, *, world: int, steps: int, itemsize: int) -> str:
    """The cheaper of ``replicate`` and ``owner`` for one matrix.

    Time = latency x collectives + bytes / link + operations / throughput on a nominal machine. Under ``owner`` a rank
    computes 1/world of the matrices; under ``replicate`` all of them, but with one collective instead of two.
    """
    if world == 1:
        return "local"
    operations = standard_operations(rows, cols, steps=steps)
    seconds = {
        strategy: collectives * _LATENCY_SECONDS
        + bytes_sent(strategy, rows, cols, world=world, itemsize=itemsize) / _LINK_BYTES_PER_SECOND
        + operations / ranks_sharing / _OPERATIONS_PER_SECOND
        for strategy, collectives, ranks_sharing in (("replicate", 1, 1), ("owner", 2, world))
    }
    return min(seconds, key=seconds.__getitem__)
