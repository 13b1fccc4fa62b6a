"""Views: a parameter as several matrices, each orthogonalized separately.

The heads of a projection, q, k and v of a fused one, Megatron's interleaved groups: each matrix consists of *runs* of
consecutive rows, or of columns, of the parameter as ``[rows, cols]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """``runs`` of rows or columns, ``(start, stop)`` each, concatenated and cut into ``count`` equal matrices."""

    runs: tuple[tuple[int, int], ...]
    count: int = 1

    @property
    def size(self) -> int:
        """Rows or columns of one matrix."""
        return sum(stop - start for start, stop in self.runs) // self.count

    def pieces(self) -> list[tuple[int, int, int]]:
        """Return the runs cut between matrices: ``(number of the matrix in the block, start, stop)`` each."""
        matrix_runs, total = [], 0
        for start, stop in self.runs:
            while start < stop:
                number, inside = divmod(total, self.size)
                step = min(stop - start, self.size - inside)
                matrix_runs.append((number, start, start + step))
                start, total = start + step, total + step
        return matrix_runs


@dataclass(frozen=True)
class Segment:
    """A range of a rank's piece that holds ``count`` equal parts: one of each of several consecutive matrices."""

    first: int  # number of the first matrix in the view
    count: int
    start: int  # rows or columns ``start`` to ``stop`` of the piece
    stop: int
    dim: int  # 0 for rows, 1 for columns

    def of(self, piece: Tensor) -> Tensor:
        """Return the parts of a piece ``[rows, cols]`` as ``[count, r, c]``, the same memory."""
        segment = piece.narrow(self.dim, self.start, self.stop - self.start)
        return segment.unflatten(self.dim, (self.count, -1)).movedim(self.dim, 0)

    def of_rows(self, state: Tensor) -> Tensor:
        """Return ``[count, r, 1]`` of a state ``[rows, 1]`` (``[rows, matrices]`` if columns are cut): same memory."""
        if self.dim == 0:
            return self.of(state)
        return state[:, self.first : self.first + self.count].movedim(1, 0).unsqueeze(-1)


@dataclass(frozen=True)
class View:
    """A ``[rows, cols]`` parameter as matrices, in ``blocks`` that hold every row (``dim`` 0) or column (1) once."""

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
        """Build the view that a user's setting describes, for a parameter of ``size`` rows (``dim=0``) or columns.

        ``split`` has the sizes of fused parts, ``heads`` the matrices in each or in all of them. ``groups``: the parts
        repeat that often, as in Megatron's fused attention with one group for each group of queries. ValueError where
        sizes do not add up.

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
        for block in blocks[1:]:  # Blocks of equal matrices side by side become one: fewer, larger batches.
            last = merged[-1]
            if groups == 1 and block.size == last.size:
                merged[-1] = Block(((last.runs[0][0], block.runs[0][1]),), last.count + block.count)
            else:
                merged.append(block)
        return cls(tuple(merged), dim)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> View:
        """Return the view whose ``dataclasses.asdict``, sent through JSON, is ``fields``."""
        blocks = (Block(tuple((a, b) for a, b in block["runs"]), block["count"]) for block in fields["blocks"])
        return cls(tuple(blocks), fields["dim"])

    @property
    def count(self) -> int:
        """Number of matrices."""
        return sum(block.count for block in self.blocks)

    def shapes(self, rows: int, cols: int) -> tuple[tuple[int, int, int], ...]:
        """``(count, rows, cols)`` of each block."""
        return tuple(
            (block.count, block.size, cols) if self.dim == 0 else (block.count, rows, block.size)
            for block in self.blocks
        )

    def shape_of(self, number: int, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns of matrix ``number``."""
        for count, *shape in self.shapes(rows, cols):
            if number < count:
                return shape[0], shape[1]
            number -= count
        raise IndexError(number)

    def cut(self, matrix: Tensor) -> list[Tensor]:
        """Return the matrices of each block, ``[count, r, c]``, of a ``[rows, cols]`` parameter; pure."""
        stacks = []
        for block in self.blocks:
            runs = [matrix.narrow(self.dim, start, stop - start) for start, stop in block.runs]
            joined_runs = runs[0] if len(runs) == 1 else torch.cat(runs, self.dim)
            parts = joined_runs.reshape(block.count, block.size, -1) if self.dim == 0 else torch.stack(
                joined_runs.chunk(block.count, 1)
            )  # fmt: skip
            stacks.append(parts)
        return stacks

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parameter ``[rows, cols]`` of which :meth:`cut` makes ``parts``."""
        run_at: dict[int, Tensor] = {}
        for block, part in zip(self.blocks, parts, strict=True):
            joined_runs = part.flatten(0, 1) if self.dim == 0 else torch.cat(list(part), 1)
            sizes = [stop - start for start, stop in block.runs]
            runs = [joined_runs] if len(sizes) == 1 else joined_runs.split(sizes, self.dim)
            run_at |= {start: run for (start, _), run in zip(block.runs, runs, strict=True)}
        return torch.cat([run_at[start] for start in sorted(run_at)], self.dim) if len(run_at) > 1 else run_at[0]

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return the segments of rows, or columns, ``start`` to ``stop``; equal neighbours in a block form one."""
        matrix_runs, first = [], 0
        for place, block in enumerate(self.blocks):
            matrix_runs += [(max(a, start), min(b, stop), first + number, place) for number, a, b in block.pieces()]
            first += block.count
        segments: list[Segment] = []
        last_place = -1
        for low, high, number, place in sorted(run for run in matrix_runs if run[0] < run[1]):
            last = segments[-1] if place == last_place else None
            last_place = place
            width = 0 if last is None else (last.stop - last.start) // last.count
            if last is not None and high - low == width and number == last.first + last.count:
                segments[-1] = Segment(last.first, last.count + 1, last.start, high - start, self.dim)
            else:
                segments.append(Segment(number, 1, low - start, high - start, self.dim))
        return segments

    def within(self, start: int, stop: int) -> View | None:
        """Return the view of rows ``start`` to ``stop`` alone if they are whole matrices, else None."""
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
    """Equal matrices, or parts of matrices, in a rank's piece of a parameter."""

    first: int  # number of the first matrix in the whole parameter
    rows: int  # of each whole matrix
    cols: int
    segment: Segment | None  # their place in the piece; None for all of it
    stack: bool  # whether dim 0 of the piece counts them

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a piece, or of an elementwise state, as ``[n, r, c]``: the same memory."""
        if self.segment is not None:
            return self.segment.of(tensor)
        return tensor if self.stack else tensor.flatten(1).unsqueeze(0)

    def corners(self, tensor: Tensor) -> Tensor:
        """Return one entry of each matrix, ``[n]``, or ``[0]`` of an empty piece: the same memory."""
        return self.of(tensor)[:, :1, :1].flatten()

    def of_rows(self, state: Tensor) -> Tensor:
        """Return the part of a state with one number a row, as ``[n, r, 1]``: the same memory."""
        if self.segment is not None:
            return self.segment.of_rows(state)
        return state if self.stack else state.unsqueeze(0)


def most_work(shapes: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return rows and cols of the ``(count, rows, cols)`` with the most multiplications."""
    count_rows_cols = max(shapes, key=lambda shape: shape[0] * min(shape[1:]) * math.prod(shape[1:]))
    return count_rows_cols[1], count_rows_cols[2]
