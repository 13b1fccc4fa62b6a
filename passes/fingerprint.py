"""An integer that tells whether a tensor still holds, bit for bit, what it held before.

A direction is used in ``optimizer.step()`` only if ``.grad`` still is the gradient it was made from. Keeping a copy of
the gradient would cost its memory; its fingerprint costs a sum. The entries of a tensor are read as signed integers
``b``, those of more than 32 bits as several of 32, in rows of its last dimension (of so many of the last ones that a
row has 64 entries; a vector has rows of 1024). Modulo ``2**64``:

    r[i]        = sum over j of b[i, j] v[j]
    fingerprint = sum over i of mix(r[i] + (i + 1) 0x9E3779B97F4A7C15)

where ``v`` are odd numbers that look random, and ``mix`` is a bijection, one round of the finalizer of SplitMix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").

Collisions: a change of one entry never collides, as ``v`` is odd. Changes of several entries, of a row or of several
rows, collide with a chance near ``2**-64``; flips of signs of float32 alone, which change the top bit of ``b``, near
``2**-32``. A fingerprint finds edits, not adversaries. Only tensors of one shape are to be compared.

Rows, because a compiler sums them in the kernel that makes a gradient: :func:`row_sums` are operations of a graph, and
what is read again is one number a row. On CUDA Triton's kernels (``compile_muon.kernels.gpu.fingerprint``) make the
fingerprints of a list in one pass and few launches, the same bits.

``torch.hash_tensor`` is no substitute: an exclusive or does not see swaps or an even number of equal edits.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compile_muon.kernels.apply import may_launch

from .norms import squares
from .operators import operator

#: entries that a row has at least: from so many in its last dimension on, a tensor's rows are those of its fingerprint
LEAST_ROW = 64
#: entries of a row of a vector
_VECTOR = 1024
#: entries whose products are in memory at a time
_AT_ONCE = 1 << 20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


# As int64, with the bits of unsigned words.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
#: the formula's numbers, as the kernels take them
FORMULA = {"golden": _GOLDEN % 2**64, "factor": _FACTOR % 2**64}


def _integers(x: Tensor) -> Tensor:
    """The bits of ``x`` as integers of at most 32 bits."""
    if x.element_size() > 4:
        return x.reshape(x.shape or 1).contiguous().view(torch.int32)
    return x.view(_INTEGERS[x.element_size()])


def _columns(shape: Sequence[int]) -> int:
    """Return the number of integers in a row."""
    if len(shape) < 2:
        return min(_VECTOR, max(1, math.prod(shape)))
    ends = itertools.accumulate(reversed(shape), lambda a, b: a * b)
    return max(1, next((end for end in ends if end >= LEAST_ROW), math.prod(shape)))


def _weights(columns: int, device: torch.device) -> Tensor:
    """``v``, [columns] int64."""
    # Not by an addition or a product first: Inductor would take it for an index, which has 32 bits.
    v = (torch.arange(columns, device=device) ^ _GOLDEN) * _FACTOR
    return (v ^ (v >> 32)) * _FACTOR | 1


def row_sums(x: Tensor) -> Tensor:
    """``r`` of the formula, 1-D int64, in operations that a compiler fuses with what makes ``x``."""
    bits = _integers(x)
    return _weighted(bits, _weights(_columns(bits.shape), x.device))


def _row_sums_in_parts(x: Tensor) -> Tensor:
    """The same where nothing is fused, and integers of 64 bits would take twice the memory of ``x``."""
    bits, columns = _as_rows(x.contiguous())
    weights = _weights(columns, x.device)
    many = max(1, _AT_ONCE // columns) * columns
    return torch.cat([_weighted(part, weights) for part in bits.split(many)])


def _weighted(bits: Tensor, weights: Tensor) -> Tensor:
    """The sum of each row, as many integers as there are weights; the last one may have fewer."""
    columns = len(weights)
    if beyond := bits.numel() % columns:
        bits = torch.nn.functional.pad(bits.flatten(), (0, columns - beyond))
    return (bits.reshape(-1, columns).to(torch.int64) * weights).sum(1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of every entry, in place: ``x ^= x >>> 30; x *= odd; x ^= x >>> 27``."""
    # >> of signed integers copies the sign; the masks make it the unsigned shift that can be undone.
    x.bitwise_xor_((x >> 30).bitwise_and_(2**34 - 1)).mul_(_FACTOR)
    return x.bitwise_xor_((x >> 27).bitwise_and_(2**37 - 1))


