"""Muon's momentum of a list of gradients in few launches, with norms and sums of rows from the same read.

    new = momentum + (1 − beta)(grad − momentum),  update = grad + beta (new − grad) where it looks ahead, else new

The kernel is the twin of ``kernels.momentum.muon_momentum`` and of ``passes.fingerprint.row_sums``. Per element it
reads the gradient and the momentum and writes the update; per row it writes the norm of the update, by which
Newton–Schulz divides, and the sum for the gradient's fingerprint. A gradient in half precision is also written in the
dtype of ``.grad``. The gradient of earlier micro-batches in ``.grad`` is added for the update and the sums.

A program has whole rows of one tensor and no atomics: the same input gives the same bits. Up to ``MOST`` tensors share
a launch, by one compiled kernel whatever they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .apply import is_wide
from .fingerprint import in_lanes, joined, row_weights, weighted
from .launch import Launch, addresses, coded, decoded, element_type, filled
from .model import ceildiv

__all__ = ["Updates", "momentum_updates"]

ROWS, WIDTH, WARPS = 4, 512, 4  # of a tile
MOST = 8  # tensors per launch
# Of a thread, at most, by whether tensors are aligned: without a bound ptxas aims at 64 and spills on 10.0; unaligned
# tensors spill below 168.
REGISTERS = {True: 96, False: 168}


@dataclass(frozen=True)
class Updates:
    """Results for each gradient.

    Attributes:
        updates: of its shape, contiguous.
        wide: the gradient in the dtype asked for, possibly itself.
        norms: of the update's rows, 1-D fp32.
        sums: of the rows of the wide gradient plus ``carried``, 1-D int64.
    """

    updates: list[Tensor]
    wide: list[Tensor]
    norms: list[Tensor]
    sums: list[Tensor]


@triton.jit
def _lerp(start, end, weight):
    """``torch.lerp``: it begins at the nearer end."""
    way = end - start
    return tl.where(tl.abs(weight) < 0.5, start + weight * way, end - way * (1.0 - weight))


@triton.jit
def momentum_kernel(
    gs,
    cs,
    ms,
    us,
    ws,
    norms,
    sums,
    hypers,
    rows,
    columns,
    G: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    U: tl.constexpr,
    COUNT: tl.constexpr,
    NESTEROV: tl.constexpr,
    WIDEN: tl.constexpr,
    CARRIED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """``gs`` to ``hypers`` are :func:`launch.addresses`, ``cs`` and ``ws`` of elements of the type ``W``; ``rows`` and
    ``columns`` are :func:`launch.coded`, and a tensor that fills the lists up to COUNT has no row. ``WIDE``: four
    entries of all tensors may be read at once. Eight of a half would make another layout, with twice the weights."""
    LANES: tl.constexpr = WIDTH // 4 if WIDE else WIDTH
    program = tl.program_id(0).to(tl.int64)
    # The program's tensor: only this is done COUNT times over.
    first = program * 0
    count = first
    width = first + 1
    g_at = first
    c_at = first
    m_at = first
    u_at = first
    w_at = first
    n_at = first
    s_at = first
    h_at = first
    begin = program * 0
    for i in tl.static_range(COUNT):
        here = (program * 0 + rows[i] - 3) // 2
        programs = tl.cdiv(here, ROWS)
        mine = (program >= begin) & (program < begin + programs)
        first = tl.where(mine, begin, first)
        count = tl.where(mine, here, count)
        width = tl.where(mine, (program * 0 + columns[i] - 3) // 2, width)
        g_at = tl.where(mine, gs[i], g_at)
        c_at = tl.where(mine, cs[i], c_at)
        m_at = tl.where(mine, ms[i], m_at)
        u_at = tl.where(mine, us[i], u_at)
        w_at = tl.where(mine, ws[i], w_at)
        n_at = tl.where(mine, norms[i], n_at)
        s_at = tl.where(mine, sums[i], s_at)
        h_at = tl.where(mine, hypers[i], h_at)
        begin += programs
    g_at = decoded(g_at).to(tl.pointer_type(G))
    c_at = decoded(c_at).to(tl.pointer_type(W))
    m_at = decoded(m_at).to(tl.pointer_type(M))
    u_at = decoded(u_at).to(tl.pointer_type(U))
    w_at = decoded(w_at).to(tl.pointer_type(W))
    if WIDE:
        g_at = tl.multiple_of(g_at, G.primitive_bitwidth // 2)
        c_at = tl.multiple_of(c_at, W.primitive_bitwidth // 2)
        m_at = tl.multiple_of(m_at, M.primitive_bitwidth // 2)
        u_at = tl.multiple_of(u_at, U.primitive_bitwidth // 2)
        w_at = tl.multiple_of(w_at, W.primitive_bitwidth // 2)
        width = tl.multiple_of(width, 16)
    toward = decoded(h_at).to(tl.pointer_type(tl.float32))
    to_grad = tl.load(toward)
    to_new = tl.load(toward + 1)
    row = ((program - first) * ROWS).to(tl.int32) + tl.arange(0, ROWS)
    begins = row[:, None].to(tl.int64) * width
    g_at += begins
    c_at += begins
    m_at += begins
    u_at += begins
    w_at += begins
    width = width.to(tl.int32)
    count = count.to(tl.int32)
    ends = tl.where(row < count, width, 0)
    if WIDE:
        ends = tl.multiple_of(ends, 16)
    squares = tl.zeros((ROWS, LANES), dtype=tl.float32)
    lows = tl.zeros((ROWS, LANES), dtype=tl.int64)
    highs = tl.zeros((ROWS, LANES), dtype=tl.int32)
    for begin_at in range(0, width, WIDTH):
        column = begin_at + tl.arange(0, WIDTH)[None, :]
        inside = column < ends[:, None]
        grad = tl.load(g_at + column, mask=inside, other=0).to(W)
        if WIDEN:
            tl.store(w_at + column, grad, mask=inside)
        if CARRIED:
            carried = tl.load(c_at + column, mask=inside, other=0)
            grad = (carried.to(tl.float32) + grad.to(tl.float32)).to(grad.dtype)
        momentum = tl.load(m_at + column, mask=inside, other=0)
        near = grad.to(momentum.dtype).to(tl.float32)
        new = _lerp(momentum.to(tl.float32), near, to_grad).to(momentum.dtype)
        update = new
        if NESTEROV:
            update = _lerp(near, new.to(tl.float32), to_new).to(momentum.dtype)
        update = update.to(U)
        tl.store(u_at + column, update, mask=inside)
        squares += in_lanes(update.to(tl.float32) * update.to(tl.float32), LANES)
        if tl.float32 == W:
            bits = grad.to(tl.int32, bitcast=True)
        else:
            bits = grad.to(tl.int16, bitcast=True).to(tl.int32)
        low, high = row_weights(column, GOLDEN, FACTOR)
        lows, highs = weighted(bits, low, high, lows, highs, LANES)
    tl.store(decoded(n_at).to(tl.pointer_type(tl.float32)) + row, tl.sqrt(tl.sum(squares, axis=1)), mask=row < count)
    tl.store(decoded(s_at).to(tl.pointer_type(tl.int64)) + row, joined(lows, highs), mask=row < count)


def momentum_updates(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    hypers: Sequence[Tensor],
    carried: Sequence[Tensor] = (),
    *,
    nesterov: bool,
    dtype: torch.dtype,
    wide: torch.dtype,
    golden: int,
    factor: int,
) -> Updates:
    """Updates of gradients on one device.

    Args:
        grads: contiguous, of one dtype, in rows of their last dimension; none empty.
        momenta: like them, of one dtype, not changed.
        hypers: fp32, each beginning with ``(1 - beta, beta)``.
        carried: what each is added to, contiguous and of dtype ``wide``, or none.
        nesterov: whether updates look ahead.
        dtype: of the updates.
        wide: of the gradients that are returned, theirs or a wider one.
        golden, factor: of the fingerprint's formula, below 2**64.
    """
    made = Updates(
        [torch.empty(x.shape, dtype=dtype, device=x.device) for x in grads],
        [x if x.dtype is wide else torch.empty(x.shape, dtype=wide, device=x.device) for x in grads],
        [x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32) for x in grads],
        [x.new_empty(x.numel() // x.shape[-1], dtype=torch.int64) for x in grads],
    )
    types = (grads[0], made.wide[0], momenta[0], made.updates[0])
    settings: dict[str, Any] = {name: element_type(x) for name, x in zip("GWMU", types, strict=True)}
    settings |= {"GOLDEN": golden, "FACTOR": factor, "num_warps": WARPS, "COUNT": MOST, "ROWS": ROWS, "WIDTH": WIDTH}
    settings |= {"NESTEROV": nesterov, "WIDEN": grads[0].dtype is not wide, "CARRIED": bool(carried)}
    added = carried or made.wide
    lists = list(zip(grads, added, momenta, made.updates, made.wide, made.norms, made.sums, hypers, strict=True))
    each_wide = [tensors[0].shape[-1] % 16 == 0 and is_wide(*tensors[:5]) for tensors in lists]
    for alike in (True, False):
        chosen = [i for i, each in enumerate(each_wide) if each is alike]
        for start in range(0, len(chosen), MOST):
            chunk = [lists[i] for i in chosen[start : start + MOST]]
            counts = [tensors[5].numel() for tensors in chunk]
            widths = [coded(tensors[0].shape[-1]) for tensors in chunk]
            pointers = [addresses(column, MOST) for column in zip(*chunk, strict=True)]
            arguments = (*pointers, filled([coded(n) for n in counts], MOST), filled(widths, MOST))
            programs = sum(ceildiv(n, ROWS) for n in counts)
            Launch(
                momentum_kernel,
                programs,
                chunk[0][0],
                arguments,
                settings | {"WIDE": alike, "maxnreg": REGISTERS[alike]},
            ).run()
    return made
