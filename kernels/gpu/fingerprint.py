"""Fingerprints of a list of tensors in few launches, bit for bit those of ``passes.fingerprint`` in plain aten.

    r[i] = sum over j of b[i, j] v[j]                          of the integers of a tensor, in rows
    F    = sum over i of mix(r[i] + (i + 1) golden)            modulo 2**64

and, of the same pass over memory where it is asked for, the sum of the squares of a tensor's numbers.

A program takes pieces of one tensor, ``ROWS`` rows of ``SPAN`` columns. Its threads sum what they read and add up among
themselves after each piece; atomics add the sums of rows, and a second kernel mixes those of all tensors. Integers add
up to the same in any order; sums of squares do not, and each program has a place for its own. Up to ``MOST`` tensors
share a launch, by one compiled kernel whatever they are.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .apply import is_wide
from .launch import Launch, addresses, coded, decoded, element_type, filled
from .model import ceildiv

__all__ = ["NUMBERS", "examine", "fingerprint", "finish", "row_weights", "supports"]

ROWS, WIDTH, WARPS = 16, 256, 8  # of a tile
SPAN = 1024  # columns of a piece
MOST = 16  # tensors per launch
MOST_PROGRAMS = 256  # of one tensor: more would only meet at the atomics
SPLIT, BLOCK = 8, 1024  # programs that mix the sums of one tensor, and how many of them at a time
#: dtypes whose squares are summed
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _mixed(x, k, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """``mix(x + (k + 1) golden)``, of int64 words as uint64."""
    x = x.to(tl.uint64, bitcast=True) + (k + 1).to(tl.uint64) * GOLDEN
    x = (x ^ (x >> 30)) * FACTOR
    return (x ^ (x >> 27)).to(tl.int64, bitcast=True)


@triton.jit
def row_weights(j, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """Int32 ``low`` and ``high`` with ``low + 2**32 high = v[j]``.

    The low half is a product of 32 bits: cut from that of 64, the compiler forgets that it has 32, and ``b low`` takes
    three multiplications in place of one.
    """
    v = (j.to(tl.uint32).to(tl.uint64) ^ GOLDEN) * FACTOR
    v ^= (v.to(tl.int64, bitcast=True) >> 32).to(tl.uint64, bitcast=True)  # the sign is copied, as PyTorch does
    low = v.to(tl.uint32) * (FACTOR & 0xFFFFFFFF) | 1
    high = (v * FACTOR >> 32).to(tl.uint32) + (low >> 31)  # the low half is signed
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def in_lanes(x, LANES: tl.constexpr):
    """Sums, [rows, LANES], of neighbours in rows, which one thread has."""
    return tl.sum(tl.reshape(x, (x.shape[0], LANES, x.shape[1] // LANES)), axis=2)


@triton.jit
def weighted(b, low, high, lows, highs, LANES: tl.constexpr):
    """``lows``, int64, with ``b low`` added, and ``highs``, int32, with ``b high``; both [rows, LANES]."""
    return lows + in_lanes(b.to(tl.int64) * low.to(tl.int64), LANES), highs + in_lanes(b * high, LANES)


@triton.jit
def joined(lows, highs):
    """Sums of rows, int64, over the lanes of all threads."""
    return tl.sum(lows + (highs.to(tl.int64) << 32), axis=1)


@triton.jit
def _numbers(x, BRAIN: tl.constexpr):
    """Float32 values of the float32, bfloat16 or float16 numbers with these bits."""
    if x.dtype == tl.int32:
        return x.to(tl.float32, bitcast=True)
    elif BRAIN:
        return x.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        return x.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pieces(size, columns, ROWS: tl.constexpr, SPAN: tl.constexpr):
    """How many pieces a tensor of ``size`` integers, ``columns`` in a row, has."""
    return tl.cdiv(tl.cdiv(size, columns), ROWS) * tl.cdiv(columns, SPAN)


@triton.jit
def sums_kernel(
    integers,
    sizes,
    columns,
    sums,
    INTEGER: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    MOST: tl.constexpr,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
    SQUARES: tl.constexpr,
    BRAIN: tl.constexpr,
):
    """Add the sums of each tensor's rows to its ``sums``; with ``SQUARES``, ``MOST`` places in front of them take the
    squares that each program has summed. ``integers``, of the type INTEGER, and ``sums`` are :func:`launch.addresses`;
    ``sizes`` and ``columns`` are :func:`launch.coded`, and a tensor that fills the lists up to COUNT has no program.
    ``WIDE``: four integers of all tensors may be read at once."""
    LANES: tl.constexpr = WIDTH // 4 if WIDE else WIDTH
    program = tl.program_id(0)
    # The program's tensor. Only this is done COUNT times over, or the kernel takes half a minute to compile.
    first = program * 0
    programs = first
    size = (first + sizes[0]) * 0
    width = (first + columns[0]) * 0 + 1
    address = first.to(tl.int64)
    result = address
    begin = program * 0
    for i in tl.static_range(COUNT):
        size_of = (program * 0 + sizes[i] - 3) // 2
        width_of = (program * 0 + columns[i] - 3) // 2
        many = tl.minimum(_pieces(size_of, tl.maximum(width_of, 1), ROWS, SPAN), MOST)
        mine = (program >= begin) & (program < begin + many)
        first = tl.where(mine, begin, first)
        programs = tl.where(mine, many, programs)
        size = tl.where(mine, size_of, size)
        width = tl.where(mine, width_of, width)
        address = tl.where(mine, integers[i], address)
        result = tl.where(mine, sums[i], result)
        begin += many
    start = decoded(address).to(tl.pointer_type(INTEGER))
    if WIDE:
        start = tl.multiple_of(start, INTEGER.primitive_bitwidth // 2)
        width = tl.multiple_of(width, 16)
    target = decoded(result).to(tl.pointer_type(tl.int64))
    rows = tl.cdiv(size, width)
    across = tl.cdiv(width, SPAN)
    squares = tl.zeros((ROWS, LANES), dtype=tl.float32)
    for piece in range(program - first, _pieces(size, width, ROWS, SPAN), programs):
        row = piece // across * ROWS + tl.arange(0, ROWS)
        begins = row.to(tl.int64) * width
        source = start + begins[:, None]
        ends = tl.minimum(tl.maximum(size - begins, 0), width).to(tl.int32)
        if WIDE:
            ends = tl.multiple_of(ends, 16)
        lows = tl.zeros((ROWS, LANES), dtype=tl.int64)
        highs = tl.zeros((ROWS, LANES), dtype=tl.int32)
        begin_at = piece % across * SPAN
        for at in range(begin_at, tl.minimum(begin_at + SPAN, width), WIDTH):
            column = at + tl.arange(0, WIDTH)[None, :]
            x = tl.load(source + column, mask=column < ends[:, None], other=0)
            low, high = row_weights(column, GOLDEN, FACTOR)
            lows, highs = weighted(x.to(tl.int32), low, high, lows, highs, LANES)
            if SQUARES:
                number = _numbers(x, BRAIN)
                squares += in_lanes(number * number, LANES)
        tl.atomic_add(target + SQUARES * MOST + row, joined(lows, highs), mask=row < rows)
    if SQUARES:
        tl.store(target + program - first, tl.sum(squares).to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def mix_kernel(
    sums,
    sizes,
    out,
    squares,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add F of the sums of rows, given by :func:`launch.addresses`, to ``out``, [COUNT]; ``PARTS`` sums of squares in
    front of them, if any, add up in ``squares``, [COUNT]."""
    tensor = tl.program_id(0) // SPLIT
    size = (tensor + sizes[0]) * 0
    address = sums[0]
    for i in tl.static_range(COUNT):
        size = tl.where(tensor == i, (sizes[i] - 3) // 2, size)
        address = tl.where(tensor == i, sums[i], address)
    start = decoded(address).to(tl.pointer_type(tl.int64))
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for block in range(tl.program_id(0) % SPLIT, tl.cdiv(size, BLOCK), SPLIT):
        k = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        x = tl.load(start + PARTS + k, mask=k < size, other=0)
        total += tl.where(k < size, _mixed(x, k, GOLDEN, FACTOR), 0)
    tl.atomic_add(out + tensor, tl.sum(total, axis=0))
    if PARTS:
        if tl.program_id(0) % SPLIT == 0:
            parts = tl.load(start + tl.arange(0, PARTS)).to(tl.int32).to(tl.float32, bitcast=True)
            tl.store(squares + tensor, tl.sum(parts, axis=0))


def supports(x: Tensor) -> bool:
    """Whether the kernel reads this tensor."""
    return x.is_contiguous()


def fingerprint(xs: Sequence[tuple[Tensor, int]], *, golden: int, factor: int) -> Tensor:
    """Fingerprints of integers on one device, 1-D and of at most 32 bits, given with how many there are in a row.

    ``golden`` and ``factor`` are the formula's, below 2**64. The result is int64, [len(xs)].
    """
    return _run(xs, 0, False, golden, factor)[0]


def examine(
    xs: Sequence[tuple[Tensor, int]], numbers: torch.dtype, *, golden: int, factor: int
) -> tuple[Tensor, Tensor]:
    """Fingerprints of tensors of ``numbers``, one of :data:`NUMBERS`, and their squared norms, [len(xs)] fp32."""
    return _run(xs, MOST_PROGRAMS, numbers is torch.bfloat16, golden, factor)


def finish(sums: Sequence[Tensor], *, golden: int, factor: int) -> Tensor:
    """Fingerprints, [len(sums)] int64, of tensors with these sums of rows, 1-D int64."""
    out = torch.zeros(len(sums), dtype=torch.int64, device=sums[0].device)
    _mix(sums, [each.numel() for each in sums], out, 0, golden, factor)
    return out


def _run(xs: Sequence[tuple[Tensor, int]], parts: int, brain: bool, golden: int, factor: int) -> tuple[Tensor, Tensor]:
    device = xs[0][0].device
    rows = [ceildiv(x.numel(), columns) for x, columns in xs]
    sizes = [len(xs), *(parts + count for count in rows)]
    out, *sums = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)  # zeros of all in one
    settings = {"GOLDEN": golden, "FACTOR": factor, "num_warps": WARPS, "COUNT": MOST, "MOST": MOST_PROGRAMS}
    settings |= {"ROWS": ROWS, "WIDTH": WIDTH, "SPAN": SPAN, "SQUARES": parts > 0, "BRAIN": brain}
    kinds = [(element_type(x), columns % 16 == 0 and is_wide(x)) for x, columns in xs]
    for kind in dict.fromkeys(kinds):
        same = [(*x, result) for x, result, each in zip(xs, sums, kinds, strict=True) if each == kind]
        typed = settings | dict(zip(("INTEGER", "WIDE"), kind, strict=True))
        for start in range(0, len(same), MOST):
            integers, columns, results = zip(*same[start : start + MOST], strict=True)
            counts = [x.numel() for x in integers]
            programs = sum(min(MOST_PROGRAMS, _pieces_of(*each)) for each in zip(counts, columns, strict=True))
            sizes_of = (filled([coded(n) for n in each], MOST) for each in (counts, columns))
            arguments = (addresses(integers, MOST), *sizes_of, addresses(results, MOST))
            Launch(sums_kernel, programs, out, arguments, typed).run()
    return out, _mix(sums, rows, out, parts, golden, factor)


def _pieces_of(size: int, columns: int) -> int:
    return ceildiv(ceildiv(size, columns), ROWS) * ceildiv(columns, SPAN)


def _mix(sums: Sequence[Tensor], sizes: Sequence[int], out: Tensor, parts: int, golden: int, factor: int) -> Tensor:
    """Add fingerprints to ``out``; return squared norms, [len(sums)] fp32, or none without ``parts``."""
    squares = torch.empty(len(sums) if parts else 0, dtype=torch.float32, device=out.device)
    settings = {"GOLDEN": golden, "FACTOR": factor, "num_warps": WARPS, "COUNT": MOST, "PARTS": parts}
    settings |= {"BLOCK": BLOCK, "SPLIT": SPLIT}
    for start in range(0, len(sums), MOST):
        chunk = [coded(size) for size in sizes[start : start + MOST]]
        arguments = (addresses(sums[start : start + MOST], MOST), filled(chunk, MOST), out[start:], squares[start:])
        Launch(mix_kernel, SPLIT * len(chunk), out, arguments, settings).run()
    return squares
