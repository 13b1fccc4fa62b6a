"""What every strategy does with whole matrices: see a parameter as them, put them through Newton-Schulz."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..methods import matrix_method
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
    """Directions of ``[rows, cols]`` or ``[batch, rows, cols]`` tensors, in ``settings.dtype``: Newton-Schulz, an
    opaque op, and what a method has around it."""
    if not matrices:
        return []
    run, whole = partial(_newton_schulz, settings), matrix_method(settings.algorithm).whole
    return run(matrices) if whole is None else whole(matrices, run)


def _newton_schulz(settings: MuonSpec, matrices: list[Tensor]) -> list[Tensor]:
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
