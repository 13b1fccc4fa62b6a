"""How a list of tensors of matrices, each [..., m, n], becomes calls of a function of one matrix or one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .call_plan import Plan

__all__ = ["Implementation", "Stack", "batch_bytes", "chunked", "one_batch_per_shape", "one_by_one", "wide"]

# One matrix [m, n] or a batch [b, m, n], never empty, to a new contiguous tensor of that shape.
Implementation = Callable[[Tensor, Plan], Tensor]


def one_by_one(xs: Sequence[Tensor], plan: Plan, implementation: Implementation) -> list[Tensor]:
    """Every matrix by itself, in two dimensions: for CPUs, where a batched product is no faster than its parts.

    Args:
        xs, plan, implementation: as for :func:`one_batch_per_shape`.
    Returns:
        New tensors of the inputs' shapes.
    """
    return [_matrices_of(x, plan, implementation) for x in xs]


def one_batch_per_shape(xs: Sequence[Tensor], plan: Plan, implementation: Implementation) -> list[Tensor]:
    """Matrices of equal shape in batches; a matrix that is by itself runs unbatched.

    A batch takes no more than ``plan.memory_limit`` beside inputs and results, but for a single matrix. Only tensors of
    the same dtype share a batch, so that none is normalized in another's precision.

    Args:
        xs: tensors [..., m, n].
        plan: for each.
        implementation: computes a matrix or a batch.
    Returns:
        New tensors of the inputs' shapes that share no memory.
    """
    groups: dict[tuple[int, int, torch.dtype], list[int]] = {}
    results: dict[int, Tensor] = {}
    for i, x in enumerate(xs):
        if x.numel() == 0:
            results[i] = _empty(x, plan)
        else:
            groups.setdefault((x.shape[-2], x.shape[-1], x.dtype), []).append(i)
    for indices in groups.values():
        group = [xs[i] for i in indices]
        results.update(zip(indices, _batched(group, plan, implementation), strict=True))
    return [results[i] for i in range(len(xs))]


def _batched(xs: Sequence[Tensor], plan: Plan, implementation: Implementation) -> list[Tensor]:
    """Tensors of matrices of one shape."""
    m, n = xs[0].shape[-2:]
    stacks = [x.reshape(-1, m, n) for x in xs]
    chunks = chunked(
        [Stack(len(stack), batch_bytes(m, n, xs[0].element_size(), plan.dtype.itemsize)) for stack in stacks],
        plan.memory_limit,
    )
    if len(chunks) == len(xs) == 1:
        return [implementation(xs[0] if xs[0].ndim == 2 else stacks[0], plan).view(xs[0].shape)]
    # The results of one operator may not share memory: each has its own, and parts of batches are copied there.
    results = [_empty(x, plan) for x in xs]
    flat = [result.view(-1, m, n) for result in results]
    for chunk in chunks:
        parts = [stacks[index][piece] for index, piece in chunk]
        batch = parts[0] if len(parts) == 1 else torch.cat(parts)
        done = implementation(batch[0], plan)[None] if len(batch) == 1 else implementation(batch, plan)
        sizes = [len(part) for part in parts]
        for (index, piece), part in zip(chunk, done.split(sizes), strict=True):
            flat[index][piece] = part
    return results


@dataclass(frozen=True)
class Stack:
    """Matrices of one tensor.

    Args:
        matrices: how many, at least one.
        bytes_each: of work memory for one of them, at least one.
    """

    matrices: int
    bytes_each: int


def chunked(stacks: Sequence[Stack], limit: int) -> list[list[tuple[int, slice]]]:
    """Which matrices of a list are worked on at once, so that the memory that takes is bounded: each of them once.

    A chunk's work memory stays under the limit, or the chunk is one matrix that exceeds it by itself. Large matrices
    come first and so share chunks: beside one whose tiles take long a small one ends too early to fill anything.

    Args:
        stacks: in any order; they may be cut.
        limit: bytes of work memory.
    Returns:
        Chunks in the order they are to run, none empty: numbers of stacks, each at most once, and their matrices.
    """
    chunks: list[list[tuple[int, slice]]] = []
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
            chunks[-1].append((index, slice(start, stop)))
            room -= (stop - start) * stack.bytes_each
            start = stop
    return chunks


def batch_bytes(m: int, n: int, given: int, itemsize: int) -> int:
    """Of one matrix on aten: the batch's copies of it and of its result, X twice, four k × k, and X in float32.

    Args:
        m, n: its shape.
        given: bytes of an entry of the input.
        itemsize: bytes of one where it is computed.
    """
    k = min(m, n)
    return m * n * (given + 3 * itemsize + 4) + 4 * k * k * itemsize


def _matrices_of(x: Tensor, plan: Plan, implementation: Implementation) -> Tensor:
    if x.numel() == 0:
        return _empty(x, plan)
    if x.ndim == 2:
        return implementation(x, plan)
    matrices = x.reshape(-1, *x.shape[-2:])
    return torch.stack([implementation(matrix, plan) for matrix in matrices]).view(x.shape)


def _empty(x: Tensor, plan: Plan) -> Tensor:
    return torch.empty(x.shape, dtype=plan.dtype, device=x.device)


def wide(x: Tensor) -> Tensor:
    """[..., m, n] as [b, k, l] with k ≤ l."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.mT if x.shape[1] > x.shape[2] else x
