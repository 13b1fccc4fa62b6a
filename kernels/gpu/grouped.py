"""Newton-Schulz of a list of matrices of unequal shapes: each product of all of them is one launch.

Small tensors of one shape are joined to one batch first; a single batch goes to the kernels for one shape. Shapes in
names: B matrices of K rows and L columns, K ≤ L; N parts of a matrix, such as its rows.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from ..batching import Stack, chunked, wide
from ..call_plan import Plan
from ..iterations import FORMS
from . import newton_schulz
from .arena import SMALL, Layout, Matrices, list_bytes
from .grouped_product import grouped_product
from .grouped_symmetric import grouped_symmetric
from .model import Tile
from .normalize import normalize
from .tile_order import results_of


class _Batch(NamedTuple):
    """Matrices of one shape, and the place of their results."""

    x_BKL: Tensor
    out_BKL: Tensor  # in the dtype of the plan, any strides
    norms_B1N: Tensor | None  # of the parts of each matrix in float32, if known


@dataclass(frozen=True)
class GroupedProducts:
    """``iterations.Products`` of all matrices of a list."""

    single: newton_schulz.Products  # for one batch of equal shapes: the last product, and the table of tiles

    def outer(self, x: Matrices) -> Matrices:
        return self.symmetric(x, x)

    def symmetric(
        self,
        left: Matrices,
        right: Matrices,
        *,
        plus: Matrices | None = None,
        beta: float = 0.0,
        alpha: float = 1.0,
        gamma: float = 0.0,
    ) -> Matrices:
        """Return ``alpha left right + beta plus + gamma I``, k × k, new: the lower triangles, mirrored; with k × l
        operands ``left leftᵀ`` for ``left right``."""
        if alpha == 0:  # c of a cubic step, (1.5, -0.5, 0); the kernel computes with β / α
            assert plus is not None
            out = replace(plus, flat=plus.flat * beta)
            if gamma:
                self.add_to_diagonal(out, gamma)
            return out
        out = left.new(square=True)
        tile = self._tile(left, triangle=True, summand=plus is not None)
        numbers = {"alpha": alpha, "beta": beta, "gamma": gamma}
        grouped_symmetric(left, right, out, tile, self.single.processors, plus=plus, **numbers).run()
        return out

    def _tile(self, right: Matrices, *, triangle: bool, summand: bool) -> Tile:
        results = results_of(right.layout, triangle=triangle, square=right.square)
        return self.single.table.tile(results, self.single.processors, triangle=triangle, summand=summand, listed=True)

    def general(
        self,
        left: Matrices,
        right: Matrices,
        *,
        plus: Matrices | None = None,
        beta: float = 0.0,
        out: Matrices | None = None,
    ) -> Matrices:
        if out is None:
            out = right.new(square=right.square)
            tile = self._tile(right, triangle=False, summand=plus is not None)
            grouped_product(left, right, out, tile, self.single.processors, plus=plus, beta=beta).run()
            return out
        # Each result has its own launch: tables are made once, and would have to hold its address, new at every call.
        summands = [None] * len(out.results) if plus is None else plus.parts(out.results)
        operands = zip(left.parts(out.results), right.parts(out.results), out.results, summands, strict=True)
        for factor, x, result, summand in operands:
            self.single.general(factor, x, plus=summand, beta=beta, out=result)
        return out

    def add_to_diagonal(self, x: Matrices, a: float) -> None:
        for view in x.views:
            view.diagonal(dim1=-2, dim2=-1).add_(a)


def orthogonalize_list(
    xs: Sequence[Tensor], plan: Plan, products: newton_schulz.Products, norms: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Orthogonalize every matrix of a list, in chunks whose work memory stays under ``plan.memory_limit``.

    ``xs``: [..., m, n], none empty, in float16, bfloat16 or float32, any strides, on one device, unmodified. ``plan``:
    method "standard" or "gram", dtype float16 or bfloat16. ``norms``: row norms of each of ``xs``, [..., m] in float32,
    contiguous; or empty. Results are new contiguous tensors of the inputs' shapes in ``plan.dtype``.
    """
    # Allocates and launches only: a CUDA graph can capture it, once the tables of ``tile_order`` are on the device.
    results = [torch.empty(x.shape, dtype=plan.dtype, device=x.device) for x in xs]
    xs_BKL = [wide(x) for x in xs]
    results_BKL = [wide(result) for result in results]
    norms_B1N = {i: norm.view(len(xs_BKL[i]), 1, -1) for i, norm in enumerate(norms)}
    form = (plan.method, len(plan.steps), len(plan.restarts))
    bytes_each = [list_bytes(x.shape[1], x.shape[2], *form, x.dtype.itemsize, plan.dtype.itemsize) for x in xs_BKL]
    stacks = [Stack(len(x_BKL), nbytes) for x_BKL, nbytes in zip(xs_BKL, bytes_each, strict=True)]
    for chunk in chunked(stacks, plan.memory_limit):
        batches = [
            _Batch(xs_BKL[i][piece], results_BKL[i][piece], norms_B1N[i][piece] if norms_B1N else None)
            for i, piece in chunk
        ]
        _orthogonalize_chunk(batches, plan, products)
    return results


