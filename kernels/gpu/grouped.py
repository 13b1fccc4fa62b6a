"""Newton-Schulz of a list of matrices of unequal shapes: each product of all of them is one launch.

Small tensors of one shape are joined first; a tensor that is left alone goes to the kernels for one shape.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

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
from .tiles import choose

# (matrices [b, k, l] with k ≤ l, tensor for their results, norms [b, 1, n] of n parts of each, such as rows, if known)
Given = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class GroupedProducts:
    """The matrix products of all matrices of a list: ``iterations.Products`` over ``Matrices``."""

    alone: newton_schulz.Products  # the products of one tensor of matrices

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
            assert plus is not None and plus.flat is not None
            out = replace(plus, flat=plus.flat * beta)
            if gamma:
                self.add_to_diagonal(out, gamma)
            return out
        out = left.new(square=True)
        tile = self._tile(self.alone.table.symmetric, left, triangle=True, summand=plus is not None)
        numbers = {"alpha": alpha, "beta": beta, "gamma": gamma}
        grouped_symmetric(left, right, out, tile, self.alone.processors, plus=plus, **numbers).run()
        return out

    def _tile(self, tiles: tuple[Tile, ...], operand: Matrices, *, triangle: bool, summand: bool) -> Tile:
        results = results_of(operand.layout, triangle=triangle, square=operand.square)
        tiles = tuple(tile.in_list for tile in tiles)
        return choose(
            tiles, self.alone.table.device, results, self.alone.processors, triangle=triangle, summand=summand
        )

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
            tile = self._tile(self.alone.table.product, right, triangle=False, summand=plus is not None)
            grouped_product(left, right, out, tile, self.alone.processors, plus=plus, beta=beta).run()
            return out
        # Each result has its own launch: tables are made once, and would have to hold its address, new at every call.
        summands = [None] * len(out.results) if plus is None else plus.parts(out.results)
        operands = zip(left.parts(out.results), right.parts(out.results), out.results, summands, strict=True)
        for factor, x, result, summand in operands:
            self.alone.general(factor, x, plus=summand, beta=beta, out=result)
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
    inputs = [wide(x) for x in xs]
    outputs = [wide(result) for result in results]
    norms_of = {i: norm.view(len(inputs[i]), 1, -1) for i, norm in enumerate(norms)}
    form = (plan.method, len(plan.steps), len(plan.restarts))
    bytes_each = [list_bytes(x.shape[1], x.shape[2], *form, x.dtype.itemsize, plan.dtype.itemsize) for x in inputs]
    stacks = [Stack(len(x), nbytes) for x, nbytes in zip(inputs, bytes_each, strict=True)]
    for chunk in chunked(stacks, plan.memory_limit):
        items = [(inputs[i][piece], outputs[i][piece], norms_of[i][piece] if norms_of else None) for i, piece in chunk]
        _orthogonalize_chunk(items, plan, products)
    return results


def _orthogonalize_chunk(given: list[Given], plan: Plan, products: newton_schulz.Products) -> None:
    by_shape: dict[Hashable, list[Given]] = {}
    for i, (x, out, norms) in enumerate(given):
        small = x.shape[1] * x.shape[2] <= SMALL
        by_shape.setdefault((x.shape[1:], x.dtype, _turned(out)) if small else i, []).append((x, out, norms))
    joined = [_together(group) if len(group) > 1 else group[0] for group in by_shape.values()]
    if len(joined) == 1:
        newton_schulz.orthogonalize_into(*joined[0], plan, products)
    else:
        _orthogonalize_several(joined, plan, products)
    for group, (_, result, _) in zip(by_shape.values(), joined, strict=True):
        if len(group) > 1:
            torch._foreach_copy_([out for _, out, _ in group], list(result.split([len(x) for x, *_ in group])))


def _together(items: list[Given]) -> Given:
    """Make one item of several of one shape: a copy of their matrices, and a new tensor for their results."""
    turned = _turned(items[0][1])
    x = torch.cat([x.mT if turned else x for x, *_ in items])
    out = torch.empty(x.shape, dtype=items[0][1].dtype, device=x.device)
    known_norms = [norms for *_, norms in items if norms is not None]
    norms = torch.cat(known_norms) if known_norms else None
    return (x.mT, out.mT, norms) if turned else (x, out, norms)


def _turned(x: Tensor) -> bool:
    """Tell whether columns, not rows, are contiguous in memory."""
    return x.stride(1) < x.stride(2)


def _orthogonalize_several(items: list[Given], plan: Plan, products: newton_schulz.Products) -> None:
    # Tiles with the longest sums first: when only short ones are left, programs end at nearly the same time.
    items = sorted(items, key=lambda item: (-item[0].shape[2], -item[0].shape[1]))
    counts: dict[tuple[int, int], int] = {}
    for x, *_ in items:
        b, *shape = x.shape
        counts[shape[0], shape[1]] = counts.get((shape[0], shape[1]), 0) + b
    layout = Layout(tuple((b, *shape) for shape, b in counts.items()))
    out = Matrices(layout, None, square=False, results=tuple(out for _, out, _ in items))
    grouped = GroupedProducts(products)
    with record_function(f"newton_schulz {plan.method} {sum(counts.values())} matrices of {len(counts)} shapes"):
        # No name holds the normalized matrices: their memory is free again after the first step.
        folded = newton_schulz.folds(plan)
        FORMS[plan.method](_normalized(items, out, plan), plan.steps, plan.restarts, grouped, out=out, folded=folded)


def _normalized(given: list[Given], out: Matrices, plan: Plan) -> Matrices:
    arena = out.layout.new(plan.dtype, out.results[0].device, square=False, zero=True)
    for (x, _, norms), part in zip(given, arena.parts(out.results), strict=True):
        normalize(x, dtype=plan.dtype, eps=plan.eps, safety=plan.safety, out=part, norms=norms)
    return arena
