"""The matrices of a list in one flat tensor, so that one launch reaches all of them.

Matrices of a shape lie next to one another, and shape follows on shape. Rows are padded **with zeros** to a pitch that
is a multiple of 16 elements. The grouped kernels read and write the padding like the rest: zeros stay zeros in every
product, and no bound along a row is anything but a multiple of 16, which keeps accesses wide whatever the sizes are.
"""

import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .model import ceildiv

__all__ = ["SMALL", "Layout", "Matrices", "list_bytes", "work_bytes"]

# A shape's first matrix begins at a multiple of so many elements: 128 bytes, what Triton and descriptors like best.
ALIGNMENT = 64
# Entries of a matrix up to which tensors of one shape are copied together: three launches of its own take the host
# about as long as a GPU needs for all of a matrix 1024 × 4096. An estimate, like the tile tables.
SMALL = 2**22
# Bytes that normalization keeps of a matrix while it runs, at most: 256 pairs of float32.
PARTIAL_NORMS = 2048


def _pitch(cols: int) -> int:
    return ceildiv(cols, 16) * 16


def _elements(matrices: int, rows: int, cols: int) -> int:
    return ceildiv(matrices * rows * _pitch(cols), ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """The shapes of a list of matrices, and where an arena of that list has them.

    Args:
        shapes: (matrices, k, l) with k ≤ l, each (k, l) once; in the order they are worked on.
    """

    shapes: tuple[tuple[int, int, int], ...]

    def widths(self, *, square: bool) -> list[int]:
        """Columns of each shape: of its k × k matrices (``square``) or its k × l ones."""
        return [shape[1] if square else shape[2] for shape in self.shapes]

    def pitches(self, *, square: bool) -> list[int]:
        """Elements from row to row of each shape."""
        return [_pitch(cols) for cols in self.widths(square=square)]

    def starts(self, *, square: bool) -> list[int]:
        """The element that each shape begins at, then how many elements the arena has."""
        sizes = zip(self.shapes, self.widths(square=square), strict=True)
        return [0, *accumulate(_elements(b, k, cols) for (b, k, _), cols in sizes)]

    def new(self, dtype: torch.dtype, device: torch.device, *, square: bool, zero: bool = False) -> "Matrices":
        """An arena of k × k (``square``) or k × l matrices: uninitialized, or zeros wherever there is padding.

        Args:
            zero: for whoever writes only the matrices.
        """
        padded = self.pitches(square=square) != self.widths(square=square)
        make = torch.zeros if zero and padded else torch.empty
        return Matrices(self, make(self.starts(square=square)[-1], dtype=dtype, device=device), square)


@dataclass(frozen=True)
class Matrices:
    """The matrices of a list: in an arena, or each tensor of results by itself.

    Args:
        layout: of the list.
        flat: the arena, one-dimensional; None for results.
        square: these are k × k.
        results: [matrices, k, l] with any strides, in the order of :meth:`Layout.shapes`; one or more tensors a shape.
    """

    layout: Layout
    flat: Tensor | None
    square: bool
    results: tuple[Tensor, ...] = ()

    @cached_property
    def views(self) -> list[Tensor]:
        """[matrices, k, l or k] of each shape, without the padding."""
        assert self.flat is not None
        square = self.square
        columns = zip(
            self.layout.widths(square=square),
            self.layout.pitches(square=square),
            self.layout.starts(square=square),
            strict=False,  # starts end with the size
        )
        return [
            self.flat.as_strided((b, k, cols), (k * pitch, pitch, 1), start)
            for (b, k, _), (cols, pitch, start) in zip(self.layout.shapes, columns, strict=True)
        ]

    def new(self, *, square: bool) -> "Matrices":
        """An uninitialized arena of the same list."""
        assert self.flat is not None
        return self.layout.new(self.flat.dtype, self.flat.device, square=square)

    def parts(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """What of this arena belongs to each of ``tensors``, [matrices, k, l] in the order of the layout's shapes."""
        parts: list[Tensor] = []
        for (b, _, _), view in zip(self.layout.shapes, self.views, strict=True):
            taken = 0
            while taken < b:
                matrices = len(tensors[len(parts)])
                parts.append(view[taken : taken + matrices])
                taken += matrices
        return parts


def work_bytes(k: int, l: int, method: str, steps: int, restarts: int, itemsize: int) -> int:  # noqa: E741
    """Bytes of arenas that one k × l matrix takes, results excluded, at the worst moment of ``iterations``.

    The standard form has X, the next X, A and B; its last X is a result. The gram form has X and at most seven k × k
    matrices: the Q of the segment before, and R, S, the new S or R, Z, Q and the new Q; or X, the next X and Q.

    Args:
        k, l: smaller and larger dim.
        method: "standard" or "gram".
        steps, restarts: how many.
        itemsize: bytes of an entry.
    """
    square, wide = _elements(1, k, k), _elements(1, k, l)
    if method == "standard":
        segments, elements = steps, wide + (wide + 2 * square if steps > 1 else 2 * square)
    else:
        segments, elements = restarts + 1, wide + max(7 * square, wide + square if restarts else 0)
    if sys.version_info < (3, 11) and segments > 1:  # a caller keeps its arguments alive there: the first X
        elements += wide
    return elements * itemsize + PARTIAL_NORMS


def list_bytes(k: int, l: int, method: str, steps: int, restarts: int, given: int, itemsize: int) -> int:  # noqa: E741
    """Bytes that one k × l matrix of a list takes beside inputs and results: of arenas, and where it is small of its
    copies, for those of one shape are copied together.

    Args:
        k, l, method, steps, restarts, itemsize: as for :func:`work_bytes`.
        given: bytes of an entry of the input.
    """
    copied = k * l * (given + itemsize) if k * l <= SMALL else 0
    return copied + work_bytes(k, l, method, steps, restarts, itemsize)
