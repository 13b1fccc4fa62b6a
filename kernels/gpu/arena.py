"""Arenas: the matrices of a list in one flat tensor, so that one launch reaches all of them.

An arena holds the k × l matrices of a list, or a k × k one (``square``) for each: shape after shape, the matrices of a
shape next to one another. Rows are padded **with zeros** to a pitch that is a multiple of 16 elements. The grouped
kernels read and write the padding like other entries: zeros stay zeros in every product, and bounds along a row are
multiples of 16, which keeps accesses wide.
"""

import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .model import ceildiv

# Elements of which the start of a shape is a multiple: 128 bytes, which Triton and descriptors read fastest.
ALIGNMENT = 64
# Tensors of one shape are copied into one if a matrix has at most so many entries: the three launches that each tensor
# saves take the host about as long as a GPU needs for all of a 1024 × 4096 matrix. An estimate, like the tile tables.
SMALL = 2**22
# most bytes of partial norms that normalization holds for a matrix: 256 pairs of float32
PARTIAL_NORMS = 2048


def _pitch(cols: int) -> int:
    return ceildiv(cols, 16) * 16


def _elements(matrices: int, rows: int, cols: int) -> int:
    return ceildiv(matrices * rows * _pitch(cols), ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """The shapes of a list of matrices, and their places in an arena of either kind."""

    shapes: tuple[tuple[int, int, int], ...]  # (matrices, k, l) with k ≤ l, each (k, l) once, in the order of work

    def widths(self, *, square: bool) -> list[int]:
        """Return the columns of each shape's matrices."""
        return [shape[1] if square else shape[2] for shape in self.shapes]

    def pitches(self, *, square: bool) -> list[int]:
        """Return the elements from row to row of each shape."""
        return [_pitch(cols) for cols in self.widths(square=square)]

    def starts(self, *, square: bool) -> list[int]:
        """Return the element that each shape begins at, then the arena's number of elements."""
        sizes = zip(self.shapes, self.widths(square=square), strict=True)
        return [0, *accumulate(_elements(b, k, cols) for (b, k, _), cols in sizes)]

    def new(self, dtype: torch.dtype, device: torch.device, *, square: bool, zero: bool = False) -> "Matrices":
        """Allocate an arena, uninitialized; with ``zero``, for kernels that write no padding, with padding of zeros."""
        padded = self.pitches(square=square) != self.widths(square=square)
        make = torch.zeros if zero and padded else torch.empty
        return Matrices(self, make(self.starts(square=square)[-1], dtype=dtype, device=device), square)


@dataclass(frozen=True)
class Matrices:
    """The matrices of a list: in an arena, or in the tensors that take the results of the last product."""

    layout: Layout
    flat: Tensor  # the arena, one-dimensional; empty for results
    square: bool  # the matrices are k × k
    # [B, K, L] with any strides, in the order of Layout.shapes; one or more tensors a shape
    results: tuple[Tensor, ...] = ()

    @cached_property
    def views(self) -> list[Tensor]:
        """A view [B, K, L or K] of each shape, without the padding."""
        layout, square = self.layout, self.square
        columns = layout.widths(square=square), layout.pitches(square=square), layout.starts(square=square)
        return [
            self.flat.as_strided((b, k, cols), (k * pitch, pitch, 1), start)
            for (b, k, _), cols, pitch, start in zip(layout.shapes, *columns, strict=False)  # starts end with a total
        ]

    def new(self, *, square: bool) -> "Matrices":
        """Allocate an arena of the same layout and dtype, uninitialized."""
        return self.layout.new(self.flat.dtype, self.flat.device, square=square)

    def parts(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the views of this arena that belong to ``tensors``, a list like :attr:`results`."""
        parts: list[Tensor] = []
        for view_BKL in self.views:
            start = 0
            while start < len(view_BKL):
                stop = start + len(tensors[len(parts)])
                parts.append(view_BKL[start:stop])
                start = stop
        return parts


def work_bytes(k: int, l: int, method: str, steps: int, restarts: int, itemsize: int) -> int:  # noqa: E741
    """Count the arena bytes that one k × l matrix, k ≤ l, takes at the peak of ``iterations``, without its result."""
    # The standard form holds X, the next X, A and B; its last X is a result. The gram form holds X and at most seven
    # k × k matrices: the last segment's Q, and R, S, the new S or R, Z, Q and the new Q; or X, the next X and Q.
    square, wide = _elements(1, k, k), _elements(1, k, l)
    if method == "standard":
        segments, elements = steps, wide + (wide + 2 * square if steps > 1 else 2 * square)
    else:
        segments, elements = restarts + 1, wide + max(7 * square, wide + square if restarts else 0)
    if sys.version_info < (3, 11) and segments > 1:  # before 3.11 a call keeps its arguments alive: the first X
        elements += wide
    return elements * itemsize + PARTIAL_NORMS


def list_bytes(k: int, l: int, method: str, steps: int, restarts: int, given: int, itemsize: int) -> int:  # noqa: E741
    """Count the bytes that one k × l matrix of a list takes beside input and result; ``given``: bytes of its entry."""
    copied = k * l * (given + itemsize) if k * l <= SMALL else 0  # input and result of tensors that are copied into one
    return copied + work_bytes(k, l, method, steps, restarts, itemsize)
