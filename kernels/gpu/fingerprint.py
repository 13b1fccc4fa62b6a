"""Fingerprints of a list of tensors in few launches; the twin of ``passes.fingerprint`` in plain aten, bit for bit.

    r[i] = sum over j of b[i, j] v[j]                          of the integers of a tensor, in rows
    F    = sum over i of mix(r[i] + (i + 1) golden)            modulo 2**64

and, of the same pass over memory where it is asked for, the sum of the squares of a tensor's numbers.

A program takes tiles of one tensor and adds what it finds of rows to their sums by atomics; a second kernel mixes the
sums of all tensors. Integers add up to the same in any order; sums of squares do not, and each program has a place for
its own. Up to ``MOST`` tensors share a launch, by one compiled kernel whatever they are.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, addresses, coded, decoded, element_type, filled
from .model import ceildiv

__all__ = ["NUMBERS", "examine", "fingerprint", "finish", "row_weights", "takes"]

ROWS, WIDTH, WARPS = 16, 256, 8  # of a tile
MOST = 16  # tensors per launch
MOST_PROGRAMS = 256  # of one tensor: more would only meet at the atomics
SPLIT, BLOCK = 8, 1024  # programs that mix the sums of one tensor, and how many of them at a time
#: what squares are summed of
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _mixed(x, k, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """``mix(x + (k + 1) golden)``, of int64 words as uint64."""
    x = x.to(tl.uint64, bitcast=True) + (k + 1).to(tl.uint64) * GOLDEN
    x = (x ^ (x >> 30)) * FACTOR
    return (x ^ (x >> 27)).to(tl.int64, bitcast=True)


@triton.jit
def row_weights(j, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """``v[j]``, int64."""
    v = (j.to(tl.uint64) ^ GOLDEN) * FACTOR
    v ^= (v.to(tl.int64, bitcast=True) >> 32).to(tl.uint64, bitcast=True)  # the sign is copied, as PyTorch does
    return (v * FACTOR | 1).to(tl.int64, bitcast=True)


@triton.jit
def _numbers(x, BRAIN: tl.constexpr):
    """Of integers the float32, bfloat16 or float16 with these bits."""
    if x.dtype == tl.int32:
        return x.to(tl.float32, bitcast=True)
    elif BRAIN:
        return x.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        return x.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _tiles(size, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of a tensor of ``size`` integers, ``columns`` in a row."""
    return tl.cdiv(tl.cdiv(size, columns), ROWS) * tl.cdiv(columns, WIDTH)


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
    MOST: tl.constexpr,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
    SQUARES: tl.constexpr,
    BRAIN: tl.constexpr,
):
    """Adds to ``sums`` of each tensor those of its rows; in front of them, where there are ``SQUARES``, ``MOST`` places
    for what squares each program has summed. ``integers``, of the type INTEGER, and ``sums`` are
    :func:`launch.addresses`; ``sizes`` and ``columns`` are :func:`launch.coded`, and a tensor that fills the lists up
    to COUNT has no program."""
    program = tl.program_id(0)
    # Which tensor this program is of: only this is done COUNT times over, or the kernel takes half a minute to compile.
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
        many = tl.minimum(_tiles(size_of, tl.maximum(width_of, 1), ROWS, WIDTH), MOST)
        mine = (program >= begin) & (program < begin + many)
        first = tl.where(mine, begin, first)
        programs = tl.where(mine, many, programs)
        size = tl.where(mine, size_of, size)
        width = tl.where(mine, width_of, width)
        address = tl.where(mine, integers[i], address)
        result = tl.where(mine, sums[i], result)
        begin += many
    start = decoded(address).to(tl.pointer_type(INTEGER))
    found = decoded(result).to(tl.pointer_type(tl.int64))
    rows = tl.cdiv(size, width)
    across = tl.cdiv(width, WIDTH)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for tile in range(program - first, _tiles(size, width, ROWS, WIDTH), programs):
        row = (tile // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = tile % across * WIDTH + tl.arange(0, WIDTH)
        k = row[:, None] * width + column[None, :]
        x = tl.load(start + k, mask=(column < width)[None, :] & (k < size), other=0)
        total = tl.sum(x.to(tl.int64) * row_weights(column, GOLDEN, FACTOR)[None, :], axis=1)
        tl.atomic_add(found + SQUARES * MOST + row, total, mask=row < rows)
        if SQUARES:
            number = _numbers(x, BRAIN)
            squares += tl.sum(number * number, axis=1)
    if SQUARES:
        tl.store(found + program - first, tl.sum(squares, axis=0).to(tl.int32, bitcast=True).to(tl.int64))


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
    """Adds to ``out``, [COUNT], F of the sums of rows, given by :func:`launch.addresses`; where there are
    ``PARTS`` in front of them, [COUNT] sums of squares are of these."""
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


def takes(x: Tensor) -> bool:
    """Whether the kernel reads this tensor."""
    return x.is_contiguous()


def fingerprint(xs: Sequence[tuple[Tensor, int]], *, golden: int, factor: int) -> Tensor:
    """Fingerprints of integers on one device, 1-D and of at most 32 bits, given with how many there are in a row.

    Args:
        golden, factor: of the formula, below 2**64.
    Returns:
        [len(xs)] int64.
    """
    return _run(xs, 0, False, golden, factor)[0]


def examine(
    xs: Sequence[tuple[Tensor, int]], numbers: torch.dtype, *, golden: int, factor: int
) -> tuple[Tensor, Tensor]:
    """The same of what are ``numbers``, of :data:`NUMBERS`, and their squared norms, [len(xs)] fp32."""
    return _run(xs, MOST_PROGRAMS, numbers is torch.bfloat16, golden, factor)


def finish(sums: Sequence[Tensor], *, golden: int, factor: int) -> Tensor:
    """Fingerprints of what has these sums of rows, 1-D int64: [len(sums)] int64."""
    out = torch.zeros(len(sums), dtype=torch.int64, device=sums[0].device)
    _mix(sums, [own.numel() for own in sums], out, 0, golden, factor)
    return out


def _run(xs: Sequence[tuple[Tensor, int]], parts: int, brain: bool, golden: int, factor: int) -> tuple[Tensor, Tensor]:
    device = xs[0][0].device
    rows = [ceildiv(x.numel(), columns) for x, columns in xs]
    sizes = [len(xs), *(parts + own for own in rows)]
    out, *sums = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)  # zeros of all in one
    settings = {"GOLDEN": golden, "FACTOR": factor, "num_warps": WARPS, "COUNT": MOST, "MOST": MOST_PROGRAMS}
    settings |= {"ROWS": ROWS, "WIDTH": WIDTH, "SQUARES": parts > 0, "BRAIN": brain}
    for kind in {x.dtype for x, _ in xs}:
        own = [(x, columns, result) for (x, columns), result in zip(xs, sums, strict=True) if x.dtype is kind]
        typed = settings | {"INTEGER": element_type(own[0][0])}
        for start in range(0, len(own), MOST):
            integers, columns, results = zip(*own[start : start + MOST], strict=True)
            counts = [x.numel() for x in integers]
            programs = sum(min(MOST_PROGRAMS, _tiles_of(*each)) for each in zip(counts, columns, strict=True))
            sizes_of = (filled([coded(n) for n in each], MOST) for each in (counts, columns))
            arguments = (addresses(integers, MOST), *sizes_of, addresses(results, MOST))
            Launch(sums_kernel, programs, out, arguments, typed).run()
    return out, _mix(sums, rows, out, parts, golden, factor)


def _tiles_of(size: int, columns: int) -> int:
    return ceildiv(ceildiv(size, columns), ROWS) * ceildiv(columns, WIDTH)


def _mix(sums: Sequence[Tensor], sizes: Sequence[int], out: Tensor, parts: int, golden: int, factor: int) -> Tensor:
    """Adds fingerprints to ``out``; returns squared norms, [len(sums)] fp32, or none where there are no ``parts``."""
    squares = torch.empty(len(sums) if parts else 0, dtype=torch.float32, device=out.device)
    settings = {"GOLDEN": golden, "FACTOR": factor, "num_warps": WARPS, "COUNT": MOST, "PARTS": parts}
    settings |= {"BLOCK": BLOCK, "SPLIT": SPLIT}
    for start in range(0, len(sums), MOST):
        chunk = [coded(size) for size in sizes[start : start + MOST]]
        arguments = (addresses(sums[start : start + MOST], MOST), filled(chunk, MOST), out[start:], squares[start:])
        Launch(mix_kernel, SPLIT * len(chunk), out, arguments, settings).run()
    return squares
