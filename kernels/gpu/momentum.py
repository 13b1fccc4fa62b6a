"""Muon's momentum of a list of gradients in few launches, with all that is told by the same read of them.

    new = momentum + (1 − beta)(grad − momentum),  update = grad + beta (new − grad) where it looks ahead, else new

It is the twin of ``kernels.momentum.muon_momentum`` and of ``passes.fingerprint.row_sums``. Per element it reads the
gradient and the momentum and writes the update; of each row the norm of the update, which Newton–Schulz divides by, and
the sum that the gradient's fingerprint is made of. A gradient that comes in half precision out of its product is also
written as the wide one that ``.grad`` is. What ``.grad`` holds of earlier micro-batches is added for the update and the
sums.

A program has whole rows of one tensor, so nothing is added up by atomics, and the same input gives the same bits. Up to
``MOST`` tensors share a launch, by one compiled kernel whatever they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .apply import is_wide
from .fingerprint import row_weights
from .launch import Launch, addresses, coded, decoded, element_type, filled
from .model import ceildiv

__all__ = ["Updates", "momentum_updates"]

ROWS, WIDTH, WARPS = 4, 512, 4  # of a tile
MOST = 8  # tensors per launch


@dataclass(frozen=True)
class Updates:
    """Of each gradient.

    Args:
        updates: like it, contiguous.
        wide: the gradient in the dtype asked for; itself where it has that.
        norms: of the rows of the update, 1-D fp32.
        sums: of the rows of the wide gradient and what it is added to, 1-D int64.
    """

    updates: list[Tensor]
    wide: list[Tensor]
    norms: list[Tensor]
    sums: list[Tensor]


@triton.jit
def _lerp(start, end, weight):
    """``torch.lerp``, which begins at the nearer end."""
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
    ``columns`` are :func:`launch.coded`, and a tensor that fills the lists up to COUNT has no row. ``WIDE``: 16 bytes
    of all tensors may be read at once."""
    program = tl.program_id(0).to(tl.int64)
    # Which tensor this program is of: only this is done COUNT times over.
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
        g_at = tl.multiple_of(g_at, 16)
        c_at = tl.multiple_of(c_at, 16)
        m_at = tl.multiple_of(m_at, 16)
        u_at = tl.multiple_of(u_at, 16)
        w_at = tl.multiple_of(w_at, 16)
        width = tl.multiple_of(width, 16)
    toward = decoded(h_at).to(tl.pointer_type(tl.float32))
    to_grad = tl.load(toward)
    to_new = tl.load(toward + 1)
    row = (program - first) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.int64)
    for begin_at in range(0, width, WIDTH):
        column = begin_at + tl.arange(0, WIDTH)
        k = row[:, None] * width + column[None, :]
        inside = (row < count)[:, None] & (column < width)[None, :]
        grad = tl.load(g_at + k, mask=inside, other=0).to(W)
        if WIDEN:
            tl.store(w_at + k, grad, mask=inside)
        if CARRIED:
            held = tl.load(c_at + k, mask=inside, other=0)
            grad = (held.to(tl.float32) + grad.to(tl.float32)).to(grad.dtype)
        momentum = tl.load(m_at + k, mask=inside, other=0)
        near = grad.to(momentum.dtype).to(tl.float32)
        new = _lerp(momentum.to(tl.float32), near, to_grad).to(momentum.dtype)
        update = new
        if NESTEROV:
            update = _lerp(near, new.to(tl.float32), to_new).to(momentum.dtype)
        update = update.to(U)
        tl.store(u_at + k, update, mask=inside)
        squares += tl.sum(update.to(tl.float32) * update.to(tl.float32), axis=1)
        if tl.float32 == W:
            bits = grad.to(tl.int32, bitcast=True)
        else:
            bits = grad.to(tl.int16, bitcast=True)
        total += tl.sum(bits.to(tl.int64) * row_weights(column, GOLDEN, FACTOR)[None, :], axis=1)
    tl.store(decoded(n_at).to(tl.pointer_type(tl.float32)) + row, tl.sqrt(squares), mask=row < count)
    tl.store(decoded(s_at).to(tl.pointer_type(tl.int64)) + row, total, mask=row < count)


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
    held = carried or made.wide
    lists = list(zip(grads, held, momenta, made.updates, made.wide, made.norms, made.sums, hypers, strict=True))
    each_wide = [tensors[0].shape[-1] % 16 == 0 and is_wide(*tensors[:5]) for tensors in lists]
    for alike in (True, False):
        chosen = [i for i, own in enumerate(each_wide) if own is alike]
        for start in range(0, len(chosen), MOST):
            chunk = [lists[i] for i in chosen[start : start + MOST]]
            counts = [tensors[5].numel() for tensors in chunk]
            widths = [coded(tensors[0].shape[-1]) for tensors in chunk]
            pointers = [addresses(column, MOST) for column in zip(*chunk, strict=True)]
            arguments = (*pointers, filled([coded(own) for own in counts], MOST), filled(widths, MOST))
            programs = sum(ceildiv(own, ROWS) for own in counts)
            Launch(momentum_kernel, programs, chunk[0][0], arguments, settings | {"WIDE": alike}).run()
    return made
