"""MuonBP: orthogonalizes whole matrices every few steps, and in the steps between their blocks, each on one rank.

    whole steps    D = scale(rows, cols) NewtonSchulz(U),              moved by lr
    block steps    D_b = scale(rows_b, cols_b) NewtonSchulz(U_b),      moved by lr block_lr_factor

Blocks are those of a view (``muon_views``), not the shards, so steps do not depend on the number of ranks. Where ranks
hold whole blocks a block step sends nothing. The first step is a whole one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .method import DECAY, LR, MOMENTUM, STEP, MatrixMethod, Piece, Rate


def _joined(rates: Mapping[str, Any]) -> Any:
    return (rates["step"] - 1) % rates["period"] == 0


def _finish(facts: Tensor | None, keep: Any, move: Any, piece: Piece) -> tuple[Any, Any]:
    # In fp64, as rates on the device are: rates that are numbers then give the same bits.
    return keep, move * torch.where(_joined(piece.rates), 1.0, piece.rates["block_lr_factor"]).double()


MUONBP = MatrixMethod(
    "muonbp",
    "arXiv 2510.16981",
    (
        LR,
        MOMENTUM,
        *DECAY,
        STEP,
        Rate("period", 5, whole=True, meaning="steps of which one has whole matrices", positive=True),
        Rate("block_lr_factor", 1.0, meaning="what `lr` is multiplied by in the others", positive=True),
    ),
    adjust_lr="match_rms_adamw",
    joined=_joined,
    finish=_finish,
)
