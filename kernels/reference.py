"""Newton–Schulz on plain aten operations: the definition, and what runs wherever nothing faster is chosen.

Every function takes one matrix [m, n] or a batch [b, m, n] of a floating dtype, any strides, and leaves it unmodified.
For a single matrix in bfloat16, normalization and the standard form are operation for operation those of
torch.optim._muon._zeropower_via_newtonschulz (torch 2.13), hence bitwise equal to it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import Plan
from .stability import Triple

__all__ = ["gram", "normalize", "normalize_as_torch_muon", "orthogonalize", "standard"]


def orthogonalize(x: Tensor, plan: Plan) -> Tensor:
    """Normalize, iterate on the wide orientation, turn back; `plan.method` is "standard" or "gram".

    Returns a new contiguous tensor of x's shape in `plan.dtype`.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    if plan.method == "standard" and plan.dtype == torch.bfloat16:
        x = standard(normalize_as_torch_muon(x, eps=plan.eps, safety=plan.safety), plan.steps)
    elif plan.method == "standard":
        x = standard(normalize(x, dtype=plan.dtype, eps=plan.eps, safety=plan.safety), plan.steps)
    else:
        x = gram(normalize(x, dtype=plan.dtype, eps=plan.eps, safety=plan.safety), plan.steps, plan.restarts)
    return x.mT.clone(memory_format=torch.contiguous_format) if tall else x


def normalize(x: Tensor, *, dtype: torch.dtype, eps: float, safety: float) -> Tensor:
    """X / (safety · max(‖X‖, eps)) in `dtype`, ‖·‖ the Frobenius norm of each matrix.

    The norm is taken and divided by in float32 (float64 where X or `dtype` is) *before* the cast, of X over its
    largest entry, so that neither squares nor half-precision entries overflow or vanish: the result is right for
    entries from 1e-30 to 1e+30. Zeros stay zeros, also with eps = 0; a NaN or an infinite entry turns its whole
    matrix into NaN. No host synchronization.
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    tiny = torch.finfo(wide).tiny
    x = x.to(wide)
    largest = torch.linalg.vector_norm(x, float("inf"), dim=(-2, -1), keepdim=True).clamp(min=tiny)
    x = x / largest
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    norm = torch.maximum(norm, eps / largest).clamp(min=tiny)
    return x.div_(norm * safety).to(dtype)


def normalize_as_torch_muon(x: Tensor, *, eps: float, safety: float) -> Tensor:
    """The same in bfloat16 as torch.optim.Muon has it: cast first, divide by a norm rounded to bfloat16."""
    x = x.to(torch.bfloat16)
    norm = x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    norm = norm.clamp(min=max(eps, torch.finfo(x.dtype).tiny))
    return x / (norm if safety == 1.0 else norm * safety)


def standard(x: Tensor, steps: Sequence[Triple]) -> Tensor:
    """Per step A = XXᵀ, B = bA + cA², X ← aX + BX, for x [..., k, l] with k ≤ l."""
    for a, b, c in steps:
        A = x @ x.mT
        B = _product(A, A, plus=A, beta=b, alpha=c)
        x = _product(B, x, plus=x, beta=a)
    return x


def gram(x: Tensor, steps: Sequence[Triple], restarts: Sequence[int]) -> Tensor:
    """The same polynomial, iterated on the k × k matrices R = XXᵀ and Q; X ← QX at the end of each segment.

    Per step Z = bR + cR², Q ← aQ + QZ, R ← (aI + Z) R (aI + Z). `restarts` are the numbers of steps after which a new
    segment begins. Source: Dao-AILab/gram-newton-schulz.
    """
    bounds = (0, *restarts, len(steps))
    for start, stop in zip(bounds, bounds[1:], strict=False):
        x = _gram_segment(x @ x.mT, steps[start:stop]) @ x
    return x


def _gram_segment(R: Tensor, steps: Sequence[Triple]) -> Tensor:
    Q: Tensor | None = None
    for i, (a, b, c) in enumerate(steps):
        Z = _product(R, R, plus=R, beta=b, alpha=c)
        if i + 1 < len(steps):
            RZ = _product(Z, R, plus=R, beta=a)
            R = _product(Z, RZ, plus=RZ, beta=a)
        if Q is None:  # Q was I: aQ + QZ without a product, in Z's own memory
            Q = Z
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = _product(Q, Z, plus=Q, beta=a)
    assert Q is not None
    return Q


def _product(left: Tensor, right: Tensor, *, plus: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """beta · plus + alpha · left @ right."""
    fused = torch.addmm if plus.ndim == 2 else torch.baddbmm
    return fused(plus, left, right, beta=beta, alpha=alpha)
