"""Which matrices of a list are worked on at once, so that the memory that takes is bounded.

Each matrix takes a known number of bytes of work memory. A chunk's stay under a limit, or the chunk is one matrix that
exceeds it by itself. Stacks [b, m, n] may be cut along b. Large matrices come first and so share chunks: beside one
whose tiles take long a small one ends too early to fill anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "Stack", "chunked"]


@dataclass(frozen=True)
class Stack:
    """Matrices of one tensor.

    Args:
        matrices: how many, at least one.
        bytes_each: of work memory for one of them, at least one.
    """

    matrices: int
    bytes_each: int


@dataclass(frozen=True)
class Piece:
    """Matrices ``start`` to ``stop`` of the stack numbered ``index``."""

    index: int
    start: int
    stop: int


def chunked(stacks: Sequence[Stack], limit: int) -> list[list[Piece]]:
    """Every matrix of every stack once, in chunks.

    Args:
        stacks: in any order.
        limit: bytes of work memory; a chunk that takes more is a single matrix.
    Returns:
        Chunks in the order they are to run, none empty; at most one piece of a stack in each.
    """
    chunks: list[list[Piece]] = []
    room = 0
    for index in sorted(range(len(stacks)), key=lambda i: -stacks[i].bytes_each):
        stack, start = stacks[index], 0
        while start < stack.matrices:
            fitting = room // stack.bytes_each
            if fitting <= 0:
                chunks.append([])
                room = limit
                fitting = max(limit // stack.bytes_each, 1)
            stop = min(start + fitting, stack.matrices)
            chunks[-1].append(Piece(index, start, stop))
            room -= (stop - start) * stack.bytes_each
            start = stop
    return chunks
