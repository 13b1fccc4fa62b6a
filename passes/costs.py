"""Formulas of communication and arithmetic, once.

Bytes and operations as sympy expressions in rows, cols, ranks along each axis, steps and dtype size. They choose the
exchange strategy, balance the owners, print in ``optimizer.summary()``, and are what the tests compare counted graphs
with.

Sources: byte table in docs/why/exchange.md (one matrix of S bytes, N shards x M replicas, sent per rank); operation
counts of Newton-Schulz, dense products at 2 per multiply-add, from ``kernels/operations.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import sympy
import torch

from compile_muon.kernels.operations import gram_flops, standard_flops

from .machine import Machine

__all__ = [
    "ACTIVATION_BYTES",
    "BUCKET_BYTES",
    "BUCKET_TIME",
    "BYTES_SENT",
    "OVER_ALL",
    "OWNER_WORK",
    "PADDED_ROWS",
    "WEIGHT_BYTES",
    "activation_bytes",
    "bucket_bytes",
    "bytes_by_axis",
    "bytes_sent",
    "choose_exchange",
    "gram_operations",
    "newton_schulz_seconds",
    "owner_work",
    "padded_rows",
    "standard_operations",
    "start_bytes",
    "weight_bytes",
    "weight_bytes_by_axis",
    "weight_start_bytes",
]

R, C, T, B = sympy.symbols("rows cols steps itemsize", positive=True, integer=True)
#: ranks along ``shard`` and ``replicate``, and all of them
N, M = sympy.symbols("shards replicas", positive=True, integer=True)
W = N * M
K = sympy.Min(R, C)
L = sympy.Max(R, C)
S = R * C * B

#: what the name of a strategy ends with below where state is cut over all ranks (``Layout.cut_twice``)
OVER_ALL = "_over_all"

#: bytes that one rank sends over each axis for one matrix and optimizer step, on average over the ranks
BYTES_SENT: dict[str, dict[str, sympy.Expr]] = {
    # whole matrices are where they are needed; replicas share a stack of them
    "local": {"replicate": S * (M - 1) / W},
    "replicate": {"shard": S * (N - 1) / N},
    # rows to an owner inside a replica and directions back; then the rows of each replica's part to the others
    "owner": {"shard": 2 * S * (N - 1) / (N * W), "replicate": S * (M - 1) / W},
    # state is cut over all ranks: experts stay where they are, ...
    "local_over_all": {},
    # ... pieces are gathered to slices, and those to matrices, ...
    "replicate_over_all": {"replicate": S / N * (M - 1) / M, "shard": S * (N - 1) / N},
    # ... or pieces travel to an owner anywhere and back
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

#: bytes of all tensors that go through collectives of one kind, of those that share one, and of what a link carries in
#: the time that a collective takes to start
TOTAL, SIZE, START = sympy.symbols("total size start", positive=True)

#: how long it takes until all have come where nothing hides it, in bytes that the link could carry meanwhile: every
#: collective starts and sends, and whoever needs the first one waits for it whole
BUCKET_TIME: sympy.Expr = (TOTAL / SIZE + 1) * (START + SIZE)

#: the size for which that is shortest
BUCKET_BYTES: sympy.Expr = sympy.sqrt(TOTAL * START)

#: operations of the standard form, and of the gram form with one restart
STANDARD_OPERATIONS: sympy.Expr = sympy.expand(standard_flops(K, L, T))
GRAM_OPERATIONS: sympy.Expr = sympy.expand(gram_flops(K, L, T, 1))

#: what the owner of a matrix pays for it: multiply-adds of the standard form, steps k^2 (2 l + k)
OWNER_WORK: sympy.Expr = sympy.expand(STANDARD_OPERATIONS / 2)


@functools.cache
def _function(expression: sympy.Expr) -> Callable[..., float]:
    return sympy.lambdify((R, C, N, M, T, B), expression, modules=[{"Min": min, "Max": max}, "math"])


def _work(expression: sympy.Expr, rows: int, cols: int, steps: int) -> float:
    return _function(expression)(rows, cols, 1, 1, steps, 1)


def _by_axis(
    table: dict[str, sympy.Expr], rows: int, cols: int, shards: int, replicas: int, itemsize: int
) -> dict[str, float]:
    found = {axis: _function(formula)(rows, cols, shards, replicas, 1, itemsize) for axis, formula in table.items()}
    return {axis: sent for axis, sent in found.items() if sent}


def bytes_by_axis(
    strategy: str, rows: int, cols: int, *, shards: int, replicas: int = 1, itemsize: int
) -> dict[str, float]:
    """Bytes one rank sends over each axis, on average, to orthogonalize one ``rows x cols`` matrix."""
    return _by_axis(BYTES_SENT[strategy], rows, cols, shards, replicas, itemsize)


def bytes_sent(strategy: str, rows: int, cols: int, *, world: int, replicas: int = 1, itemsize: int) -> float:
    """The same over all axes, of ``world`` ranks in all."""
    shards = world // replicas
    return sum(bytes_by_axis(strategy, rows, cols, shards=shards, replicas=replicas, itemsize=itemsize).values())


def weight_bytes_by_axis(
    collective: str, rows: int, cols: int, *, shards: int, replicas: int = 1, itemsize: int
) -> dict[str, float]:
    """Bytes one rank sends over each axis for one unshard or one gradient reduction of a ``rows x cols`` parameter."""
    return _by_axis(WEIGHT_BYTES[collective], rows, cols, shards, replicas, itemsize)


def weight_bytes(collective: str, rows: int, cols: int, *, world: int, replicas: int = 1, itemsize: int) -> float:
    """The same over all axes, of ``world`` ranks in all."""
    shards = world // replicas
    return sum(
        weight_bytes_by_axis(collective, rows, cols, shards=shards, replicas=replicas, itemsize=itemsize).values()
    )


@functools.cache
def padded_rows(rows: int, *, shards: int, replicas: int = 1, state_over_all: bool = False) -> int:
    """``rows`` with what pads them, see :data:`PADDED_ROWS`; a rank has at most ``1 / shards`` of them, or of all."""
    formula = PADDED_ROWS[OVER_ALL if state_over_all else ""]
    return int(_function(formula)(rows, 1, shards, replicas, 1, 1))


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


def owner_work(rows: int, cols: int, *, steps: int) -> float:
    """Multiply-adds of Newton-Schulz on one matrix: the weight of the owner balance."""
    return _work(OWNER_WORK, rows, cols, steps)


def standard_operations(rows: int, cols: int, *, steps: int) -> float:
    """Operations of the standard form with dense products."""
    return _work(STANDARD_OPERATIONS, rows, cols, steps)


def gram_operations(rows: int, cols: int, *, steps: int) -> float:
    """Operations of the gram form with dense products and one restart."""
    return _work(GRAM_OPERATIONS, rows, cols, steps)


def start_bytes(machine: Machine, kind: str, ranks: Sequence[int]) -> int:
    """What a rank could send in the time that a collective of ``kind`` among ``ranks`` takes to start; see START."""
    start, transfer = machine.collective_parts(kind, _LARGE, ranks)
    return round(start * _LARGE / transfer) if start else 0


def weight_start_bytes(
    machine: Machine, collective: str, kinds: Mapping[str, str], *, shards: int, replicas: int, apart: int = 1
) -> int:
    """The same in bytes of whole weights, of one of :data:`WEIGHT_BYTES`: over the axis where they are most.

    Args:
        kinds: axis -> kind of the collective over it, as of ``machine``.
        apart: one rank of the axis ``shard`` from the next.
    """
    inside = shards * apart
    ranks = {
        "shard": range(0, inside, apart),
        "replicate": range(0, inside * replicas, inside),
        "all": range(0, inside * replicas, apart),
    }
    sent = weight_bytes_by_axis(collective, 1, 1, shards=shards, replicas=replicas, itemsize=1)
    return max((round(start_bytes(machine, kinds[axis], ranks[axis]) / part) for axis, part in sent.items()), default=0)


#: of a collective that takes no longer to start than to send, on links of any machine
_LARGE = 2.0**28


def bucket_bytes(total: float, start: float) -> int:
    """The best size of collectives that send ``total`` bytes in all; see :data:`BUCKET_BYTES`."""
    return math.isqrt(round(total) * round(start))


def newton_schulz_seconds(
    machine: Machine,
    rows: int,
    cols: int,
    *,
    matrices: int = 1,
    steps: int,
    dtype: str,
    restarts: int | None = None,
) -> float:
    """Of the products on a stack of ``matrices``, each computed whole.

    Args:
        restarts: of the gram form, see ``kernels/operations.py``; None for the standard form, in each step of which are
            XXᵀ, its square, and that times X.
    """
    k, l = sorted((rows, cols))  # noqa: E741
    wide = steps if restarts is None else restarts + 1
    square = steps if restarts is None else 4 * steps - 3 * wide
    counts = {(k, k, l): wide, (k, l, k): wide, (k, k, k): square}
    return sum(count * machine.product_seconds(*shape, batch=matrices, dtype=dtype) for shape, count in counts.items())


def choose_exchange(
    rows: int,
    cols: int,
    *,
    world: int,
    replicas: int = 1,
    state_over_all: bool = False,
    steps: int,
    dtype: str,
    machine: Machine,
) -> str:
    """The cheaper of ``replicate`` and ``owner`` for matrices of one shape, on ``world`` ranks of ``machine``.

    Seconds of collectives and Newton-Schulz for as many matrices as there are ranks, one behind the other. Under
    ``owner`` a rank computes one of them, with two collectives, or three where replicas hold the same; under
    ``replicate`` all, as a stack, with one collective, or one an axis where state is cut over both. Ranks of a shard
    group are taken as consecutive.
    """
    if world == 1:
        return "local"
    shared = machine.shared_by(world)
    shards = world // replicas
    several = replicas > 1
    cut_twice = state_over_all and several
    ranks = {"shard": range(shards), "replicate": range(0, world, shards), "all": range(world)}
    gathers = {axis: ["all_gather"] for axis in ranks}
    used = {
        "replicate": gathers,
        "owner": gathers | {axis: ["all_to_all", "all_to_all"] for axis in ("shard", "all")},
    }
    computed = {"replicate": world, "owner": 1}
    itemsize: int = getattr(torch, dtype).itemsize
    seconds = {}
    for strategy, kinds in used.items():
        table = strategy + OVER_ALL if cut_twice else strategy
        sent = bytes_by_axis(table, rows, cols, shards=shards, replicas=replicas, itemsize=itemsize)
        seconds[strategy] = newton_schulz_seconds(
            shared, rows, cols, matrices=computed[strategy], steps=steps, dtype=dtype
        ) + sum(
            shared.collective_seconds(kind, world * nbytes / len(kinds[axis]), ranks[axis])
            for axis, nbytes in sent.items()
            for kind in kinds[axis]
        )
    return min(seconds, key=seconds.__getitem__)
