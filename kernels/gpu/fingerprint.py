"""Fingerprints of a list of tensors in few launches; the twin of ``passes.fingerprint`` in plain aten, bit for bit.

    (F(sums of the rows), F(sums of the columns))      of the words of a tensor in rows of P
    F(s) = sum over k of mix(s[k] + (k + 1) golden)     modulo 2**64

and, of the same pass over memory where it is asked for, the sum of the squares of a tensor's numbers.

One pass over memory. A program takes rows of one tensor: their sums are mixed and added up, and sums of columns are
added to those of other programs by atomics. Integers add up to the same in any order; sums of squares do not, and each
program has a place for its own. Up to ``MOST`` tensors share a launch, by one compiled kernel whatever they are; a
second one mixes the columns of all.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, coded, filled
from .model import ceildiv

__all__ = ["NUMBERS", "examine", "fingerprint", "takes"]

ROWS, WARPS = 16, 8  # rows of a program at a time
MOST = 16  # tensors per launch
MOST_PROGRAMS = 256  # of one tensor: more would only meet at the atomics
#: what squares are summed of, and how many bits one has
NUMBERS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}


@triton.jit
def _mixed(x, k, GOLDEN: tl.constexpr, FACTOR: tl.constexpr):
    """``mix(x + (k + 1) golden)``, of int64 words as uint64."""
    x = x.to(tl.uint64, bitcast=True) + (k + 1).to(tl.uint64) * GOLDEN
    x = (x ^ (x >> 30)) * FACTOR
    return (x ^ (x >> 27)).to(tl.int64, bitcast=True)


@triton.jit
def _squares(x, BITS: tl.constexpr, BRAIN: tl.constexpr):
    """Of each int64 word of ``x`` the sum of the squares of the numbers in it: float32, bfloat16 or float16."""
    total = (x * 0).to(tl.float32)
    for place in tl.static_range(64 // BITS):
        word = x >> (BITS * place)
        if BITS == 32:
            number = word.to(tl.int32).to(tl.float32, bitcast=True)
        elif BRAIN:
            number = word.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
        else:
            number = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        total += number * number
    return total


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
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    BRAIN: tl.constexpr,
):
    """Of each tensor P sums of columns, and F of the sums of its rows, added to ``sums``, [tensors, SPAN], whose next
    number says whether there is a whole row, and the others, where ``BITS`` is not 0, what squares each program has
    summed. ``words`` are their bytes, ``sizes`` how many, :func:`launch.coded`; what fills them up to COUNT has no
    program."""
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
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for block in range(program - first, tl.cdiv(rows, ROWS), programs):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < P)[None, :]
        x = tl.load(start + row[:, None] * P + column[None, :], mask=inside, other=0)
        columns += tl.sum(x, axis=0)
        found += tl.where(row < rows, _mixed(tl.sum(x, axis=1), row, GOLDEN, FACTOR), 0)
        if BITS:
            squares += tl.sum(_squares(x, BITS, BRAIN), axis=1)
    total = tl.sum(found, axis=0)
    square = tl.sum(squares, axis=0)
    sums += tensor * SPAN
    if program == first:
        # What is left of a row, and of a word, are sums of their own.
        k = rows * P + column
        x = tl.load(start + k, mask=(column < P) & (k < count), other=0)
        total += tl.sum(tl.where((column < P) & (k < count), _mixed(x, rows + column, GOLDEN, FACTOR), 0))
        if BITS:
            square += tl.sum(_squares(x, BITS, BRAIN), axis=0)
        if size % 8 != 0:
            j = tl.arange(0, 8)
            end = address.to(tl.pointer_type(tl.int8)) + count * 8
            byte = tl.load(end + j, mask=count * 8 + j < size, other=0)
            word = tl.sum(byte.to(tl.uint8, bitcast=True).to(tl.int64) << (8 * j).to(tl.int64), axis=0)
            total += _mixed(word, rows + count - rows * P, GOLDEN, FACTOR)
            if BITS:
                square += _squares(word, BITS, BRAIN)
        tl.store(sums + P + 1, (rows > 0).to(tl.int64))
    tl.atomic_add(sums + P, total)
    tl.atomic_add(sums + column, columns, mask=column < P)
    if BITS:
        tl.store(sums + P + 2 + program - first, square.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def columns_kernel(
    sums,
    out,
    squares,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    GOLDEN: tl.constexpr,
    FACTOR: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """[COUNT, 2] fingerprints, and where there are ``PARTS`` of them [COUNT] sums of squares, from what ``sums_kernel``
    found."""
    place = sums + tl.program_id(0) * SPAN
    column = tl.arange(0, WIDTH)
    x = tl.load(place + column, mask=column < P, other=0)
    mixed = tl.sum(tl.where(column < P, _mixed(x, column, GOLDEN, FACTOR), 0), axis=0)
    tl.store(out + 2 * tl.program_id(0), tl.load(place + P))
    tl.store(out + 2 * tl.program_id(0) + 1, tl.where(tl.load(place + P + 1) != 0, mixed, 0))
    if PARTS:
        parts = tl.load(place + P + 2 + tl.arange(0, PARTS)).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(squares + tl.program_id(0), tl.sum(parts, axis=0))


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
    return _run(xs, columns, golden, factor, 0)[0]


def examine(xs: Sequence[Tensor], *, columns: int, golden: int, factor: int) -> tuple[Tensor, Tensor]:
    """The same of tensors of one dtype of :data:`NUMBERS`, and their squared norms, [len(xs)] fp32."""
    found, squares = _run(xs, columns, golden, factor, MOST_PROGRAMS)
    return found, squares


def _run(xs: Sequence[Tensor], columns: int, golden: int, factor: int, parts: int) -> tuple[Tensor, Tensor]:
    span = columns + 2 + parts
    sums = torch.zeros(len(xs), span, dtype=torch.int64, device=xs[0].device)
    out = torch.empty(len(xs), 2, dtype=torch.int64, device=xs[0].device)
    squares = torch.empty(len(xs) if parts else 0, dtype=torch.float32, device=xs[0].device)
    width = triton.next_power_of_2(columns)
    settings = {"P": columns, "WIDTH": width, "GOLDEN": golden, "FACTOR": factor, "SPAN": span, "num_warps": WARPS}
    own = {"COUNT": MOST, "ROWS": ROWS, "MOST": MOST_PROGRAMS}
    own |= {"BITS": NUMBERS[xs[0].dtype] if parts else 0, "BRAIN": parts > 0 and xs[0].dtype is torch.bfloat16}
    for start in range(0, len(xs), MOST):
        chunk = xs[start : start + MOST]
        sizes = [x.numel() * x.element_size() for x in chunk]
        programs = sum(min(MOST_PROGRAMS, max(1, ceildiv(size, 8 * columns * ROWS))) for size in sizes)
        views = [x.view(-1).view(torch.int8) for x in chunk]
        arguments = (filled(views, MOST), filled([coded(size) for size in sizes], MOST), sums[start:])
        Launch(sums_kernel, programs, out, arguments, {**settings, **own}).run()
    Launch(columns_kernel, len(xs), out, (sums, out, squares), {**settings, "PARTS": parts}).run()
    return out, squares
