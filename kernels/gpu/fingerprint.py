"""Fingerprints of a list of tensors in few launches, bit for bit those of ``passes.fingerprint`` in plain aten.

    r[i] = sum over j of b[i, j] v[j]                          b: the bits of a tensor as integers, in rows
    F    = sum over i of mix(r[i] + (i + 1) golden)            modulo 2**64

and optionally the sum of the squares of a tensor's numbers, from the same read.

A program of ``sums_kernel`` sums pieces of one tensor, ``ROWS`` rows of ``SPAN`` columns. Each thread, a *lane*, sums
the numbers that it loads; after each piece lanes are added up, and atomics add the sums of rows to r. ``mix_kernel``
makes F. The sum of integers is the same in any order. The sum of squares is not, so each program stores its own, ahead
of r in one int64 buffer. Up to ``MOST`` tensors share a launch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .apply import is_wide
from .launch import Launch, decoded_at, element_type, encoded, first_programs, tensor_of_program
from .model import ceildiv

ROWS, WIDTH, WARPS = tl.constexpr(16), tl.constexpr(256), 8  # of a tile
SPAN = tl.constexpr(1024)  # columns of a piece
MOST = 16  # tensors per launch
MOST_PROGRAMS = tl.constexpr(256)  # of one tensor: more would only wait for each other's atomics
# Programs that mix the row sums of one tensor, and row sums that one mixes at a time.
SPLIT, BLOCK = tl.constexpr(8), tl.constexpr(1024)
#: dtypes whose squares are summed
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _mixed(x, k, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """Return ``mix(x + (k + 1) golden)`` of int64 words, computed in uint64."""
    x = x.to(tl.uint64, bitcast=True) + (k + 1).to(tl.uint64) * GOLDEN
    x = (x ^ (x >> 30)) * FACTOR
    return (x ^ (x >> 27)).to(tl.int64, bitcast=True)


@triton.jit
def row_weights(j, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """Return int32 ``low`` and ``high`` with ``low + 2**32 high = v[j]``."""
    # ``low`` is a 32-bit product: truncated from a 64-bit one it would stay 64 bits wide to the compiler, and ``b low``
    # would take three multiplications, not one.
    v = (j.to(tl.uint32).to(tl.uint64) ^ GOLDEN) * FACTOR
    v ^= (v.to(tl.int64, bitcast=True) >> 32).to(tl.uint64, bitcast=True)  # arithmetic, as in PyTorch
    low = v.to(tl.uint32) * (FACTOR & 0xFFFFFFFF) | 1
    high = (v * FACTOR >> 32).to(tl.uint32) + (low >> 31)  # ``low`` is signed
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def in_lanes(x, LANES: tl.constexpr):
    """Sum the neighbours in a row that one thread holds; return [rows, LANES]."""
    return tl.sum(tl.reshape(x, (x.shape[0], LANES, x.shape[1] // LANES)), axis=2)


@triton.jit
def weighted(b, low, high, lows, highs, LANES: tl.constexpr):
    """Return ``lows`` plus ``b low`` summed in lanes, int64, and ``highs`` plus ``b high``, int32."""
    return lows + in_lanes(b.to(tl.int64) * low.to(tl.int64), LANES), highs + in_lanes(b * high, LANES)


@triton.jit
def joined(lows, highs):
    """Return the sums of rows, int64, from their lanes' sums of ``b low`` and ``b high``."""
    return tl.sum(lows + (highs.to(tl.int64) << 32), axis=1)


@triton.jit
def _numbers(x, BRAIN: tl.constexpr):
    """Return in fp32 the numbers with the bits ``x``: int32 of float32, int16 of bfloat16 (BRAIN) or float16."""
    if x.dtype == tl.int32:
        return x.to(tl.float32, bitcast=True)
    elif BRAIN:
        return x.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        return x.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pieces(size, columns):
    """Return the number of pieces of a tensor of ``size`` integers, ``columns`` in a row."""
    return tl.cdiv(tl.cdiv(size, columns), ROWS) * tl.cdiv(columns, SPAN)


