"""Muon's momentum of a list of gradients in few launches, with norms and sums of rows from the same read.

    new = momentum + (1 − beta)(grad − momentum),  update = grad + beta (new − grad) with Nesterov, else new

The kernel is the twin of ``kernels.momentum.muon_momentum`` and of ``passes.fingerprint.row_sums``. Per element it
reads the gradient and the momentum and writes the update; per row it writes the norm of the update, by which
Newton–Schulz divides, and the sum for the gradient's fingerprint. A gradient in half precision is also written in
``wide``, the dtype of ``.grad``. ``carried``, the ``.grad`` of earlier micro-batches, is added for update and sums.

A program computes whole rows of one tensor, without atomics: the same input gives the same bits. Up to ``MOST`` tensors
share a launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .apply import is_wide
from .fingerprint import in_lanes, joined, row_weights, weighted
from .launch import Launch, decoded_at, element_type, encoded, first_programs, tensor_of_program
from .model import ceildiv

ROWS, WIDTH, WARPS = tl.constexpr(4), tl.constexpr(512), 4  # of a tile
MOST = 8  # tensors per launch
# Most registers of a thread, by WIDE: without a bound ptxas aims at 64 and spills on 10.0; without WIDE the kernel
# spills below 168.
REGISTERS = {True: 96, False: 168}


class Updates(NamedTuple):
    """Results for each gradient."""

    updates: list[Tensor]  # of the gradients' shapes, contiguous
    wide: list[Tensor]  # the gradients in the dtype ``wide``, themselves if they have it
    norms: list[Tensor]  # of the updates' rows, 1-D fp32
    sums: list[Tensor]  # of the rows of ``wide`` plus ``carried``, 1-D int64


@triton.jit
def _lerp(start, end, weight):
    """Interpolate as ``torch.lerp`` does, from the nearer end."""
    difference = end - start
    return tl.where(tl.abs(weight) < 0.5, start + weight * difference, end - difference * (1.0 - weight))


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
    starts,
    rows,
    columns,
    G: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    U: tl.constexpr,
    NESTEROV: tl.constexpr,
    WIDEN: tl.constexpr,
    CARRIED: tl.constexpr,
    WIDE: tl.constexpr,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Write the results of ROWS rows of one of the gradients. Addresses: ``gs`` of gradients (of type G), ``cs``
    carried (W), ``ms`` momenta (M), ``us`` updates (U), ``ws`` wide gradients (W), ``norms``, ``sums``, ``hypers``;
    ``starts`` are by :func:`launch.first_programs`, the others by :func:`launch.encoded`. WIDE: four entries of all
    tensors may be read at once. Eight entries in half precision would need another layout, with twice the weights."""
    LANES: tl.constexpr = WIDTH // 4 if WIDE else WIDTH
    index, program = tensor_of_program(starts)
    n_rows = decoded_at(rows, index).to(tl.int32)
    row_numel = decoded_at(columns, index).to(tl.int32)
    g_ptr = decoded_at(gs, index).to(tl.pointer_type(G))
    c_ptr = decoded_at(cs, index).to(tl.pointer_type(W))
    m_ptr = decoded_at(ms, index).to(tl.pointer_type(M))
    u_ptr = decoded_at(us, index).to(tl.pointer_type(U))
    w_ptr = decoded_at(ws, index).to(tl.pointer_type(W))
    norms_ptr = decoded_at(norms, index).to(tl.pointer_type(tl.float32))
    sums_ptr = decoded_at(sums, index).to(tl.pointer_type(tl.int64))
    if WIDE:
        g_ptr = tl.multiple_of(g_ptr, G.primitive_bitwidth // 2)
        c_ptr = tl.multiple_of(c_ptr, W.primitive_bitwidth // 2)
        m_ptr = tl.multiple_of(m_ptr, M.primitive_bitwidth // 2)
        u_ptr = tl.multiple_of(u_ptr, U.primitive_bitwidth // 2)
        w_ptr = tl.multiple_of(w_ptr, W.primitive_bitwidth // 2)
        row_numel = row_numel // 16 * 16  # no change; Triton ignores tl.multiple_of of a function's result
    hyper_ptr = decoded_at(hypers, index).to(tl.pointer_type(tl.float32))
    one_minus_beta = tl.load(hyper_ptr)
    beta = tl.load(hyper_ptr + 1)
    row = program * ROWS + tl.arange(0, ROWS)
    row_starts = row[:, None].to(tl.int64) * row_numel
    g_ptr += row_starts
    c_ptr += row_starts
    m_ptr += row_starts
    u_ptr += row_starts
    w_ptr += row_starts
    row_ends = tl.where(row < n_rows, row_numel, 0)
    if WIDE:
        row_ends = tl.multiple_of(row_ends, 16)
    squares = tl.zeros((ROWS, LANES), dtype=tl.float32)
    low_sums = tl.zeros((ROWS, LANES), dtype=tl.int64)
    high_sums = tl.zeros((ROWS, LANES), dtype=tl.int32)
    for first_column in range(0, row_numel, WIDTH):
        column = first_column + tl.arange(0, WIDTH)[None, :]
        mask = column < row_ends[:, None]
        grad = tl.load(g_ptr + column, mask=mask, other=0).to(W)
        if WIDEN:
            tl.store(w_ptr + column, grad, mask=mask)
        if CARRIED:
            carried = tl.load(c_ptr + column, mask=mask, other=0)
            grad = (carried.to(tl.float32) + grad.to(tl.float32)).to(grad.dtype)
        momentum = tl.load(m_ptr + column, mask=mask, other=0)
        grad_fp32 = grad.to(momentum.dtype).to(tl.float32)
        new = _lerp(momentum.to(tl.float32), grad_fp32, one_minus_beta).to(momentum.dtype)
        update = new
        if NESTEROV:
            update = _lerp(grad_fp32, new.to(tl.float32), beta).to(momentum.dtype)
        update = update.to(U)
        tl.store(u_ptr + column, update, mask=mask)
        squares += in_lanes(update.to(tl.float32) * update.to(tl.float32), LANES)
        if tl.float32 == W:
            bits = grad.to(tl.int32, bitcast=True)
        else:
            bits = grad.to(tl.int16, bitcast=True).to(tl.int32)
        low, high = row_weights(column, GOLDEN, FACTOR)
        low_sums, high_sums = weighted(bits, low, high, low_sums, high_sums, LANES)
    tl.store(norms_ptr + row, tl.sqrt(tl.sum(squares, axis=1)), mask=row < n_rows)
    tl.store(sums_ptr + row, joined(low_sums, high_sums), mask=row < n_rows)


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
    """Return the updates of gradients on one device.

    Args:
        grads: contiguous, of one dtype, in rows of their last dimension; none empty.
        momenta: like ``grads``, of one dtype, not changed.
        hypers: fp32, each beginning with ``(1 - beta, beta)``.
        carried: addends of ``grads``, contiguous and of dtype ``wide``, or none.
        nesterov: whether updates look ahead.
        dtype: of the updates.
        wide: dtype of the gradients that are returned, theirs or a wider one.
        golden, factor: of the fingerprint's formula, below 2**64.
    """
    out = Updates(
        [torch.empty(x.shape, dtype=dtype, device=x.device) for x in grads],
        [x if x.dtype is wide else torch.empty(x.shape, dtype=wide, device=x.device) for x in grads],
        [x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32) for x in grads],
        [x.new_empty(x.numel() // x.shape[-1], dtype=torch.int64) for x in grads],
    )
    examples = (grads[0], out.wide[0], momenta[0], out.updates[0])
    constants: dict[str, Any] = {name: element_type(x) for name, x in zip("GWMU", examples, strict=True)}
    constants |= {
        "GOLDEN": golden,
        "FACTOR": factor,
        "num_warps": WARPS,
        "NESTEROV": nesterov,
        "WIDEN": grads[0].dtype is not wide,
        "CARRIED": bool(carried),
    }
    addends = carried or out.wide  # stand-ins that the kernel does not read
    tensors_of = list(zip(grads, addends, momenta, out.updates, out.wide, out.norms, out.sums, hypers, strict=True))
    aligned = [tensors[0].shape[-1] % 16 == 0 and is_wide(*tensors[:5]) for tensors in tensors_of]
    for reads_wide in (True, False):
        chosen = [i for i, is_aligned in enumerate(aligned) if is_aligned is reads_wide]
        for start in range(0, len(chosen), MOST):
            chunk = [tensors_of[i] for i in chosen[start : start + MOST]]
            row_counts = [tensors[5].numel() for tensors in chunk]
            columns = [tensors[0].shape[-1] for tensors in chunk]
            pointers = [encoded(xs, MOST) for xs in zip(*chunk, strict=True)]
            programs = [ceildiv(n, ROWS.value) for n in row_counts]
            arguments = (*pointers, first_programs(programs, MOST), encoded(row_counts, MOST), encoded(columns, MOST))
            settings = constants | {"WIDE": reads_wide, "maxnreg": REGISTERS[reads_wide]}
            Launch(momentum_kernel, sum(programs), chunk[0][0], arguments, settings).run()
    return out
