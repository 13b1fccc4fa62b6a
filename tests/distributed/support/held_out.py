"""Methods that the package does not know of: a record each, and what it means in torch alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compile_muon.passes.methods import STEP, MatrixMethod, Rate, State, WholeInputs, WholeOutputs
from compile_muon.passes.methods.method import DECAY, LR, MOMENTUM
from support.books import NewtonSchulz, Step


def _tilted(matrices: list[Tensor], newton_schulz: Any, inputs: list[WholeInputs]) -> list[WholeOutputs]:
    """A gram of each side; every third step its traces tilt the update, which the device decides."""
    found = []
    for matrix, own in zip(matrices, inputs, strict=True):
        left = own.states["left"].lerp(matrix @ matrix.mT, own.rates["weight"])
        right = own.states["right"].lerp(matrix.mT @ matrix, own.rates["weight"])
        tilt = left @ matrix / left.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        tilt = tilt @ right / right.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        found.append((torch.where(own.rates["step"] % 3 == 0, tilt, matrix), {"left": left, "right": right}))
    directions = newton_schulz([update for update, _ in found])
    return [WholeOutputs(direction, states) for direction, (_, states) in zip(directions, found, strict=True)]


TILTED = MatrixMethod(
    "tilted",
    "this test",
    (LR, MOMENTUM, *DECAY, STEP, Rate("weight", 0.25, below=1.0)),
    (State("left", "left gram", each="rows×rows"), State("right", "right gram", each="cols×cols")),
    whole=_tilted,
)


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