@triton.jit
def sums_kernel(
    integers,
    starts,
    sizes,
    columns,
    sums,
    INTEGER: tl.constexpr,
    WIDE: tl.constexpr,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
    SQUARES: tl.constexpr,
    BRAIN: tl.constexpr,
):
    """Add row sums to the buffers ``sums`` of tensors; with SQUARES store, in MOST_PROGRAMS places ahead of them, each
    program's sum of squares, as the bits of an fp32 number. ``integers``, of the type INTEGER, and ``sums`` are
    addresses, ``sizes`` and ``columns`` numbers, all :func:`launch.encoded`; ``starts`` are by
    :func:`launch.first_programs`. WIDE: four integers of all tensors may be read at once."""
    LANES: tl.constexpr = WIDTH // 4 if WIDE else WIDTH
    index, program = tensor_of_program(starts)
    numel = decoded_at(sizes, index)
    row_numel = decoded_at(columns, index)
    x_ptr = decoded_at(integers, index).to(tl.pointer_type(INTEGER))
    if WIDE:
        x_ptr = tl.multiple_of(x_ptr, INTEGER.primitive_bitwidth // 2)
        row_numel = row_numel // 16 * 16  # no change; Triton ignores tl.multiple_of of a function's result
    sums_ptr = decoded_at(sums, index).to(tl.pointer_type(tl.int64))
    rows = tl.cdiv(numel, row_numel)
    pieces = _pieces(numel, row_numel)
    pieces_across = tl.cdiv(row_numel, SPAN)
    squares = tl.zeros((ROWS, LANES), dtype=tl.float32)
    for piece in range(program, pieces, tl.minimum(pieces, MOST_PROGRAMS)):
        row = piece // pieces_across * ROWS + tl.arange(0, ROWS)
        row_starts = row.to(tl.int64) * row_numel
        row_ptrs = x_ptr + row_starts[:, None]
        row_ends = tl.minimum(tl.maximum(numel - row_starts, 0), row_numel).to(tl.int32)
        if WIDE:
            row_ends = tl.multiple_of(row_ends, 16)
        low_sums = tl.zeros((ROWS, LANES), dtype=tl.int64)
        high_sums = tl.zeros((ROWS, LANES), dtype=tl.int32)
        first_column = piece % pieces_across * SPAN
        for tile_column in range(first_column, tl.minimum(first_column + SPAN, row_numel), WIDTH):
            column = tile_column + tl.arange(0, WIDTH)[None, :]
            bits = tl.load(row_ptrs + column, mask=column < row_ends[:, None], other=0)
            low, high = row_weights(column, GOLDEN, FACTOR)
            low_sums, high_sums = weighted(bits.to(tl.int32), low, high, low_sums, high_sums, LANES)
            if SQUARES:
                value = _numbers(bits, BRAIN)
                squares += in_lanes(value * value, LANES)
        tl.atomic_add(sums_ptr + SQUARES * MOST_PROGRAMS + row, joined(low_sums, high_sums), mask=row < rows)
    if SQUARES:
        tl.store(sums_ptr + program, tl.sum(squares).to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def mix_kernel(
    sums,
    sizes,
    out,
    squares,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add F of each tensor, of ``sizes`` rows, to its place in ``out``, from its buffer ``sums``, by SPLIT programs;
    write the total of PARTS sums of squares, if any, to ``squares``."""
    tensor = tl.program_id(0) // SPLIT
    rows = decoded_at(sizes, tensor)
    sums_ptr = decoded_at(sums, tensor).to(tl.pointer_type(tl.int64))
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for block in range(tl.program_id(0) % SPLIT, tl.cdiv(rows, BLOCK), SPLIT):
        row = (tl.arange(0, BLOCK) + block * BLOCK).to(tl.int64)
        row_sum = tl.load(sums_ptr + PARTS + row, mask=row < rows, other=0)
        total += tl.where(row < rows, _mixed(row_sum, row, GOLDEN, FACTOR), 0)
    tl.atomic_add(out + tensor, tl.sum(total, axis=0))
    if PARTS:
        if tl.program_id(0) % SPLIT == 0:
            program_squares = tl.load(sums_ptr + tl.arange(0, PARTS)).to(tl.int32).to(tl.float32, bitcast=True)
            tl.store(squares + tensor, tl.sum(program_squares, axis=0))


def fingerprint(xs: Sequence[tuple[Tensor, int]], *, golden: int, factor: int) -> Tensor:
    """Return fingerprints, [len(xs)] int64, of (integers, number in a row): 1-D, at most 32 bits, on one device.
    ``golden`` and ``factor`` are the formula's, below 2**64."""
    return _run(xs, 0, False, golden, factor)[0]


def examine(
    xs: Sequence[tuple[Tensor, int]], numbers: torch.dtype, *, golden: int, factor: int
) -> tuple[Tensor, Tensor]:
    """Return fingerprints of tensors of ``numbers``, one of :data:`NUMBERS`, and squared norms, [len(xs)] fp32."""
    return _run(xs, MOST_PROGRAMS.value, numbers is torch.bfloat16, golden, factor)


def finish(sums: Sequence[Tensor], *, golden: int, factor: int) -> Tensor:
    """Return fingerprints, [len(sums)] int64, of tensors with these row sums, 1-D int64."""
    out = torch.zeros(len(sums), dtype=torch.int64, device=sums[0].device)
    _mix(sums, [each.numel() for each in sums], out, 0, golden, factor)
    return out


def _run(xs: Sequence[tuple[Tensor, int]], parts: int, brain: bool, golden: int, factor: int) -> tuple[Tensor, Tensor]:
    """Return fingerprints and squared norms; ``parts``: places for squares ahead of row sums, or 0."""
    device = xs[0][0].device
    rows = [ceildiv(x.numel(), columns) for x, columns in xs]
    widths = [len(xs), *(parts + count for count in rows)]
    out, *sums = torch.zeros(sum(widths), dtype=torch.int64, device=device).split(widths)  # one launch for all
    constants = {"GOLDEN": golden, "FACTOR": factor, "num_warps": WARPS, "SQUARES": parts > 0, "BRAIN": brain}
    kinds = [(element_type(x), columns % 16 == 0 and is_wide(x)) for x, columns in xs]
    for kind in dict.fromkeys(kinds):
        group = [(*x, result) for x, result, x_kind in zip(xs, sums, kinds, strict=True) if x_kind == kind]
        group_constants = constants | dict(zip(("INTEGER", "WIDE"), kind, strict=True))
        for start in range(0, len(group), MOST):
            integers, columns, results = zip(*group[start : start + MOST], strict=True)
            counts = [x.numel() for x in integers]
            programs = [min(MOST_PROGRAMS.value, _pieces_of(*size)) for size in zip(counts, columns, strict=True)]
            first, *others = (encoded(values, MOST) for values in (integers, counts, columns, results))
            arguments = (first, first_programs(programs, MOST), *others)
            Launch(sums_kernel, sum(programs), out, arguments, group_constants).run()
    return out, _mix(sums, rows, out, parts, golden, factor)


def _pieces_of(size: int, columns: int) -> int:
    return ceildiv(ceildiv(size, columns), ROWS.value) * ceildiv(columns, SPAN.value)


def _mix(sums: Sequence[Tensor], sizes: Sequence[int], out: Tensor, parts: int, golden: int, factor: int) -> Tensor:
    """Add fingerprints to ``out``; return squared norms, [len(sums)] fp32, or none without ``parts``."""
    squares = torch.empty(len(sums) if parts else 0, dtype=torch.float32, device=out.device)
    constants = {"GOLDEN": golden, "FACTOR": factor, "num_warps": WARPS, "PARTS": parts}
    for start in range(0, len(sums), MOST):
        chunk = sizes[start : start + MOST]
        arguments = (encoded(sums[start : start + MOST], MOST), encoded(chunk, MOST), out[start:], squares[start:])
        Launch(mix_kernel, SPLIT.value * len(chunk), out, arguments, constants).run()
    return squares
