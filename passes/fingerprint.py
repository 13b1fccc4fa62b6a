"""Two integers that tell whether a tensor still holds, bit for bit, what it held before.

A direction is used in ``optimizer.step()`` only if ``.grad`` still is the gradient it was made from. Keeping a copy of
the gradient would cost its memory; its fingerprint costs two sums. The bits of the tensor in row-major order are read
as 64-bit words (the last one padded with zero bytes) and laid out in rows of ``P = 257`` words; words of a last,
incomplete row count as row sums of their own. Modulo ``2**64``:

    fingerprint = (F(sums of the rows), F(sums of the columns))
    F(s)        = sum over k of mix(s[k] + (k + 1) 0x9E3779B97F4A7C15)

where ``mix`` is a bijection of 64-bit integers, one round of the finalizer of SplitMix64 (Steele, Lea, Flood 2014,
"Fast splittable pseudorandom number generators").

What collides: sums are linear, so a change goes unseen if it adds to zero in every row and every column, or, with a
chance near ``2**-128``, if the mixed sums do. That takes equal and opposite edits at the corners of rectangles, placed
for it. A sign counts as plus or minus one power of two, or by parity alone where it is the top bit of its word; P is
an odd prime, so that negating all of a matrix, rows, columns or every second entry leaves odd counts somewhere. It
finds edits, not adversaries.

On CUDA a Triton kernel makes those of a list in one pass and few launches (``compile_muon.kernels.gpu.fingerprint``),
the same bits.

``torch.hash_tensor`` is no substitute: an exclusive or does not see swaps or an even number of equal edits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from compile_muon.kernels.apply import may_launch

from .norms import squares

__all__ = ["EXAMINE", "FINGERPRINT", "FINGERPRINT_WORDS", "by_aten", "fingerprint"]

_P = 257

_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")
_LIBRARY.define("fingerprint(Tensor[] xs) -> Tensor")
_LIBRARY.define("examine(Tensor[] xs) -> (Tensor, Tensor)")

#: int64 numbers in one fingerprint
FINGERPRINT_WORDS = 2


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTOR = _signed(0xBF58476D1CE4E5B9)
#: the formula's numbers, as the kernel takes them
_FORMULA = {"columns": _P, "golden": _GOLDEN % 2**64, "factor": _FACTOR % 2**64}


def _words(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The bits of ``x`` in row-major order as int64: the whole words without a copy, and the padded rest, if any."""
    flat = x.contiguous().view(-1)
    per_word = 8 // flat.element_size()
    beyond = flat.numel() % per_word
    head = flat[: flat.numel() - beyond] if beyond else flat
    if head.storage_offset() % per_word:
        head = head.clone()
    if not beyond:
        return head.view(torch.int64), None
    padded = flat.new_zeros(per_word)
    padded[:beyond] = flat[-beyond:]
    return head.view(torch.int64), padded.view(torch.int64)


def _sums(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Pieces of the sums of rows and of columns, 1-D each."""
    words, rest = _words(x)
    complete = words.numel() // _P
    rows, columns = [], []
    if complete:
        grid = words.as_strided((complete, _P), (_P, 1))
        rows, columns = [grid.sum(1)], [grid.sum(0)]
    if words.numel() % _P:
        rows.append(words[complete * _P :])
    if rest is not None:
        rows.append(rest)
    return rows, columns


def _mix(x: Tensor) -> Tensor:
    """A bijection of every entry, in place: ``x ^= x >>> 30; x *= odd; x ^= x >>> 27``."""
    # >> of signed integers copies the sign; the masks make it the unsigned shift that can be undone.
    x.bitwise_xor_((x >> 30).bitwise_and_(2**34 - 1)).mul_(_FACTOR)
    return x.bitwise_xor_((x >> 27).bitwise_and_(2**37 - 1))


@torch.library.impl(_LIBRARY, "fingerprint", "CompositeExplicitAutograd")
def _fingerprint(xs: Sequence[Tensor]) -> Tensor:
    result = by_kernel(xs) if may_launch(list(xs)) else None
    return by_aten(xs) if result is None else result


def by_kernel(xs: Sequence[Tensor]) -> Tensor | None:
    """:func:`fingerprint` in Triton's kernels; None of tensors that they do not take."""
    from compile_muon.kernels.gpu import fingerprint as gpu

    if not all(map(gpu.takes, xs)):
        return None
    return gpu.fingerprint(xs, **_FORMULA)


@torch.library.impl(_LIBRARY, "examine", "CompositeExplicitAutograd")
def _examine(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if may_launch(list(xs)):
        from compile_muon.kernels.gpu import fingerprint as gpu

        if len({x.dtype for x in xs}) == 1 and xs[0].dtype in gpu.NUMBERS and all(map(gpu.takes, xs)):
            return gpu.examine(xs, **_FORMULA)
    return _fingerprint(xs), squares(xs)


def by_aten(xs: Sequence[Tensor]) -> Tensor:
    """:func:`fingerprint` in PyTorch's own operations, on any device."""
    families = [family for x in xs for family in _sums(x)]
    sizes = [sum(piece.numel() for piece in family) for family in families]
    # One pass over the sums of all tensors; numbered from 1 in each family, so a tensor's company makes no difference.
    none = xs[0].new_empty(0, dtype=torch.int64)  # of empty tensors there are no sums
    sums = torch.cat([none, *(piece for family in families for piece in family)])
    counters = torch.arange(1, max(sizes, default=0) + 1, device=sums.device).mul_(_GOLDEN)
    mixed = _mix(sums.add_(torch.cat([counters[:size] for size in sizes])))
    # Sums of consecutive parts as differences of running sums, the same modulo 2**64: one kernel for all.
    running = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])
    ends = torch.stack([running[end] for end in itertools.accumulate(sizes, initial=0)])
    return ends.diff().view(len(xs), FINGERPRINT_WORDS)


@torch.library.register_fake("muon_zero::fingerprint", lib=_LIBRARY)
def _(xs: Sequence[Tensor]) -> Tensor:
    return xs[0].new_empty((len(xs), FINGERPRINT_WORDS), dtype=torch.int64)


@torch.library.register_fake("muon_zero::examine", lib=_LIBRARY)
def _(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    found = xs[0].new_empty((len(xs), FINGERPRINT_WORDS), dtype=torch.int64)
    return found, xs[0].new_empty(len(xs), dtype=torch.float32)


FINGERPRINT = torch.ops.muon_zero.fingerprint.default
#: the fingerprints of tensors and the squares of their norms, on CUDA in one pass over them
EXAMINE = torch.ops.muon_zero.examine.default


def fingerprint(xs: Sequence[Tensor]) -> Tensor:
    """Fingerprints of the contents of ``xs``, see the module's docstring for the formula and for what collides.

    Bits count, not numbers: -0.0 and 0.0 differ, and so do two NaNs of different payload. Strides do not count: a
    copy in another layout, read in the order of its indices, has the same fingerprint. Nothing waits for the device,
    and the only copies are of tensors that are not contiguous or start in the middle of a word.

    Args:
        xs: at least one tensor, of any shapes (empty ones too) and dtypes, on one device. Not modified.
    Returns:
        ``[len(xs), FINGERPRINT_WORDS]`` int64, on that device.
    Raises:
        ValueError: no tensor.
    """
    if not xs:
        raise ValueError("fingerprint of no tensors: give at least one")
    return FINGERPRINT(list(xs))