def _orthogonalize_chunk(batches: list[_Batch], plan: Plan, products: newton_schulz.Products) -> None:
    groups: dict[Hashable, list[_Batch]] = {}
    for i, batch in enumerate(batches):
        _, rows, cols = batch.x_BKL.shape
        key = (rows, cols, batch.x_BKL.dtype, _column_major(batch.out_BKL)) if rows * cols <= SMALL else i
        groups.setdefault(key, []).append(batch)
    joined = [_joined(group) if len(group) > 1 else group[0] for group in groups.values()]
    if len(joined) == 1:
        newton_schulz.orthogonalize_into(*joined[0], plan, products)
    else:
        _orthogonalize_several(joined, plan, products)
    for group, batch in zip(groups.values(), joined, strict=True):
        if len(group) > 1:
            outs_BKL = [member.out_BKL for member in group]
            torch._foreach_copy_(outs_BKL, list(batch.out_BKL.split([len(out_BKL) for out_BKL in outs_BKL])))


def _joined(batches: list[_Batch]) -> _Batch:
    """Join batches of one shape: copy their matrices into one tensor, and allocate one for their results."""
    column_major = _column_major(batches[0].out_BKL)
    x = torch.cat([batch.x_BKL.mT if column_major else batch.x_BKL for batch in batches])
    out = torch.empty(x.shape, dtype=batches[0].out_BKL.dtype, device=x.device)
    known_norms = [batch.norms_B1N for batch in batches if batch.norms_B1N is not None]
    norms_B1N = torch.cat(known_norms) if known_norms else None
    return _Batch(x.mT, out.mT, norms_B1N) if column_major else _Batch(x, out, norms_B1N)


def _column_major(x_BKL: Tensor) -> bool:
    """Tell whether columns, not rows, are contiguous in memory."""
    return x_BKL.stride(1) < x_BKL.stride(2)


def _orthogonalize_several(batches: list[_Batch], plan: Plan, products: newton_schulz.Products) -> None:
    # Tiles with the longest sums first: when only short ones are left, programs end at nearly the same time.
    batches = sorted(batches, key=lambda batch: (-batch.x_BKL.shape[2], -batch.x_BKL.shape[1]))
    counts: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        matrices, rows, cols = batch.x_BKL.shape
        counts[rows, cols] += matrices
    layout = Layout(tuple((matrices, *shape) for shape, matrices in counts.items()))
    results = tuple(batch.out_BKL for batch in batches)
    out = Matrices(layout, results[0].new_empty(0), square=False, results=results)
    grouped = GroupedProducts(products)
    with record_function(f"newton_schulz {plan.method} {counts.total()} matrices of {len(counts)} shapes"):
        # No name holds the normalized matrices: their memory is free again after the first step.
        folded = newton_schulz.folds(plan)
        FORMS[plan.method](_normalized(batches, out, plan), plan.steps, plan.restarts, grouped, out=out, folded=folded)


def _normalized(batches: list[_Batch], out: Matrices, plan: Plan) -> Matrices:
    arena = out.layout.new(plan.dtype, out.results[0].device, square=False, zero=True)
    for batch, part_BKL in zip(batches, arena.parts(out.results), strict=True):
        normalize(batch.x_BKL, dtype=plan.dtype, eps=plan.eps, safety=plan.safety, out=part_BKL, norms=batch.norms_B1N)
    return arena
