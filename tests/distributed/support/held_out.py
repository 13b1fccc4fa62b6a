"""Methods that the package does not know of: a record each, and what it means in torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compile_muon.passes.methods import STEP, After, Made, MatrixMethod, Piece, Rate, Seen, State, largest
from compile_muon.passes.methods.method import DECAY, LR, MOMENTUM
from support.books import NewtonSchulz, Step

__all__ = ["COLUMNS", "LARGEST", "TILTED", "columns", "largest_entry", "tilted"]


def _tilted(matrices: list[Tensor], newton_schulz: Any, seen: list[Seen]) -> list[Made]:
    """A gram of each side; every third step its traces tilt the update, which the device decides."""
    found = []
    for matrix, own in zip(matrices, seen, strict=True):
        left = own.states["left"].lerp(matrix @ matrix.mT, own.rates["weight"])
        right = own.states["right"].lerp(matrix.mT @ matrix, own.rates["weight"])
        tilt = left @ matrix / left.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        tilt = tilt @ right / right.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        found.append((torch.where(own.rates["step"] % 3 == 0, tilt, matrix), {"left": left, "right": right}))
    directions = newton_schulz([update for update, _ in found])
    return [Made(direction, states) for direction, (_, states) in zip(directions, found, strict=True)]


TILTED = MatrixMethod(
    "tilted",
    "this test",
    (LR, MOMENTUM, *DECAY, STEP, Rate("weight", 0.25, below=1.0)),
    (State("left", "left gram", each="rows×rows"), State("right", "right gram", each="cols×cols")),
    whole=_tilted,
)


def _by_columns(piece: Piece) -> After:
    return After(piece.direction, columns=piece.direction.square().sum(-2, keepdim=True))


def _divided(facts: None, keep: Any, move: Any, piece: Piece) -> tuple[Any, Any, dict[str, Tensor]]:
    """Columns divided by a running root of their mean square, the norm by a running mean of itself."""
    assert piece.columns is not None
    squares = piece.states["squares"].lerp(piece.columns / piece.rows, 0.25)
    norm = piece.states["norm"].lerp(piece.columns.sum(-1, keepdim=True).sqrt(), 0.5)
    count = piece.states["count"] + 1
    return keep, move * norm / (squares.sqrt() + 0.1) / count, {"squares": squares, "norm": norm, "count": count}


COLUMNS = MatrixMethod(
    "columns",
    "this test",
    (LR, MOMENTUM, *DECAY),
    (
        State("squares", "squares of columns", "col"),
        State("norm", "norm", "matrix"),
        State("count", "count", "parameter"),
    ),
    after=_by_columns,
    columns=1,
    finish=_divided,
)


def _with_maxima(piece: Piece) -> After:
    assert piece.sums is not None
    entry, row = largest(piece.weight.abs()), largest(piece.sums.sqrt())
    return After(piece.direction, maxima=torch.cat([entry, row], -1))


def _bounded(facts: Tensor, keep: Any, move: Any, piece: Piece) -> tuple[Any, Any, dict[str, Tensor]]:
    """No further than the largest entry is large, and slower by the largest row there ever was."""
    assert piece.maxima is not None
    entry, row = piece.maxima.unbind(-1)
    most = torch.maximum(piece.states["most"].flatten(), row)
    return keep, move * entry / (1 + most), {"most": most[:, None, None]}


LARGEST = MatrixMethod(
    "largest",
    "this test",
    (LR, MOMENTUM, *DECAY),
    (State("most", "largest norm of a row", "matrix"),),
    row_sums=lambda direction, weight: weight.square().sum(-1, keepdim=True),
    after=_with_maxima,
    maxima=2,
    finish=_bounded,
)


# ----------------------------------------------------------------------------------------------- books of them


def _updates(weight: Tensor, steps: Sequence[Step]) -> list[Tensor]:
    m, found = torch.zeros_like(weight), []
    for g, _, momentum in steps:
        m = momentum * m + (1 - momentum) * g
        found.append(momentum * m + (1 - momentum) * g)
    return found


def _move(weight: Tensor, lr: float) -> float:
    return lr * max(1, weight.shape[0] / weight.shape[1]) ** 0.5


def tilted(ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float) -> Tensor:
    left, right = torch.zeros(len(weight), len(weight)), torch.zeros(weight.shape[1], weight.shape[1])
    for t, (u, (_, lr, _)) in enumerate(zip(_updates(weight, steps), steps, strict=True), 1):
        left, right = 0.75 * left + 0.25 * u @ u.T, 0.75 * right + 0.25 * u.T @ u
        d = ns(left / left.trace() @ u @ (right / right.trace()) if t % 3 == 0 else u)
        weight = (1 - lr * decay) * weight - _move(weight, lr) * d
    return weight


def columns(ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float) -> Tensor:
    squares, norm = torch.zeros(weight.shape[1]), torch.zeros(())
    for t, (u, (_, lr, _)) in enumerate(zip(_updates(weight, steps), steps, strict=True), 1):
        d = ns(u)
        squares, norm = 0.75 * squares + 0.25 * d.square().mean(0), 0.5 * norm + 0.5 * d.norm()
        weight = (1 - lr * decay) * weight - _move(weight, lr) / t * norm * d / (squares.sqrt() + 0.1)
    return weight


def largest_entry(ns: NewtonSchulz, weight: Tensor, steps: Sequence[Step], decay: float) -> Tensor:
    most = torch.zeros(())
    for u, (_, lr, _) in zip(_updates(weight, steps), steps, strict=True):
        most = torch.maximum(most, weight.norm(dim=1).amax())
        weight = (1 - lr * decay) * weight - _move(weight, lr) * weight.abs().amax() / (1 + most) * ns(u)
    return weight
