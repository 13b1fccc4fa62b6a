"""How a list of tensors of matrices, each [..., m, n], becomes calls of a function of one matrix or one batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .plan import Plan

__all__ = ["Implementation", "one_batch_per_shape", "one_by_one"]

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
    """All matrices of equal shape in one batch; a matrix that is the only one of its shape runs unbatched.

    Only tensors of the same dtype share a batch, so that none is normalized in another's precision.

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
    for (m, n, _), indices in groups.items():
        group = [xs[i] for i in indices]
        results.update(zip(indices, _batched(group, m, n, plan, implementation), strict=True))
    return [results[i] for i in range(len(xs))]


def _batched(xs: Sequence[Tensor], m: int, n: int, plan: Plan, implementation: Implementation) -> list[Tensor]:
    if len(xs) == 1 and xs[0].ndim == 2:
        return [implementation(xs[0], plan)]
    flat = [x.reshape(-1, m, n) for x in xs]
    if len(xs) == 1:
        return [implementation(flat[0], plan).view(xs[0].shape)]
    parts = implementation(torch.cat(flat), plan).split([len(x) for x in flat])
    # The results of one operator may not share memory: each part becomes its own tensor.
    return [part.clone().view(x.shape) for part, x in zip(parts, xs, strict=True)]


def _matrices_of(x: Tensor, plan: Plan, implementation: Implementation) -> Tensor:
    if x.numel() == 0:
        return _empty(x, plan)
    if x.ndim == 2:
        return implementation(x, plan)
    matrices = x.reshape(-1, *x.shape[-2:])
    return torch.stack([implementation(matrix, plan) for matrix in matrices]).view(x.shape)


def _empty(x: Tensor, plan: Plan) -> Tensor:
    return torch.empty(x.shape, dtype=plan.dtype, device=x.device)
