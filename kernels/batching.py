"""Batching: a list of tensors of matrices, each [..., m, n], becomes calls that take one matrix or one batch.

Shapes in names: B matrices of R rows and C columns, or on the wide orientation K ≤ L.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .call_plan import Plan

#: orthogonalizes one matrix or a batch of them, never empty, into a new contiguous tensor of that shape
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
    rows, cols = xs[0].shape[-2:]
    bytes_each = batch_bytes(rows, cols, xs[0].element_size(), plan.dtype.itemsize)
    xs_BRC = [x.reshape(-1, rows, cols) for x in xs]
    chunks = chunked([Stack(len(x_BRC), bytes_each) for x_BRC in xs_BRC], plan.memory_limit)
    if len(chunks) == len(xs) == 1:
        return [implementation(xs[0] if xs[0].ndim == 2 else xs_BRC[0], plan).view(xs[0].shape)]
    # A custom operator's results may not share memory: parts of batches are copied into a tensor for each.
    results = [_empty(x, plan) for x in xs]
    results_BRC = [result.view(-1, rows, cols) for result in results]
    for chunk in chunks:
        parts_BRC = [xs_BRC[index][piece] for index, piece in chunk]
        x_BRC = parts_BRC[0] if len(parts_BRC) == 1 else torch.cat(parts_BRC)
        out_BRC = implementation(x_BRC[0], plan)[None] if len(x_BRC) == 1 else implementation(x_BRC, plan)
        for (index, piece), part_BRC in zip(chunk, out_BRC.split([len(part) for part in parts_BRC]), strict=True):
            results_BRC[index][piece] = part_BRC
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


def batch_bytes(rows: int, cols: int, input_itemsize: int, itemsize: int) -> int:
    """Count the work bytes of one matrix on aten: ``input_itemsize`` for an entry of the input, ``itemsize`` after."""
    # The batch's copies of the matrix and of its result, X twice, four k × k matrices, and X in float32.
    k = min(rows, cols)
    return rows * cols * (input_itemsize + 3 * itemsize + 4) + 4 * k * k * itemsize


def _matrices_of(x: Tensor, plan: Plan, implementation: Implementation) -> Tensor:
    if x.numel() == 0:
        return _empty(x, plan)
    if x.ndim == 2:
        return implementation(x, plan)
    x_BRC = x.reshape(-1, *x.shape[-2:])
    return torch.stack([implementation(x_RC, plan) for x_RC in x_BRC]).view(x.shape)


def _empty(x: Tensor, plan: Plan) -> Tensor:
    return torch.empty(x.shape, dtype=plan.dtype, device=x.device)


def wide(x: Tensor) -> Tensor:
    """View [..., m, n] as x_BKL; a copy only where strides demand one."""
    x_BRC = x.reshape(-1, *x.shape[-2:])
    return x_BRC.mT if x_BRC.shape[1] > x_BRC.shape[2] else x_BRC
