"""What every strategy does with whole matrices: see a parameter as them, put them through Newton-Schulz."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import MuonSpec, decode_dtype

__all__ = ["as_matrices", "newton_schulz", "wire_dtype"]


def wire_dtype(muon: MuonSpec) -> torch.dtype:
    """Matrices travel in the compute dtype, except to float16: it may only be cast to after normalization."""
    dtype = decode_dtype(muon.dtype)
    return torch.float32 if dtype is torch.float16 else dtype


def as_matrices(flat: Tensor, muon: MuonSpec) -> Tensor:
    """A whole parameter as one matrix, ``[rows, cols]``, or as a stack of them, ``[batch, rows, cols]``."""
    return flat.reshape(muon.rows, muon.cols) if muon.batch == 1 else flat.reshape(muon.batch, muon.rows, muon.cols)


def newton_schulz(matrices: list[Tensor], settings: MuonSpec) -> list[Tensor]:
    """Newton-Schulz of ``[rows, cols]`` or ``[batch, rows, cols]`` tensors, an opaque op; in ``settings.dtype``."""
    if not matrices:
        return []
    return torch.ops.muon_zero.newton_schulz(
        matrices,
        list(settings.coefficients),
        settings.method,
        settings.dtype,
        settings.eps,
        settings.safety,
        list(settings.restarts),
        settings.backend,
        settings.memory_limit,
    )
