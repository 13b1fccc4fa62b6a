"""Methods that nobody knew of: a record here and a line in ``METHODS``, trained compiled at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.as_graphs import AsGraphs, outputs_in_place
from support.exact import SHAPES, STEPS, TOLERANCE, Exact, gradients, made, saved, train
from support.harness import Ranks
from support.reference import DECAY, LR, MOMENTUM, newton_schulz, relative_error
from torch import Tensor

from compile_muon.passes import methods
from compile_muon.passes.methods import After, Made, MatrixMethod, Piece, Rate, Seen, State, largest
from compile_muon.passes.methods.method import DECAY as DECAYS
from compile_muon.passes.methods.method import LR as RATE
from compile_muon.passes.methods.method import MOMENTUM as AVERAGED
from compile_muon.passes.methods.method import STEP


def tilted(matrices: list[Tensor], newton_schulz: Any, seen: list[Seen]) -> list[Made]:
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
    (RATE, AVERAGED, *DECAYS, STEP, Rate("weight", 0.25, below=1.0)),
    (State("left", "left gram", each="rows×rows"), State("right", "right gram", each="cols×cols")),
    whole=tilted,
)


def by_columns(piece: Piece) -> After:
    return After(piece.direction, columns=piece.direction.square().sum(-2, keepdim=True))


def columns_divided(facts: None, keep: Any, move: Any, piece: Piece) -> tuple[Any, Any, dict[str, Tensor]]:
    """Columns divided by a running root of their mean square, the norm by a running mean of itself."""
    assert piece.columns is not None
    squares = piece.states["squares"].lerp(piece.columns / piece.rows, 0.25)
    norm = piece.states["norm"].lerp(piece.columns.sum(-1, keepdim=True).sqrt(), 0.5)
    count = piece.states["count"] + 1
    return keep, move * norm / (squares.sqrt() + 0.1) / count, {"squares": squares, "norm": norm, "count": count}


COLUMNS = MatrixMethod(
    "columns",
    "this test",
    (RATE, AVERAGED, *DECAYS),
    (
        State("squares", "squares of columns", "col"),
        State("norm", "norm", "matrix"),
        State("count", "count", "parameter"),
    ),
    after=by_columns,
    columns=1,
    finish=columns_divided,
)


def by_rows(direction: Tensor, weight: Tensor) -> Tensor:
    return weight.square().sum(-1, keepdim=True)


def with_maxima(piece: Piece) -> After:
    assert piece.sums is not None
    entry, row = largest(piece.weight.abs()), largest(piece.sums.sqrt())
    return After(piece.direction, maxima=torch.cat([entry, row], -1))


def bounded(facts: Tensor, keep: Any, move: Any, piece: Piece) -> tuple[Any, Any, dict[str, Tensor]]:
    """No further than the largest entry is large, and slower by the largest row there ever was."""
    assert piece.maxima is not None
    entry, row = piece.maxima.unbind(-1)
    most = torch.maximum(piece.states["most"].flatten(), row)
    return keep, move * entry / (1 + most), {"most": most[:, None, None]}


LARGEST = MatrixMethod(
    "largest",
    "this test",
    (RATE, AVERAGED, *DECAYS),
    (State("most", "largest norm of a row", "matrix"),),
    row_sums=by_rows,
    after=with_maxima,
    maxima=2,
    finish=bounded,
)


def expected(method: str, steps: int = STEPS) -> dict[str, Tensor]:
    found = {}
    for place, (name, weight) in enumerate(Exact().named_parameters()):
        if name == "vector":
            continue
        w = weight.detach().reshape(-1, *weight.shape[-2:])
        blocks = [w] if name != "square" or method == "tilted" else list(w.split(4, 2))  # two matrices of 4 columns
        for number, own in enumerate(blocks):
            m, states = torch.zeros_like(own), [0.0 * own @ own.mT, 0.0 * own.mT @ own]
            v, norm = torch.zeros_like(own[:, :1]), torch.zeros_like(own[:, :1, :1])
            most = norm
            for step in range(1, steps + 1):
                g = gradients(step - 1)[place].reshape(w.shape)
                g = g if len(blocks) == 1 else g.split(4, 2)[number]
                m = MOMENTUM * m + (1 - MOMENTUM) * g
                u = MOMENTUM * m + (1 - MOMENTUM) * g
                keep, move = 1 - LR * DECAY, LR * max(1, own.shape[1] / own.shape[2]) ** 0.5
                if method == "tilted":
                    states = [0.75 * s + 0.25 * x for s, x in zip(states, (u @ u.mT, u.mT @ u), strict=True)]
                    left, right = (s / s.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None] for s in states)
                    own = keep * own - move * newton_schulz(left @ u @ right if step % 3 == 0 else u)
                    continue
                d = newton_schulz(u)
                if method == "largest":
                    most = torch.maximum(most, own.norm(dim=2).amax(1)[:, None, None])
                    own = keep * own - move * own.abs().amax((1, 2))[:, None, None] / (1 + most) * d
                    continue
                v = 0.75 * v + 0.25 * d.square().mean(1, keepdim=True)
                norm = 0.5 * norm + 0.5 * d.norm(dim=(1, 2), keepdim=True)
                own = keep * own - move / step * norm * d / (v.sqrt() + 0.1)
            blocks[number] = own
        found[name] = torch.cat(blocks, 2).view(weight.shape)
    return found


def known() -> Any:
    """The line that a method takes."""
    return mock.patch.object(methods, "METHODS", (*methods.METHODS, TILTED, COLUMNS, LARGEST))


HALVES = {"square": {"heads": 2, "dim": 1}}
VIEWS = {"columns": HALVES, "largest": HALVES, "tilted": {}}


def at_every_stage(method: str) -> dict[str, dict[str, float]]:
    found = {}
    with known():
        for stage in (0, 1, 2, 3):
            for update in ("step", "backward") if stage == 3 else ("step",):
                model, optimizer = made(method, stage=stage, update=update, muon_views=VIEWS[method])
                weights = train(model, optimizer, range(STEPS), compiled=True)
                own = {name: relative_error(weights[name], weight) for name, weight in expected(method).items()}
                found[f"{stage} {update}"] = own
                graphs = len(optimizer.engine.step.step_graphs)
                assert graphs == (0 if update == "backward" and method != "tilted" else 1), graphs  # of all steps
                torch._dynamo.reset()
        if method == "tilted":
            found["graphs"] = in_graphs(method)
    return found


def in_graphs(method: str) -> dict[str, float]:
    """Steps as CUDA graphs are read their number from the device."""
    graphs = AsGraphs()
    with pytest.MonkeyPatch.context() as patch:
        outputs_in_place(patch)
        model, optimizer = made(method, stage=2, update="step", checks="next_step")
        optimizer.engine.step.recorded = graphs
        weights = train(model, optimizer, range(STEPS), compiled=True, cuda_graphs=True)
        torch.compiler.reset()
    assert graphs.replays >= STEPS - 3, graphs.replays
    return {name: relative_error(weights[name], weight) for name, weight in expected(method).items()}


@pytest.mark.parametrize(
    ("method", "world"),
    [
        ("tilted", 2),
        *(pytest.param("largest", world, marks=pytest.mark.campaign) for world in (1, 2)),
        *(pytest.param(name, 3, marks=pytest.mark.full) for name in VIEWS),
    ],
)
def test_a_record_and_a_line_are_a_method(ranks: Callable[[int], Ranks], method: str, world: int) -> None:
    for found in ranks(world).run(at_every_stage, method=method):
        for case, own in found.items():
            assert own.keys() == SHAPES.keys() - {"vector"}
            assert all(error <= TOLERANCE for error in own.values()), (case, own)


def resumed(folder: str, **given: Any) -> dict[str, Tensor]:
    with known():
        return saved(folder, **given)


@pytest.mark.parametrize(
    ("method", "whole"),
    [("tilted", False), *(pytest.param("columns", each, marks=pytest.mark.full) for each in (False, True))],
)
def test_its_states_are_saved_and_resharded(
    ranks: Callable[[int], Ranks], tmp_path: Any, method: str, whole: bool
) -> None:
    given = {"folder": str(tmp_path), "way": method, "whole": whole, "muon_views": VIEWS[method]}
    ranks(2).run(resumed, first=0, last=3, stage=3, **given)
    for found in ranks(3).run(resumed, first=3, last=STEPS, stage=1, **given):
        for name, weight in expected(method).items():
            assert relative_error(found[name], weight) <= TOLERANCE, name
