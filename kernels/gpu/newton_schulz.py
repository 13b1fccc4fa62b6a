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
from .normalize import normalize
from .operands import empty_matrices
from .product import product
from .symmetric import symmetric_product
from .tiles import INTERPRETER, Table, architecture, load_tables, served


@dataclass(frozen=True)
class Products(Aten):
    """``iterations.Products`` of one batch on a device: K × K matrices, and K × L ones."""

    table: Table
    processors: int  # multiprocessors of the device

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
        """Return ``alpha left right + beta plus + gamma I``, new: the lower triangle, mirrored. With ``right`` None,
        which stands for ``leftᵀ``, ``left`` may be K × L."""
        matrices, size, depth = left.shape
        out_BKK = empty_matrices(matrices, size, size, like=left, dtype=left.dtype)
        if alpha == 0:  # c of a cubic step, (1.5, -0.5, 0); the kernel computes with β / α
            assert plus is not None
            torch.mul(plus, beta, out=out_BKK)
            if gamma:
                self.add_to_diagonal(out_BKK, gamma)
            return out_BKK
        tile = self.table.tile(((matrices, size, size, depth),), self.processors, triangle=True, listed=False)
        symmetric_product(left, right, out_BKK, tile, alpha=alpha, plus=plus, beta=beta, gamma=gamma).run()
        return out_BKK

    def general(
        self, left: Tensor, right: Tensor, *, plus: Tensor | None = None, beta: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        matrices, rows, cols = right.shape
        out_BKL = empty_matrices(matrices, rows, cols, like=right, dtype=right.dtype) if out is None else out
        tile = self.table.tile(((matrices, rows, cols, rows),), self.processors, triangle=False, listed=False)
        product(left, right, out_BKL, tile, plus=plus, beta=beta).run()
        return out_BKL


def products_on(device: torch.device) -> Products | None:
    """Return the products on a device; None where no table covers it."""
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
    """Tell for each of ``xs``, [..., m, n] on one device, whether these kernels support it and should be at least as
    fast as cuBLAS; the backend "triton" asks for support alone."""
    products = products_on(xs[0].device) if xs and plan.dtype in (torch.float16, torch.bfloat16) else None
    if products is None:
        return [False] * len(xs)
    covered = [x.numel() > 0 and x.dtype != torch.float64 for x in xs]
    if plan.backend == "triton":
        return covered
    shapes = {i: (xs[i].shape[:-2].numel(), *sorted(xs[i].shape[-2:])) for i, fits in enumerate(covered) if fits}
    pays = dict(zip(shapes, served(products.table, tuple(shapes.values()), products.processors), strict=True))
    return [pays.get(i, False) for i in range(len(xs))]


def orthogonalize_into(x_BKL: Tensor, out_BKL: Tensor, norms: Tensor | None, plan: Plan, products: Products) -> None:
    """Write Newton-Schulz of ``x_BKL`` to ``out_BKL``. Allocates and launches only, so a CUDA graph can capture it.

    Args:
        x_BKL: in float16, bfloat16 or float32, any strides, unmodified.
        out_BKL: in ``plan.dtype``, any strides, no memory shared with ``x_BKL``.
        norms: as for ``normalize``.
        plan: with method "standard" or "gram", dtype float16 or bfloat16.
        products: of this device.
    """
    shape = "×".join(map(str, x_BKL.shape))
    with record_function(f"newton_schulz {plan.method} {shape}"):  # an NVTX range under emit_nvtx()
        # No name holds the normalized matrices: their memory is free again after the first step.
        FORMS[plan.method](
            normalize(x_BKL, dtype=plan.dtype, eps=plan.eps, safety=plan.safety, norms=norms),
            plan.steps, plan.restarts, products, out=out_BKL, folded=folds(plan),
        )  # fmt: skip


def folds(plan: Plan) -> bool:
    """Tell whether steps fold aI + Z into one matrix; not in bfloat16, which would round it too coarsely."""
    return plan.dtype == torch.float16
