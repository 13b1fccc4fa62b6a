"""Fingerprints of a list of tensors in few launches; the twin of ``passes.fingerprint`` in plain aten, bit for bit.

    (F(sums of the rows), F(sums of the columns))      of the words of a tensor in rows of P
    F(s) = sum over k of mix(s[k] + (k + 1) golden)     modulo 2**64

One pass over memory. A program takes rows of one tensor: their sums are mixed and added up, and sums of columns are
added to those of other programs by atomics. Integers add up to the same in any order. Up to ``MOST`` tensors share a
launch, by one compiled kernel whatever they are; a second one mixes the columns of all.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, coded, filled
from .model import ceildiv

__all__ = ["fingerprint", "takes"]

ROWS, WARPS = 16, 8  # rows of a program at a time
MOST = 16  # tensors per launch
MOST_PROGRAMS = 256  # of one tensor: more would only meet at the atomics


@triton.jit
def _mixed(x, k, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """``mix(x + (k + 1) golden)``, of int64 words as uint64."""
    x = x.to(tl.uint64, bitcast=True) + (k + 1).to(tl.uint64) * GOLDEN
    x = (x ^ (x >> 30)) * FACTOR
    return (x ^ (x >> 27)).to(tl.int64, bitcast=True)


@triton.jit
def _programs(size, P: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr):
    """Of a tensor of so many bytes."""
    return tl.minimum(tl.maximum(tl.cdiv(size, 8 * P * ROWS), 1), MOST)


@triton.jit
def sums_kernel(
    words,
    sizes,
    sums,
    COUNT: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Of each tensor P sums of columns, and F of the sums of its rows, added to ``sums``, [tensors, P + 2], whose last
    numbers say whether there is a whole row. ``words`` are their bytes, ``sizes`` how many, :func:`launch.coded`; what
    fills them up to COUNT has no program."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    # Which tensor this program is of: only this is done COUNT times over, or the kernel takes half a minute to compile.
    tensor = program * 0
    first = tensor
    programs = tensor
    size = (tensor + sizes[0]) * 0
    address = words[0].to(tl.int64)
    begin = program * 0
    for i in tl.static_range(COUNT):
        bytes_of = (program * 0 + sizes[i] - 3) // 2
        many = _programs(bytes_of, P, ROWS, MOST)
        mine = (program >= begin) & (program < begin + many)
        tensor = tl.where(mine, i, tensor)
        first = tl.where(mine, begin, first)
        programs = tl.where(mine, many, programs)
        size = tl.where(mine, bytes_of, size)
        address = tl.where(mine, words[i].to(tl.int64), address)
        begin += many
    start = address.to(tl.pointer_type(tl.int64))
    count = size // 8
    rows = count // P
    columns = tl.zeros((WIDTH,), dtype=tl.int64)
    found = tl.zeros((ROWS,), dtype=tl.int64)
    for block in range(program - first, tl.cdiv(rows, ROWS), programs):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < P)[None, :]
        x = tl.load(start + row[:, None] * P + column[None, :], mask=inside, other=0)
        columns += tl.sum(x, axis=0)
        found += tl.where(row < rows, _mixed(tl.sum(x, axis=1), row, GOLDEN, FACTOR), 0)
    total = tl.sum(found, axis=0)
    if program == first:
        # What is left of a row, and of a word, are sums of their own.
        k = rows * P + column
        x = tl.load(start + k, mask=(column < P) & (k < count), other=0)
        total += tl.sum(tl.where((column < P) & (k < count), _mixed(x, rows + column, GOLDEN, FACTOR), 0))
        if size % 8 != 0:
            j = tl.arange(0, 8)
            end = address.to(tl.pointer_type(tl.int8)) + count * 8
            byte = tl.load(end + j, mask=count * 8 + j < size, other=0)
            word = tl.sum(byte.to(tl.uint8, bitcast=True).to(tl.int64) << (8 * j).to(tl.int64), axis=0)
            total += _mixed(word, rows + count - rows * P, GOLDEN, FACTOR)
        tl.store(sums + tensor * (P + 2) + P + 1, (rows > 0).to(tl.int64))
    tl.atomic_add(sums + tensor * (P + 2) + P, total)
    tl.atomic_add(sums + tensor * (P + 2) + column, columns, mask=column < P)


@triton.jit
def columns_kernel(sums, out, P: tl.constexpr, WIDTH: tl.constexpr, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """[COUNT, 2] fingerprints from what ``sums_kernel`` found."""
    place = sums + tl.program_id(0) * (P + 2)
    column = tl.arange(0, WIDTH)
    x = tl.load(place + column, mask=column < P, other=0)
    mixed = tl.sum(tl.where(column < P, _mixed(x, column, GOLDEN, FACTOR), 0), axis=0)
    tl.store(out + 2 * tl.program_id(0), tl.load(place + P))
    tl.store(out + 2 * tl.program_id(0) + 1, tl.where(tl.load(place + P + 1) != 0, mixed, 0))


def takes(x: Tensor) -> bool:
    """Whether the kernel reads this tensor: contiguous, and from the beginning of a word on."""
    return x.is_contiguous() and x.data_ptr() % 8 == 0


def fingerprint(xs: Sequence[Tensor], *, columns: int, golden: int, factor: int) -> Tensor:
    """Fingerprints of tensors that :func:`takes` takes, on one device.

    Args:
        columns: P.
        golden, factor: of the formula, below 2**64.
    Returns:
        [len(xs), 2] int64.
    """
    sums = torch.zeros(len(xs), columns + 2, dtype=torch.int64, device=xs[0].device)
    out = torch.empty(len(xs), 2, dtype=torch.int64, device=xs[0].device)
    width = triton.next_power_of_2(columns)
    settings = {"P": columns, "WIDTH": width, "GOLDEN": golden, "FACTOR": factor, "num_warps": WARPS}
    for start in range(0, len(xs), MOST):
        chunk = xs[start : start + MOST]
        sizes = [x.numel() * x.element_size() for x in chunk]
        programs = sum(min(MOST_PROGRAMS, max(1, ceildiv(size, 8 * columns * ROWS))) for size in sizes)
        views = [x.view(-1).view(torch.int8) for x in chunk]
        arguments = (filled(views, MOST), filled([coded(size) for size in sizes], MOST), sums[start:])
        constants = {**settings, "COUNT": MOST, "ROWS": ROWS, "MOST": MOST_PROGRAMS}
        Launch(sums_kernel, programs, out, arguments, constants).run()
    Launch(columns_kernel, len(xs), out, (sums, out), settings).run()
    return out
