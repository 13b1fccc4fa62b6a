"""Newton-Schulz on the Triton kernels: the loops of ``iterations``, symmetric products computed by one triangle."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from torch.profiler import record_function

from ..iterations import gram, standard
from ..plan import Plan
from .normalize import normalize
from .operands import empty_matrices
from .product import product
from .symmetric import symmetric_product
from .tiles import INTERPRETER, Table, architecture, load_tables

__all__ = ["Products", "orthogonalize", "products_on", "serves"]


@dataclass(frozen=True)
class Products:
    """The two matrix products of a device, with its tile table and number of multiprocessors."""

    table: Table
    processors: int

    def outer(self, x: Tensor) -> Tensor:
        """``x xᵀ``, [b, k, k], new."""
        return self._symmetric(x, x, alpha=1.0, plus=None, beta=0.0)

    def symmetric(self, left: Tensor, right: Tensor, *, plus: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
        """``alpha left right + beta plus``, [b, k, k], new: the lower triangle, mirrored."""
        if alpha == 0:  # a cubic step, (1.5, -0.5, 0), which the kernel has no form for
            out = empty_matrices(len(left), left.shape[1], left.shape[1], like=left, dtype=left.dtype)
            return torch.mul(plus, beta, out=out)
        return self._symmetric(left, right, alpha=alpha, plus=plus, beta=beta)

    def _symmetric(self, left: Tensor, right: Tensor, *, alpha: float, plus: Tensor | None, beta: float) -> Tensor:
        """``alpha left rightᵀ + beta plus``; rightᵀ is right for the results of this class, bitwise symmetric."""
        out = empty_matrices(len(left), left.shape[1], left.shape[1], like=left, dtype=left.dtype)
        tiles = self.table.symmetric
        symmetric_product(left, right, out, tiles, self.processors, alpha=alpha, plus=plus, beta=beta).run()
        return out

    def general(
        self, left: Tensor, right: Tensor, *, plus: Tensor | None = None, beta: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        """``left right + beta plus``, [b, k, l], in ``out`` where given, else new."""
        if out is None:
            matrices, rows, cols = right.shape
            out = empty_matrices(matrices, rows, cols, like=right, dtype=right.dtype)
        product(left, right, out, self.table.product, self.processors, plus=plus, beta=beta).run()
        return out


@cache
def products_on(device: torch.device) -> Products | None:
    """None where no table covers the device."""
    if device.type == "cpu":
        return Products(INTERPRETER, 1) if triton.knobs.runtime.interpret else None
    name = architecture(device)
    if name is None:
        return None
    return Products(load_tables()[name], torch.cuda.get_device_properties(device).multi_processor_count)


def serves(x: Tensor, plan: Plan) -> bool:
    """Whether ``orthogonalize`` takes x, [m, n] or [b, m, n], and is expected to be at least as fast as cuBLAS."""
    if x.dtype == torch.float64 or plan.dtype not in (torch.float16, torch.bfloat16):
        return False
    products = products_on(x.device)
    return products is not None and products.table.serves(x.shape[:-2].numel(), min(x.shape[-2:]))


def orthogonalize(x: Tensor, plan: Plan, products: Products) -> Tensor:
    """Newton-Schulz of one matrix or one batch. Allocates and launches only, so a CUDA graph can capture it.

    Args:
        x: [m, n] or [b, m, n] in float16, bfloat16 or float32, any strides, unmodified.
        plan: with method "standard" or "gram", dtype float16 or bfloat16.
        products: of x's device.
    Returns:
        A new contiguous tensor of x's shape in ``plan.dtype``.
    """
    tall = x.shape[-2] > x.shape[-1]
    result = torch.empty(x.shape, dtype=plan.dtype, device=x.device)
    batch = x if x.ndim == 3 else x[None]
    out = result if x.ndim == 3 else result[None]
    if tall:
        batch, out = batch.mT, out.mT
    shape = "×".join(map(str, batch.shape))
    with record_function(f"newton_schulz {plan.method} {shape}"):  # an NVTX range under emit_nvtx()
        wide = normalize(batch, dtype=plan.dtype, eps=plan.eps, safety=plan.safety)
        if plan.method == "standard":
            standard(wide, plan.steps, products, out=out)
        else:
            gram(wide, plan.steps, plan.restarts, products, out=out)
    return result
