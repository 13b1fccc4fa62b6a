"""Newton-Schulz on the Triton kernels: the loops of ``iterations``, symmetric products computed by one triangle."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from torch.profiler import record_function

from ..call_plan import Plan
from ..iterations import FORMS
from ..reference import Aten
from .launch import where_it_runs
from .model import Tile
from .normalize import normalize
from .operands import empty_matrices
from .product import product
from .symmetric import symmetric_product
from .tiles import INTERPRETER, Table, architecture, choose, load_tables, served


@dataclass(frozen=True)
class Products(Aten):
    """The two matrix products of a device, by its tile table and number of multiprocessors."""

    table: Table
    processors: int

    def outer(self, x: Tensor) -> Tensor:
        return self.symmetric(x, None)

    def symmetric(
        self,
        left: Tensor,
        right: Tensor | None,
        *,
        plus: Tensor | None = None,
        beta: float = 0.0,
        alpha: float = 1.0,
        gamma: float = 0.0,
    ) -> Tensor:
        """Return ``alpha left right + beta plus + gamma I``, [b, k, k], new: the lower triangle, mirrored. With
        ``right`` None, which stands for ``leftᵀ``, ``left`` may be [b, k, l]."""
        out = empty_matrices(len(left), left.shape[1], left.shape[1], like=left, dtype=left.dtype)
        if alpha == 0:  # c of a cubic step, (1.5, -0.5, 0); the kernel computes with β / α
            assert plus is not None
            torch.mul(plus, beta, out=out)
            if gamma:
                self.add_to_diagonal(out, gamma)
            return out
        tile = self._tile(self.table.symmetric, out, left.shape[2], triangle=True)
        symmetric_product(left, right, out, tile, alpha=alpha, plus=plus, beta=beta, gamma=gamma).run()
        return out

    def general(
        self, left: Tensor, right: Tensor, *, plus: Tensor | None = None, beta: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            matrices, rows, cols = right.shape
            out = empty_matrices(matrices, rows, cols, like=right, dtype=right.dtype)
        tile = self._tile(self.table.product, out, left.shape[2], triangle=False)
        product(left, right, out, tile, plus=plus, beta=beta).run()
        return out

    def _tile(self, tiles: tuple[Tile, ...], out: Tensor, depth: int, *, triangle: bool) -> Tile:
        matrices, rows, cols = out.shape
        return choose(tiles, self.table.device, ((matrices, rows, cols, depth),), self.processors, triangle=triangle)


def products_on(device: torch.device) -> Products | None:
    """Return the products of a device; None where no table covers it."""
    return _products_on(where_it_runs(device))


@cache
def _products_on(device: torch.device) -> Products | None:
    if device.type == "cpu":
        return Products(INTERPRETER, 1) if triton.knobs.runtime.interpret else None
    name = architecture(device)
    if name is None:
        return None
    return Products(load_tables()[name], torch.cuda.get_device_properties(device).multi_processor_count)


def serves(xs: Sequence[Tensor], plan: Plan) -> list[bool]:
    """Tell for each of ``xs``, [..., m, n] on one device, whether these kernels take it and, unless ``plan`` has the
    backend "triton", are expected to be at least as fast as cuBLAS."""
    products = products_on(xs[0].device) if xs and plan.dtype in (torch.float16, torch.bfloat16) else None
    if products is None:
        return [False] * len(xs)
    covered = [x.numel() > 0 and x.dtype != torch.float64 for x in xs]
    if plan.backend == "triton":
        return covered
    shapes = {i: (xs[i].shape[:-2].numel(), *sorted(xs[i].shape[-2:])) for i, fits in enumerate(covered) if fits}
    pays = dict(zip(shapes, served(products.table, tuple(shapes.values()), products.processors), strict=True))
    return [pays.get(i, False) for i in range(len(xs))]


def orthogonalize_into(x: Tensor, out: Tensor, norms: Tensor | None, plan: Plan, products: Products) -> None:
    """Write Newton-Schulz of ``x`` to ``out``. Allocates and launches only, so a CUDA graph can capture it.

    Args:
        x: [b, k, l] with k ≤ l in float16, bfloat16 or float32, any strides, unmodified.
        out: of x's shape in ``plan.dtype``, any strides, no memory shared with x.
        norms: as for ``normalize``.
        plan: with method "standard" or "gram", dtype float16 or bfloat16.
        products: of x's device.
    """
    shape = "×".join(map(str, x.shape))
    with record_function(f"newton_schulz {plan.method} {shape}"):  # an NVTX range under emit_nvtx()
        # No name holds the normalized matrices: their memory is free again after the first step.
        FORMS[plan.method](
            normalize(x, dtype=plan.dtype, eps=plan.eps, safety=plan.safety, norms=norms),
            plan.steps, plan.restarts, products, out=out, folded=folds(plan),
        )  # fmt: skip


def folds(plan: Plan) -> bool:
    """Tell whether steps fold aI + Z into one matrix; not in bfloat16, which would round it too coarsely."""
    return plan.dtype == torch.float16
