"""Newton–Schulz on the Triton kernels: `reference.orthogonalize` product for product, symmetric ones computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from torch.profiler import record_function

from ..plan import Plan
from ..stability import Triple
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

    def symmetric(
        self, left: Tensor, right: Tensor, *, alpha: float = 1.0, plus: Tensor | None = None, beta: float = 0.0
    ) -> Tensor:
        """α left rightᵀ + β plus, [b, k, k], new."""
        out = empty_matrices(len(left), left.shape[1], left.shape[1], like=left, dtype=left.dtype)
        if alpha == 0 and plus is not None:  # a cubic step, (1.5, -0.5, 0), which the kernel has no form for
            return torch.mul(plus, beta, out=out)
        symmetric_product(
            left, right, out, self.table.symmetric, self.processors, alpha=alpha, plus=plus, beta=beta
        ).run()
        return out

    def general(
        self, left: Tensor, right: Tensor, *, plus: Tensor | None = None, beta: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        """left right + β plus, [b, k, l], in `out` where given."""
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
    """Whether `orthogonalize` takes x, [m, n] or [b, m, n], and is expected to be at least as fast as cuBLAS."""
    if x.dtype == torch.float64 or plan.dtype not in (torch.float16, torch.bfloat16):
        return False
    products = products_on(x.device)
    return products is not None and products.table.serves(x.shape[:-2].numel(), min(x.shape[-2:]))


def orthogonalize(x: Tensor, plan: Plan, products: Products) -> Tensor:
    """Newton–Schulz of x, [m, n] or [b, m, n] in float16, bfloat16 or float32, any strides, unmodified.

    `plan.method` is "standard" or "gram", `plan.dtype` float16 or bfloat16. Returns a new contiguous tensor of x's
    shape in `plan.dtype`. Allocates and launches only, so a CUDA graph can capture it.
    """
    tall = x.shape[-2] > x.shape[-1]
    result = torch.empty(x.shape, dtype=plan.dtype, device=x.device)
    batch = x if x.ndim == 3 else x[None]
    out = result if x.ndim == 3 else result[None]
    if tall:
        batch, out = batch.mT, out.mT
    iterate = _standard if plan.method == "standard" else _gram
    shape = "×".join(map(str, batch.shape))
    with record_function(f"newton_schulz {plan.method} {shape}"):  # an NVTX range under emit_nvtx()
        wide = normalize(batch, dtype=plan.dtype, eps=plan.eps, safety=plan.safety)
        iterate(wide, plan, products, out)
    return result


def _standard(x: Tensor, plan: Plan, products: Products, out: Tensor) -> None:
    """Per step A = XXᵀ, B = bA + cA², X ← aX + BX; the last X goes to `out`."""
    for i, (a, b, c) in enumerate(plan.steps):
        A = products.symmetric(x, x)
        B = products.symmetric(A, A, alpha=c, plus=A, beta=b)
        x = products.general(B, x, plus=x, beta=a, out=out if i + 1 == len(plan.steps) else None)


def _gram(x: Tensor, plan: Plan, products: Products, out: Tensor) -> None:
    """Segments of the same polynomial on R = XXᵀ and Q, X ← QX after each; the last X goes to `out`."""
    bounds = (0, *plan.restarts, len(plan.steps))
    for start, stop in zip(bounds, bounds[1:], strict=False):
        Q = _gram_segment(products.symmetric(x, x), plan.steps[start:stop], products)
        x = products.general(Q, x, out=out if stop == len(plan.steps) else None)


def _gram_segment(R: Tensor, steps: Sequence[Triple], products: Products) -> Tensor:
    """Z = bR + cR², Q ← aQ + QZ, R ← (aI + Z) R (aI + Z): polynomials of one matrix, so all products are symmetric."""
    Q: Tensor | None = None
    for i, (a, b, c) in enumerate(steps):
        Z = products.symmetric(R, R, alpha=c, plus=R, beta=b)
        if i + 1 < len(steps):
            RZ = products.symmetric(Z, R, plus=R, beta=a)
            R = products.symmetric(Z, RZ, plus=RZ, beta=a)
        if Q is None:  # Q was I: aQ + QZ without a product, in Z's own memory
            Q = Z
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = products.symmetric(Q, Z, plus=Q, beta=a)
    assert Q is not None
    return Q
