"""Methods that are not ours: a record and a line in ``METHODS``, whatever its rates are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.compiled import Words as Model
from support.compiled import loss_of_words as loss_of
from torch import Tensor, nn
from torch.optim import lr_scheduler

from compile_muon import MuonZero
from compile_muon.config import Config, config_from_kwargs
from compile_muon.engine.dtensors import local_tensor
from compile_muon.passes import methods
from compile_muon.passes.methods import ElementMethod, MatrixMethod, Method, Rate, State
from compile_muon.passes.methods.method import DECAY, LR


@contextmanager
def known(*own: Method) -> Iterator[None]:
    """These among the methods: the line that a new one takes."""
    with mock.patch.object(methods, "METHODS", (*methods.METHODS, *own)):
        yield


def heavy(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[MutableMapping[str, Tensor]],
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    for param, grad, state in zip(params, grads, states, strict=True):
        state["sum"].mul_(group["momentum"]).add_(grad)
        param.sub_(group["lr"] * state["sum"])


SGD = ElementMethod(
    "sgd", "torch.optim.SGD", (LR, Rate("momentum", 0.9, below=1.0)), (State("sum", "sum"),), step=heavy
)
SPECTRAL = MatrixMethod("spectral", "this test", (LR, *DECAY))


def test_a_rate_called_momentum_is_the_methods_own() -> None:
    """It is no factor of Muon's, which graphs read, though both stand in the default group."""
    with known(SGD):
        torch.manual_seed(0)
        model = Model()
        mine = MuonZero(model, update="step", auxiliary="sgd", adamw_lr=0.1, adamw_weight_decay=0.0)
        held = [dict(model.named_parameters())[name] for name in ("norm.weight", "head.weight")]
        theirs = [param.detach().clone().requires_grad_() for param in held]
        sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
        assert {group["momentum"] for group in mine.param_groups} == {0.95, 0.9}
        for _ in range(3):
            loss_of(model).backward()
            for param, own in zip(theirs, held, strict=True):
                assert own.grad is not None
                param.grad = own.grad.clone()
            mine.step()
            sgd.step()
            mine.zero_grad()
        torch.testing.assert_close([param.detach() for param in held], [param.detach() for param in theirs])


def test_a_schedule_cycles_what_the_groups_have_and_says_what_they_miss() -> None:
    """Without a matrix there is no momentum of Muon's, and of other methods not all have betas."""
    cycle = {"max_lr": 0.01, "total_steps": 8, "base_momentum": 0.5, "max_momentum": 0.8}
    config = config_from_kwargs(adamw_lr=0.1)
    with known(SGD):
        for auxiliary, cycled in (("adamw", "betas"), ("sgd", "momentum")):
            optimizer = MuonZero.from_config(
                Model(), Config(config.muon, config.adamw, algorithm="adamw", auxiliary=auxiliary)
            )
            scheduler = lr_scheduler.OneCycleLR(optimizer, **cycle)
            optimizer.step()
            scheduler.step()
            found = {group[cycled] if cycled == "momentum" else group[cycled][0] for group in optimizer.param_groups}
            assert len(found) == 1 and 0.5 < found.pop() < 0.8
    plain = ElementMethod("plain", "this test", (LR,), step=lambda params, *_: None)
    with known(plain):
        optimizer = MuonZero.from_config(
            Model(), Config(config.muon, config.adamw, algorithm="adamw", auxiliary="plain")
        )
        with pytest.raises(ValueError, match="momentum"):
            lr_scheduler.OneCycleLR(optimizer, **cycle)


def test_soap_begins_bases_of_more_than_255_rows_in_eager_code() -> None:
    layer = nn.Linear(8, 300, bias=False)
    optimizer = MuonZero(nn.Sequential(nn.Embedding(4, 8), layer, nn.Linear(300, 4)), method="soap", update="step")
    held = optimizer.param_groups[0]["params"][0]
    assert held.shape == (300, 8)
    held.grad = torch.ones_like(held)
    optimizer.step()
    basis = local_tensor(optimizer.state[held]["left_basis"])[0]
    torch.testing.assert_close(basis @ basis.mT, torch.eye(300), atol=1e-4, rtol=0)


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_matrix_method_without_a_momentum_orthogonalizes_gradients(offload: str | None) -> None:
    with known(SPECTRAL):
        torch.manual_seed(0)
        model = Model()
        settings: dict[str, Any] = {"method": "spectral", "offload": offload, "ns_dtype": "float32"}
        optimizer = MuonZero(model, lr=0.02, weight_decay=0.1, **settings)
        run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
        weight = dict(model.named_parameters())["up.weight"]
        assert "momentum_buffer" not in optimizer.state[weight] and "momentum" not in optimizer.param_groups[0]
        for _ in range(2):
            loss_of(run).backward()
            assert weight.grad is not None
            before, grad = weight.detach().clone(), weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            direction = (before * (1 - 0.02 * 0.1) - weight.detach()) / (0.02 * 2**0.5)  # of 16 rows and 8 columns
            u, _, vh = torch.linalg.svd(grad, full_matrices=False)
            # Newton-Schulz leaves singular values between 0.7 and 1.2
            assert 0.8 < float((direction * (u @ vh)).sum()) / 8 < 1.2
            assert torch.linalg.matrix_norm(direction, 2) < 1.3
        assert optimizer.totals()["directions_used"] == 6


def documented() -> dict[tuple[str, str], tuple[str, str, str]]:
    """State of a method -> shape, dtype and place, as the page has them."""
    page = (Path(__file__).parents[2] / "docs/how-to/methods.md").read_text().partition("## What a method keeps")[2]
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in page.splitlines() if "|" in line
    ]
    return {(method, state): (shape, dtype, where) for method, state, shape, dtype, where in rows[2:]}


def test_the_page_tells_what_each_method_keeps() -> None:
    rows = documented()
    assert rows.keys() == {(method.name, state.name) for method in methods.METHODS for state in method.states}
    shapes = {"[rows, 1]": (16, 1), "[]": ()}
    sides = {"rows": 16, "cols": 8}
    shapes |= {f"[matrices, {a}, {b}]": (1, sides[a], sides[b]) for a in sides for b in sides}
    for method in methods.METHODS:
        matrices = isinstance(method, MatrixMethod)
        model = Model()
        optimizer = MuonZero(model.bfloat16(), **{"method" if matrices else "auxiliary": method.name})
        param = dict(model.named_parameters())["up.weight" if matrices else "head.weight"]
        found = {name: local_tensor(state) for name, state in optimizer.state[param].items()}
        momentum = found.pop("momentum_buffer", None)
        assert (momentum is not None) == (matrices and method.name != "soap"), method.name
        assert momentum is None or (momentum.shape, momentum.dtype) == (param.shape, torch.float32)
        for state in method.states:
            shape, dtype, where = rows[method.name, state.name]
            tensor = found.pop(state.name)
            assert tensor.shape == (param.shape if shape == "parameter" else shapes[shape]), (method.name, state.name)
            assert dtype in ("master", "fp32") and tensor.dtype == torch.float32
            assert where == (
                "at owners" if state.at_owner else "on every rank" if state.everywhere else "cut as the parameter"
            )
        assert not found, method.name
