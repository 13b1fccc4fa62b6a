"""Newton-Schulz on plain aten operations: the definition, and the fallback wherever no faster kernel is chosen.

Shapes in names: B matrices of R rows and C columns, or on the wide orientation K ≤ L; a single matrix lacks B. Inputs
have a floating dtype and any strides, and stay unmodified. For a single matrix in bfloat16, normalization and the
standard form are operation for operation those of torch.optim._muon._zeropower_via_newtonschulz (torch 2.13), hence
bitwise equal to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .call_plan import Plan
from .iterations import FORMS, Products


def orthogonalize(
    x_BRC: Tensor, plan: Plan, products: Products[Tensor] | None = None, *, folded: bool = False
) -> Tensor:
    """Normalize matrices, iterate on their wide orientation, and transpose back; the method is "standard" or "gram".

    The result is a new contiguous tensor of the same shape in ``plan.dtype``.
    """
    tall = x_BRC.shape[-2] > x_BRC.shape[-1]
    x_BKL = x_BRC.mT if tall else x_BRC
    if plan.method == "standard" and plan.dtype == torch.bfloat16:
        x_BKL = normalize_as_torch_muon(x_BKL, eps=plan.eps, safety=plan.safety)
    else:
        x_BKL = normalize(x_BKL, dtype=plan.dtype, eps=plan.eps, safety=plan.safety)
    x_BKL = FORMS[plan.method](x_BKL, plan.steps, plan.restarts, products or Aten(), folded=folded)
    return x_BKL.mT.clone(memory_format=torch.contiguous_format) if tall else x_BKL


def normalize(x_BRC: Tensor, *, dtype: torch.dtype, eps: float, safety: float) -> Tensor:
    """Return X / (safety · max(‖X‖, eps)) in ``dtype``, ‖·‖ the Frobenius norm of each matrix.

    Right for entries from 1e-30 to 1e+30. Zeros stay zeros, also with eps = 0; a NaN or an infinite entry turns its
    whole matrix into NaN. The host never waits.
    """
    # In float32 (float64 where X or dtype is) before the cast, and relative to the largest entry, so that neither
    # squares nor half-precision entries overflow or vanish.
    compute_dtype = torch.promote_types(torch.promote_types(x_BRC.dtype, dtype), torch.float32)
    tiny = torch.finfo(compute_dtype).tiny
    x_BRC = x_BRC.to(compute_dtype)
    # amax and amin, because vector_norm(inf) takes 25 times as long on CPUs.
    largest_B11 = torch.maximum(x_BRC.amax((-2, -1), keepdim=True), -x_BRC.amin((-2, -1), keepdim=True)).clamp(min=tiny)
    x_BRC = x_BRC / largest_B11
    norm_B11 = torch.linalg.vector_norm(x_BRC, dim=(-2, -1), keepdim=True)
    norm_B11 = torch.maximum(norm_B11, eps / largest_B11).clamp(min=tiny)
    return x_BRC.div_(norm_B11 * safety).to(dtype)


def normalize_as_torch_muon(x_BRC: Tensor, *, eps: float, safety: float) -> Tensor:
    """:func:`normalize` to bfloat16 as torch.optim.Muon does: cast first, divide by a norm rounded to bfloat16."""
    x_BRC = x_BRC.to(torch.bfloat16)
    norm_B11 = x_BRC.norm() if x_BRC.ndim == 2 else torch.linalg.vector_norm(x_BRC, dim=(-2, -1), keepdim=True)
    norm_B11 = norm_B11.clamp(min=max(eps, torch.finfo(x_BRC.dtype).tiny))
    return x_BRC / (norm_B11 if safety == 1.0 else norm_B11 * safety)


class Aten:
    """``iterations.Products`` on aten, of matrices or batches of one shape: both triangles are computed."""

    def outer(self, x: Tensor) -> Tensor:
        return x @ x.mT

    def symmetric(
        self,
        left: Tensor,
        right: Tensor,
        *,
        plus: Tensor | None = None,
        beta: float = 0.0,
        alpha: float = 1.0,
        gamma: float = 0.0,
    ) -> Tensor:
        if plus is None:
            return left @ right
        if not gamma:
            return _fused(plus)(plus, left, right, beta=beta, alpha=alpha)
        whole = _fused(plus)(plus.float(), left.float(), right.float(), beta=beta, alpha=alpha)
        self.add_to_diagonal(whole, gamma)
        return whole.to(plus.dtype)

    def general(
        self, left: Tensor, right: Tensor, *, plus: Tensor | None = None, beta: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        if plus is None:
            return torch.matmul(left, right, out=out)
        return _fused(plus)(plus, left, right, beta=beta, out=out)

    def add_to_diagonal(self, x: Tensor, a: float) -> None:
        x.diagonal(dim1=-2, dim2=-1).add_(a)


@contextmanager
def summed_in_float32(dtype: torch.dtype) -> Iterator[None]:
    """Make cuBLAS sum float16 products in float32 throughout, inside a ``with`` block; for other dtypes do nothing."""
    # PyTorch allows cuBLAS to add parts of a sum in float16. On an H200 that was 1.4 times the error of rounding once,
    # for odd depths. bfloat16 keeps the user's setting, because its bits are those of torch.optim.Muon.
    matmul = torch.backends.cuda.matmul
    if dtype != torch.float16 or not matmul.allow_fp16_reduced_precision_reduction:
        yield
        return
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = True


def _fused(plus: Tensor) -> Callable[..., Tensor]:
    return torch.addmm if plus.ndim == 2 else torch.baddbmm
