"""SOAP: AdamW in the eigenbasis of Shampoo's preconditioners.

    L <- b2 L + (1 - b2) G G^T,   R <- b2 R + (1 - b2) G^T G,   every k steps  Q <- QR(L Q), and so for R
    M <- b1 M + (1 - b1) G,   V <- b2 V + (1 - b2) (Q_L^T G Q_R)^2
    D = Q_L [ Q_L^T M Q_R / (sqrt(V) + eps) * sqrt(1 - b2^t) / (1 - b1^t) ] Q_R^T,   W <- (1 - lr weight_decay) W - lr D

The paper's algorithm 3 with three additions of its authors' code: bias correction, the columns of a basis in falling
order of estimated eigenvalues, and a first step that makes the bases (by eigenvectors) and moves nothing. Decay is
AdamW's, ahead of the step, where that code decays after it. Where there has been no gradient, rounding alone would
decide the eigenvectors, as in that code; here they complete the others to a basis. All states are at the owner of a
matrix: a gradient travels to the owner and a direction back, as for Muon, both in float32 at least. A side of more than
8,192 has no basis; with both sides longer SOAP is AdamW. Shapes in names: R rows and C columns of a matrix, K either of
them; a stack has one dimension more in front.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .method import DECAY, LR, STEP, MatrixMethod, NewtonSchulz, Rate, State, WholeInputs, WholeOutputs

#: values of :attr:`MatrixMethod.phase`, which choose a step's graph
_FIRST, _KEEP, _TURN = "first", "keep", "turn"
_LARGEST = 8192


def _phase(rates: Mapping[str, float]) -> str:
    steps_done = rates["step"] - 1
    return _FIRST if steps_done == 0 else _TURN if steps_done % rates["basis_every"] == 0 else _KEEP


def _seen_from(matrix_RC: Tensor, left_RR: Tensor, right_CC: Tensor) -> Tensor:
    """Return ``left^T matrix right``; an empty basis stands for the identity."""
    matrix_RC = left_RR.mT @ matrix_RC if left_RR.numel() else matrix_RC
    return matrix_RC @ right_CC if right_CC.numel() else matrix_RC


def _basis(vectors_KK: Tensor, energy_K: Tensor) -> Tensor:
    """Return an orthonormal basis from vectors in falling order of their energy: eigenvalues, or estimates of them.

    Rounding alone directs a vector without energy, differently for each number of ranks. It is left out: Householder's
    reflections of the others complete the basis.
    """
    without_energy_K = energy_K <= energy_K[..., :1] * (energy_K.shape[-1] * torch.finfo(energy_K.dtype).eps)
    return torch.linalg.qr(vectors_KK.masked_fill(without_energy_K.unsqueeze(-2), 0)).Q


def _first_basis(gram_KK: Tensor) -> Tensor:
    """Return the eigenvectors of a preconditioner, in falling order of eigenvalues."""
    if not gram_KK.numel():
        return gram_KK
    # eigh would raise on NaN, and on the owner alone; all ranks find what is not finite by their common checks.
    finite = gram_KK.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    # Not torch.eye: from 256 rows on eager code has no kernel for its decomposition (torch 2.13: an arange of uint16).
    identity_KK = torch.ones_like(gram_KK[..., 0, :]).diag_embed()
    values_K, vectors_KK = torch.linalg.eigh(torch.where(finite, gram_KK, identity_KK))
    return _basis(vectors_KK.flip(-1), values_K.flip(-1))


def _turned(gram_KK: Tensor, basis_KK: Tensor, moments_RC: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the basis after one step of power iteration, and the second moments in the order of its columns along
    ``dim``, the dimension K of ``moments_RC``."""
    if not gram_KK.numel():
        return basis_KK, moments_RC
    energy_K, order_K = (basis_KK * (gram_KK @ basis_KK)).sum(-2).sort(dim=-1, descending=True)
    moments_RC = moments_RC.take_along_dim(order_K.unsqueeze(-1 if dim == -2 else -2), dim)
    basis_KK = basis_KK.take_along_dim(order_K.unsqueeze(-2), -1)
    return _basis(gram_KK @ basis_KK, energy_K), moments_RC


def _step(gradient_RC: Tensor, inputs: WholeInputs) -> WholeOutputs:
    states = inputs.states
    left_RR, right_CC, bases = states["left"], states["right"], (states["left_basis"], states["right_basis"])
    moments_RC, momentum_RC = states["second_moment"], states["first_moment"]
    rates, grad_RC = inputs.rates, gradient_RC.to(moments_RC.dtype)
    beta1, beta2 = rates["beta1"], rates["beta2"]
    new = {
        "left": left_RR.lerp(grad_RC @ grad_RC.mT, 1 - beta2) if left_RR.numel() else left_RR,
        "right": right_CC.lerp(grad_RC.mT @ grad_RC, 1 - beta2) if right_CC.numel() else right_CC,
    }
    if inputs.phase == _FIRST:
        new |= {f"{side}_basis": _first_basis(new[side]) for side in ("left", "right")}
        return WholeOutputs(gradient_RC * 0, new)
    steps_done = rates["step"] - 1
    momentum_RC = momentum_RC.lerp(grad_RC, 1 - beta1)
    moments_RC = moments_RC.lerp(_seen_from(grad_RC, *bases).square(), 1 - beta2)
    correction = (1 - beta2**steps_done).sqrt() / (1 - beta1**steps_done)
    in_bases_RC = _seen_from(momentum_RC, *bases) / (moments_RC.sqrt() + rates["eps"]) * correction
    direction_RC = _seen_from(in_bases_RC, *(basis.mT for basis in bases))
    new["first_moment"] = momentum_RC
    if inputs.phase == _TURN:
        new["left_basis"], moments_RC = _turned(new["left"], bases[0], moments_RC, -2)
        new["right_basis"], moments_RC = _turned(new["right"], bases[1], moments_RC, -1)
    return WholeOutputs(direction_RC, new | {"second_moment": moments_RC})


def _whole(matrices: list[Tensor], newton_schulz: NewtonSchulz, inputs: list[WholeInputs]) -> list[WholeOutputs]:
    return [_step(matrix, inputs) for matrix, inputs in zip(matrices, inputs, strict=True)]


SOAP = MatrixMethod(
    "soap",
    "arXiv 2409.11321, github.com/nikhilvyas/SOAP",
    (
        LR,
        *DECAY,
        STEP,
        Rate("beta1", 0.95, meaning="factor of the average of gradients", below=1.0),
        Rate("beta2", 0.95, meaning="factor of the averages of squares and preconditioners", below=1.0),
        Rate("eps", 1e-8, meaning="added to the root of squares", positive=True),
        Rate("basis_every", 10, whole=True, meaning="steps from one renewal of the bases to the next", positive=True),
    ),
    (
        State("first_moment", "first moment", each="rows×cols"),
        State("second_moment", "second moment", each="rows×cols"),
        State("left", "left preconditioner", each="rows×rows", most=_LARGEST),
        State("right", "right preconditioner", each="cols×cols", most=_LARGEST),
        State("left_basis", "left basis", each="rows×rows", most=_LARGEST),
        State("right_basis", "right basis", each="cols×cols", most=_LARGEST),
    ),
    adjust_lr=None,
    whole=_whole,
    orthogonalizes=False,
    phase=_phase,
    launched=(_FIRST, _TURN),
    idle=(_FIRST,),
)
