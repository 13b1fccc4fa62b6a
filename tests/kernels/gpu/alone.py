"""Newton-Schulz of one tensor on Triton's kernels, as lists of several shapes do not run it; and the same on aten."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_muon.kernels import reference
from compile_muon.kernels.call_plan import Plan
from compile_muon.kernels.gpu.newton_schulz import Products, folding, orthogonalize_into
from compile_muon.kernels.iterations import FORMS


class Folding(reference.Aten):
    """Also `iterations.Folding`."""

    def symmetric(self, left: Tensor, right: Tensor, *, plus: Tensor | None = None, **numbers: float) -> Tensor:
        if plus is None:
            return left @ right
        wide, one = left.float(), torch.eye(left.shape[-1], device=left.device)
        return (numbers["gamma"] * one + numbers["beta"] * wide + numbers["alpha"] * (wide @ wide)).to(left.dtype)


def on_aten(x: Tensor, plan: Plan) -> Tensor:
    """`reference.orthogonalize`, folded where the kernels fold."""
    if folding(x, plan) is None:
        return reference.orthogonalize(x, plan)
    tall = x.shape[-2] > x.shape[-1]
    x = reference.normalize(x.mT if tall else x, dtype=plan.dtype, eps=plan.eps, safety=plan.safety)
    x = FORMS[plan.method](x, plan.steps, plan.restarts, Folding(), folding=Folding())
    return x.mT if tall else x


def orthogonalize(x: Tensor, plan: Plan, products: Products) -> Tensor:
    """`x` is [m, n] or [b, m, n]; the result is contiguous, of its shape in `plan.dtype`."""
    result = torch.empty(x.shape, dtype=plan.dtype, device=x.device)
    batch, out = (y if y.ndim == 3 else y[None] for y in (x, result))
    if x.shape[-2] > x.shape[-1]:
        batch, out = batch.mT, out.mT
    orthogonalize_into(batch, out, None, plan, products)
    return result