def _finish(sums: Sequence[Tensor]) -> Tensor:
    """Fingerprints from the sums of rows."""
    sizes = [tensor_sums.numel() for tensor_sums in sums]
    # One pass over the sums of all tensors; numbered from 1 in each, so a tensor's company makes no difference.
    counters = torch.arange(1, max(sizes) + 1, device=sums[0].device).mul_(_GOLDEN)
    mixed = _mix(torch.cat(list(sums)) + torch.cat([counters[:size] for size in sizes]))
    # Sums of consecutive parts as differences of running sums, the same modulo 2**64: one kernel for all.
    running = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])
    return torch.stack([running[end] for end in itertools.accumulate(sizes, initial=0)]).diff()


def _fingerprint(xs: Sequence[Tensor]) -> Tensor:
    if may_launch(list(xs)):
        from compile_muon.kernels.gpu import fingerprint as gpu

        if all(x.is_contiguous() for x in xs):
            return gpu.fingerprint(list(map(_as_rows, xs)), **FORMULA)
    return by_aten(xs)


def _fingerprint_of_rows(sums: Sequence[Tensor]) -> Tensor:
    return finish_by_kernel(sums) if may_launch(list(sums)) else _finish(sums)


def _examine(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if may_launch(list(xs)):
        from compile_muon.kernels.gpu import fingerprint as gpu

        if len({x.dtype for x in xs}) == 1 and xs[0].dtype in gpu.NUMBERS and all(x.is_contiguous() for x in xs):
            return gpu.examine(list(map(_as_rows, xs)), xs[0].dtype, **FORMULA)
    return _fingerprint(xs), squares(xs)


def _as_rows(x: Tensor) -> tuple[Tensor, int]:
    """The integers of a contiguous tensor, 1-D, and how many a row has."""
    bits = _integers(x)
    return bits.view(-1), _columns(bits.shape)


def finish_by_kernel(sums: Sequence[Tensor]) -> Tensor:
    """``fingerprint_of_rows`` in Triton's kernel."""
    from compile_muon.kernels.gpu import fingerprint as gpu

    return gpu.finish(sums, **FORMULA)


def by_aten(xs: Sequence[Tensor]) -> Tensor:
    """:func:`fingerprint` in PyTorch's own operations, on any device."""
    return _finish([_row_sums_in_parts(x) for x in xs])


def _one_each(xs: Sequence[Tensor], dtype: torch.dtype = torch.int64) -> Tensor:
    return xs[0].new_empty(len(xs), dtype=dtype)


def _one_a_row(x: Tensor) -> Tensor:
    words = max(1, x.element_size() // 4)
    shape = (*x.shape[:-1], x.shape[-1] * words)
    return x.new_empty(-(-math.prod(shape) // _columns(shape)), dtype=torch.int64)


FINGERPRINT = operator("fingerprint(Tensor[] xs) -> Tensor", _fingerprint, _one_each)
#: of tensors whose :func:`row_sums` it is given
FINGERPRINT_OF_ROWS = operator("fingerprint_of_rows(Tensor[] sums) -> Tensor", _fingerprint_of_rows, _one_each)
#: :func:`row_sums` as one node, until the gradients are lowered
ROW_SUMS = operator("row_sums(Tensor x) -> Tensor", row_sums, _one_a_row)
#: the fingerprints of tensors and the squares of their norms, on CUDA in one pass over them
EXAMINE = operator(
    "examine(Tensor[] xs) -> (Tensor, Tensor)", _examine, lambda xs: (_one_each(xs), _one_each(xs, torch.float32))
)


def fingerprint(xs: Sequence[Tensor]) -> Tensor:
    """Fingerprints of the contents of ``xs``, see the module's docstring for the formula and for what collides.

    Bits count, not numbers: -0.0 and 0.0 differ, and so do two NaNs of different payload. Strides do not count: a
    copy in another layout, read in the order of its indices, has the same fingerprint. Nothing waits for the device.

    Args:
        xs: at least one tensor, of any shapes (empty ones too) and dtypes, on one device. Not modified.
    Returns:
        ``[len(xs)]`` int64, on that device.
    Raises:
        ValueError: no tensor.
    """
    if not xs:
        raise ValueError("fingerprint of no tensors: give at least one")
    return FINGERPRINT(list(xs))
