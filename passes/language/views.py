"""Views: which parts of one parameter are matrices of their own, each orthogonalized by itself.

A head of a projection, the q, k and v of a fused one, the rows of Megatron's interleaved groups: all of them are runs
of rows, or of columns, of the parameter seen as ``[rows, cols]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

__all__ = ["Block", "Part", "Segment", "View", "most_work"]


@dataclass(frozen=True)
class Block:
    """Equal matrices: what is in ``runs``, one behind the other, cut into ``count`` parts.

    Args:
        runs: ``(start, stop)`` of rows or columns.
        count: how many matrices.
    """

    runs: tuple[tuple[int, int], ...]
    count: int = 1

    @property
    def size(self) -> int:
        """Rows or columns of one matrix."""
        return sum(stop - start for start, stop in self.runs) // self.count

    def pieces(self) -> list[tuple[int, int, int]]:
        """``(matrix of the block, start, stop)``, a run of one matrix each."""
        found, done = [], 0
        for start, stop in self.runs:
            while start < stop:
                number, inside = divmod(done, self.size)
                step = min(stop - start, self.size - inside)
                found.append((number, start, start + step))
                start, done = start + step, done + step
        return found


@dataclass(frozen=True)
class Segment:
    """A place in a rank's piece: ``count`` equal parts, one behind the other, each of a matrix of its own.

    Args:
        first: number of the first of these matrices in the view.
        start, stop: rows or columns of the piece.
        dim: 0 for rows, 1 for columns.
    """

    first: int
    count: int
    start: int
    stop: int
    dim: int

    def of(self, piece: Tensor) -> Tensor:
        """``[rows, cols]`` -> ``[count, r, c]``, the same memory."""
        own = piece.narrow(self.dim, self.start, self.stop - self.start)
        return own.unflatten(self.dim, (self.count, -1)).movedim(self.dim, 0)

    def of_rows(self, state: Tensor) -> Tensor:
        """A state with one number a row, ``[rows, 1]``, or ``[rows, matrices]`` where columns are cut."""
        if self.dim == 0:
            return self.of(state)
        return state[:, self.first : self.first + self.count].movedim(1, 0).unsqueeze(-1)


@dataclass(frozen=True)
class View:
    """A parameter of ``[rows, cols]`` as matrices.

    Args:
        blocks: that hold every row, or column, once.
        dim: 0 where rows are cut, 1 for columns.
    """

    blocks: tuple[Block, ...]
    dim: int = 0

    @classmethod
    def of(
        cls,
        size: int,
        *,
        split: Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        groups: int = 1,
        dim: int = 0,
    ) -> View:
        """What users say.

        Args:
            size: rows (``dim=0``) or columns of the parameter.
            split: sizes of the fused parts; None for one part.
            heads: matrices in each part, or in all of them.
            groups: how often the parts take turns: Megatron's fused attention has those of each group of queries.
        Raises:
            ValueError: it does not add up.

        >>> View.of(12, split=[8, 2, 2], heads=[4, 1, 1]).shapes(12, 5)
        ((4, 2, 5), (2, 2, 5))
        """
        parts = [size] if split is None else list(split)
        counts = list(heads) if isinstance(heads, Sequence) else [1 if heads is None else heads] * len(parts)
        for name, numbers in {"split": parts, "heads": counts, "groups": [groups]}.items():
            for number in numbers:
                if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
                    raise ValueError(f"{name} = {number!r}: must be a positive integer")
        if isinstance(dim, bool) or dim not in (0, 1):
            raise ValueError(f"dim = {dim}: must be 0 for rows or 1 for columns")
        if sum(parts) != size:
            raise ValueError(f"split = {parts}: adds up to {sum(parts)}, not to the {size} there are")
        if len(counts) != len(parts):
            raise ValueError(f"heads = {counts}: are not one number for each of {len(parts)} parts")
        blocks, start = [], 0
        for part, count in zip(parts, counts, strict=True):
            if part % count or part % groups:
                what = f"{count} heads" if part % count else f"{groups} groups"
                raise ValueError(f"{part} {'columns' if dim else 'rows'} are no whole number for each of {what}")
            width = part // groups
            runs = tuple((g * (size // groups) + start, g * (size // groups) + start + width) for g in range(groups))
            blocks.append(Block(runs, count))
            start += width
        merged = [blocks[0]]
        for block in blocks[1:]:  # equal neighbours are one
            last = merged[-1]
            if groups == 1 and block.size == last.size:
                merged[-1] = Block(((last.runs[0][0], block.runs[0][1]),), last.count + block.count)
            else:
                merged.append(block)
        return cls(tuple(merged), dim)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> View:
        """Inverse of ``dataclasses.asdict``, through JSON."""
        blocks = (Block(tuple((a, b) for a, b in block["runs"]), block["count"]) for block in fields["blocks"])
        return cls(tuple(blocks), fields["dim"])

    @property
    def count(self) -> int:
        """Matrices."""
        return sum(block.count for block in self.blocks)

    def shapes(self, rows: int, cols: int) -> tuple[tuple[int, int, int], ...]:
        """``(count, rows, cols)`` of the matrices of each block."""
        return tuple(
            (block.count, block.size, cols) if self.dim == 0 else (block.count, rows, block.size)
            for block in self.blocks
        )

    def shape_of(self, number: int, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns of one of the matrices."""
        for count, *shape in self.shapes(rows, cols):
            if number < count:
                return shape[0], shape[1]
            number -= count
        raise IndexError(number)

    def cut(self, matrix: Tensor) -> list[Tensor]:
        """``[rows, cols]`` -> the matrices of each block, ``[count, r, c]``; pure."""
        found = []
        for block in self.blocks:
            runs = [matrix.narrow(self.dim, start, stop - start) for start, stop in block.runs]
            whole = runs[0] if len(runs) == 1 else torch.cat(runs, self.dim)
            parts = whole.reshape(block.count, block.size, -1) if self.dim == 0 else torch.stack(
                whole.chunk(block.count, 1)
            )  # fmt: skip
            found.append(parts)
        return found

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverse of :meth:`cut`."""
        found: dict[int, Tensor] = {}
        for block, part in zip(self.blocks, parts, strict=True):
            whole = part.flatten(0, 1) if self.dim == 0 else torch.cat(list(part), 1)
            sizes = [stop - start for start, stop in block.runs]
            pieces = [whole] if len(sizes) == 1 else whole.split(sizes, self.dim)
            found |= {start: piece for (start, _), piece in zip(block.runs, pieces, strict=True)}
        return torch.cat([found[start] for start in sorted(found)], self.dim) if len(found) > 1 else found[0]

    def segments(self, start: int, stop: int) -> list[Segment]:
        """What a rank that has these rows, or columns, has of each matrix; equal ones of a block together."""
        pieces, first = [], 0
        for place, block in enumerate(self.blocks):
            pieces += [(max(a, start), min(b, stop), first + number, place) for number, a, b in block.pieces()]
            first += block.count
        found: list[Segment] = []
        before = -1
        for low, high, number, place in sorted(piece for piece in pieces if piece[0] < piece[1]):
            last = found[-1] if place == before else None
            before = place
            width = 0 if last is None else (last.stop - last.start) // last.count
            if last is not None and high - low == width and number == last.first + last.count:
                found[-1] = Segment(last.first, last.count + 1, last.start, high - start, self.dim)
            else:
                found.append(Segment(number, 1, low - start, high - start, self.dim))
        return found

    def within(self, start: int, stop: int) -> View | None:
        """The view of rows ``start`` to ``stop`` alone, where they are whole matrices; else None."""
        if self.dim != 0:
            return None
        blocks = []
        for block in self.blocks:
            if len(block.runs) > 1:
                return None
            (low, high), size = block.runs[0], block.size
            low, high = max(low, start), min(high, stop)
            if low >= high:
                continue
            if (low - block.runs[0][0]) % size or (high - block.runs[0][0]) % size:
                return None
            blocks.append(Block(((low - start, high - start),), (high - low) // size))
        return View(tuple(blocks))


@dataclass(frozen=True)
class Part:
    """Equal matrices, or rows of matrices, in a rank's piece of a parameter.

    Args:
        first: number of the first of them in the whole parameter.
        rows, cols: of each whole matrix.
        segment: where they are, None for all of the piece.
        stack: whether dim 0 of the piece counts them.
    """

    first: int
    rows: int
    cols: int
    segment: Segment | None
    stack: bool

    def of(self, tensor: Tensor) -> Tensor:
        """A piece, or a state of its elements, as ``[n, r, c]``: the same memory."""
        if self.segment is not None:
            return self.segment.of(tensor)
        return tensor if self.stack else tensor.flatten(1).unsqueeze(0)

    def corners(self, tensor: Tensor) -> Tensor:
        """One entry of each matrix that a piece has a part of, ``[n]``, or ``[0]``: the same memory."""
        return self.of(tensor)[:, :1, :1].flatten()

    def of_rows(self, state: Tensor) -> Tensor:
        """A state of the piece's rows, as ``[n, r, 1]``: the same memory."""
        if self.segment is not None:
            return self.segment.of_rows(state)
        return state if self.stack else state.unsqueeze(0)


def most_work(shapes: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Rows and columns of the matrices that take the most multiplications together."""
    count_rows_cols = max(shapes, key=lambda shape: shape[0] * min(shape[1:]) * math.prod(shape[1:]))
    return count_rows_cols[1], count_rows_cols[2]
