"""A step sees every direction that is not finite."""

from types import SimpleNamespace

import pytest
import torch

from compile_muon.engine import step_checks
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.language.views import View

JORDAN = (3.4445, -4.7750, 2.0315) * 5
NAN, INF = float("nan"), float("inf")


def spec(shape, view=None, rows_over=1, columns_over=1, coefficients=JORDAN):
    """Of the second rank, where several have parts."""
    shard, tensor = Axis("shard", rows_over, rows_over // 2, "s"), Axis("tensor", columns_over, columns_over // 2, "t")
    layout = Layout(shape, 3, shard, tensor=tensor, tensor_dim=1 if columns_over > 1 else None)
    batch = shape[0] if len(shape) == 3 else 1
    muon = MuonSpec(batch, *shape[-2:], True, "standard", coefficients, 1.0, (), "float16", 1e-7, "owner", view=view)
    return ParamSpec(layout, "float32", "float32", "float32", muon)


SPECS = {
    "one matrix": spec((12, 20)),
    "rows of one": spec((13, 20), rows_over=2),
    "columns of one": spec((12, 20), columns_over=2),
    "a stack": spec((5, 6, 4)),
    "a part of a stack": spec((5, 6, 4), rows_over=2),
    "heads": spec((12, 20), View.of(12, heads=4)),
    "rows of heads": spec((12, 20), View.of(12, heads=3), rows_over=2),
    "parts that take turns": spec((12, 20), View.of(12, split=[6, 4, 2], groups=2)),
    "heads side by side": spec((12, 20), View.of(20, heads=5, dim=1)),
    "some of them": spec((12, 20), View.of(20, heads=5, dim=1), columns_over=2),
    "no row": spec((1, 20), View.of(1), rows_over=2),
}


def found(*pairs):
    specs, directions = zip(*pairs, strict=True)
    return step_checks.directions_not_finite(specs, directions).tolist()


def direction_of(own):
    return torch.ones(own.layout.local_shape, dtype=torch.float16)


@pytest.mark.parametrize("name", SPECS)
def test_a_matrix_of_nan_is_seen_wherever_it_is(name):
    own, other = SPECS[name], SPECS["one matrix"]
    bad = direction_of(other) * NAN
    assert found((own, direction_of(own)), (other, bad)) == [0.0, 1.0]
    for part in own.parts:
        for matrix in range(len(part.of(direction_of(own)))):
            direction = direction_of(own)
            part.of(direction)[matrix] = NAN
            seen = float(direction.isnan().any())  # a rank may have no row
            assert found((own, direction)) == [seen]
            assert found((other, bad), (own, direction), (own, direction_of(own))) == [1.0, seen, 0.0]


@pytest.mark.parametrize("diverging", [True, False], ids=["coefficients that diverge", "more than Newton-Schulz"])
def test_all_is_read_where_one_entry_may_be_infinite_alone(diverging, monkeypatch):
    own = spec((12, 20), coefficients=(3.4445, -4.7750, 5.0) * 5 if diverging else JORDAN)
    if not diverging:
        monkeypatch.setattr(step_checks, "matrix_method", lambda name: SimpleNamespace(whole=lambda xs, run: run(xs)))
    direction = direction_of(own)
    direction[7, 9] = INF
    assert found((own, direction), (own, direction_of(own))) == [1.0, 0.0]
