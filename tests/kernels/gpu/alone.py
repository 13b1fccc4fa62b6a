"""Newton-Schulz of one tensor on Triton's kernels, as lists of several shapes do not run it; and the same on aten."""

import torch
from torch import Tensor

from compile_muon.kernels import reference
from compile_muon.kernels.call_plan import Plan
from compile_muon.kernels.gpu.newton_schulz import Products, folds, orthogonalize_into


def on_aten(x: Tensor, plan: Plan) -> Tensor:
    """`reference.orthogonalize`, folded where the kernels fold."""
    return reference.orthogonalize(x, plan, folded=folds(plan))


def orthogonalize(x: Tensor, plan: Plan, products: Products) -> Tensor:
    """`x` is [m, n] or [b, m, n]; the result is contiguous, of its shape in `plan.dtype`."""
    result = torch.empty(x.shape, dtype=plan.dtype, device=x.device)
    batch, out = (y if y.ndim == 3 else y[None] for y in (x, result))
    if x.shape[-2] > x.shape[-1]:
        batch, out = batch.mT, out.mT
    orthogonalize_into(batch, out, None, plan, products)
    return result
