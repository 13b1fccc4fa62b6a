"""Batching: a list of tensors of matrices, each [..., m, n], becomes calls that take one matrix or one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .call_plan import Plan

# orthogonalizes one matrix [m, n] or a batch [b, m, n], never empty, into a new contiguous tensor of that shape
Implementation = Callable[[Tensor, Plan], Tensor]


def one_by_one(xs: Sequence[Tensor], plan: Plan, implementation: Implementation) -> list[Tensor]:
    """Run each matrix by itself, as [m, n]: on CPUs a batched product is no faster than its parts."""
    return [_matrices_of(x, plan, implementation) for x in xs]


def one_batch_per_shape(xs: Sequence[Tensor], plan: Plan, implementation: Implementation) -> list[Tensor]:
    """Run matrices of equal shape in batches under ``plan.memory_limit``; the results share no memory."""
    groups: dict[tuple[int, int, torch.dtype], list[int]] = {}
    results: dict[int, Tensor] = {}
    for i, x in enumerate(xs):
        if x.numel() == 0:
            results[i] = _empty(x, plan)
        else:
            # By dtype, too, so that no tensor is normalized in another's precision.
            groups.setdefault((x.shape[-2], x.shape[-1], x.dtype), []).append(i)
    for indices in groups.values():
        group = [xs[i] for i in indices]
        results.update(zip(indices, _batched(group, plan, implementation), strict=True))
    return [results[i] for i in range(len(xs))]


def _batched(xs: Sequence[Tensor], plan: Plan, implementation: Implementation) -> list[Tensor]:
    """Run tensors whose matrices have one shape and dtype, in chunks under the memory limit."""
    m, n = xs[0].shape[-2:]
    stacks = [x.reshape(-1, m, n) for x in xs]
    chunks = chunked(
        [Stack(len(stack), batch_bytes(m, n, xs[0].element_size(), plan.dtype.itemsize)) for stack in stacks],
        plan.memory_limit,
    )
    if len(chunks) == len(xs) == 1:
        return [implementation(xs[0] if xs[0].ndim == 2 else stacks[0], plan).view(xs[0].shape)]
    # A custom operator's results may not share memory: parts of batches are copied into a tensor for each.
    results = [_empty(x, plan) for x in xs]
    result_stacks = [result.view(-1, m, n) for result in results]
    for chunk in chunks:
        parts = [stacks[index][piece] for index, piece in chunk]
        batch = parts[0] if len(parts) == 1 else torch.cat(parts)
        orthogonal = implementation(batch[0], plan)[None] if len(batch) == 1 else implementation(batch, plan)
        sizes = [len(part) for part in parts]
        for (index, piece), part in zip(chunk, orthogonal.split(sizes), strict=True):
            result_stacks[index][piece] = part
    return results


@dataclass(frozen=True)
class Stack:
    """The size of one tensor of matrices."""

    matrices: int  # number of matrices, at least one
    bytes_each: int  # bytes of work memory for one matrix, at least one


def chunked(stacks: Sequence[Stack], limit: int) -> list[list[tuple[int, slice]]]:
    """Cut a list of stacks into chunks that run one after another, each within ``limit`` bytes of work memory.

    A chunk is a list of (index of a stack, slice of its matrices), each stack at most once; no chunk is empty, and each
    matrix is in one of them. A matrix that exceeds the limit by itself is a chunk.
    """
    chunks: list[list[tuple[int, slice]]] = []
    room = 0
    # Large matrices first and together: a small matrix ends too early to fill the GPU beside one with long tiles.
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


def batch_bytes(m: int, n: int, input_itemsize: int, itemsize: int) -> int:
    """Count the work bytes of one m × n matrix on aten: ``input_itemsize`` an input entry, ``itemsize`` after."""
    # The batch's copies of the matrix and of its result, X twice, four k × k matrices, and X in float32.
    k = min(m, n)
    return m * n * (input_itemsize + 3 * itemsize + 4) + 4 * k * k * itemsize


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
    """View [..., m, n] as [b, k, l] with k ≤ l, a copy only where strides demand one."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.mT if x.shape[1] > x.shape[2] else x
