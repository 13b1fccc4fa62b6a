"""Parameter groups: whatever they are given by, each has its method and rates, also methods that are not ours."""

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.compiled import Words as Model
from support.compiled import loss_of_words as loss_of
from support.reference import train_step
from torch import Tensor, nn
from torch.optim import lr_scheduler

import compile_muon
from compile_muon import Checkpointer, ConfigError, MuonZero, load_config
from compile_muon.config import Config, config_from_kwargs
from compile_muon.engine.dtensors import local_tensor
from compile_muon.passes import methods
from compile_muon.passes.methods import ElementMethod, MatrixMethod, Method, Rate, State
from compile_muon.passes.methods.method import DECAY, LR


def made(**settings: Any) -> tuple[Model, MuonZero]:
    torch.manual_seed(0)
    model = Model()
    return model, MuonZero(model, **{"update": "step", "ns_dtype": "float32", **settings})


def told(optimizer: MuonZero) -> dict[str, tuple[str, set[str]]]:
    names = {sharded.param: sharded.name for sharded in optimizer.engine.params}
    return {g["name"]: (g["algorithm"], {names[p] for p in g["params"]}) for g in optimizer.param_groups}


def test_patterns_leave_the_rest_as_it_is() -> None:
    _, optimizer = made(groups={"embed*": {"lr": 0.5}, "q.weight": {"method": "normuon", "beta2": 0.9}})
    found = told(optimizer)
    assert found["embed*"] == ("adamw", {"embed.weight"}) and found["q.weight"] == ("normuon", {"q.weight"})
    assert found["muon"] == ("muon", {"up.weight", "down.weight"})
    by_name = {group["name"]: group for group in optimizer.param_groups}
    assert by_name["embed*"]["lr"] == 0.5 and by_name["adamw"]["lr"] == 3e-4
    assert by_name["q.weight"]["beta2"] == 0.9 and by_name["q.weight"]["lr"] == 0.02
    assert "row_second_moment" in optimizer.state[by_name["q.weight"]["params"][0]]


def test_groups_as_trainers_give_them() -> None:
    """Decay and no decay, each of matrices and vectors: what has several methods becomes several groups."""
    torch.manual_seed(0)
    model = Model()
    decay = [param for param in model.parameters() if param.ndim > 1]
    groups = [
        {"params": decay, "weight_decay": 0.3, "name": "decay"},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "name": "rest"},
    ]
    optimizer = MuonZero(model, groups=groups)
    found = told(optimizer)
    assert found["decay_muon"] == ("muon", {"q.weight", "up.weight", "down.weight"})
    assert found["decay_adamw"] == ("adamw", {"embed.weight", "head.weight"})
    assert found["rest"][1] == {"q.bias", "up.bias", "down.bias", "norm.weight", "norm.bias"}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.3, 0.0]
    with pytest.raises(ConfigError, match=r"groups = .*up.weight.*: in no group, so nothing would train them"):
        MuonZero(other := Model(), groups=[{"params": [other.q.weight], "lr": 0.1}])


def test_two_momenta_and_rates_are_those_of_two_optimizers() -> None:
    """Layer-wise rates: the gradient is the same, so each matrix moves as it does where all have its rates."""
    groups = {"q.weight": {"momentum": 0.5, "lr": 0.1}, "head.weight": {"lr": 0.01, "weight_decay": 0.0}}
    weights = {}
    for name, settings in (
        ("both", {"groups": groups}),
        ("q.weight", {"momentum": 0.5, "lr": 0.1}),
        ("head.weight", {"adamw_lr": 0.01, "adamw_weight_decay": 0.0}),
        ("up.weight", {}),
    ):
        model, optimizer = made(update="backward", **settings)
        loss_of(torch.compile(model, backend="muon_zero", options={"codegen": "eager"})).backward()
        optimizer.step()
        weights[name] = {key: param.detach().clone() for key, param in model.named_parameters()}
        assert optimizer.totals()["directions_used"] == 3
    for name in ("q.weight", "head.weight", "up.weight"):
        assert torch.equal(weights["both"][name], weights[name][name]), name
    assert not torch.equal(weights["both"]["q.weight"], weights["up.weight"]["q.weight"])


def test_schedulers_and_state_dicts_see_all_groups() -> None:
    model, optimizer = made(groups={"embed*": {"lr": 0.5}, "q.weight": {"method": "muonh"}})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(2):
        train_step(optimizer, loss_of(model))
        scheduler.step()
    assert {round(group["lr"] / group["initial_lr"], 6) for group in optimizer.param_groups} == {round(1 / 3, 6)}
    other, again = made(groups={"embed*": {"lr": 0.1}, "q.weight": {"method": "muonh"}})
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for run, each in ((model, optimizer), (other, again)):
        loss_of(run).backward()
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"q.weight": {"method": "normun"}}, r"groups\[q.weight\].method = 'normun': is not a known choice; use"),
        ({"q.weight": {"method": "muon", "beta2": 0.9}}, r"groups\[q.weight\].beta2 = 0.9: is not a rate of muon"),
        ({"norm*": {"momentum": 0.9}}, r"groups\[norm\*\].momentum = 0.9: is not a rate of adamw"),
        ({"q.weight": {"learning": 1}}, r"groups\[q.weight\].learning = 1: is not a rate of any method"),
        ({"q.*": {"lr": 1.0}, "*.weight": {"lr": 0.1}}, r"q.weight.*: is in the groups q.\* and \*.weight"),
        ({"z*": {"lr": 0.1}}, r"groups\[z\*\] = 'z\*': holds no parameter"),
        ({"q.bias": {"method": "muonh"}}, r"method = 'muonh': is for matrices, and group q.bias holds q.bias"),
        ({"q.weight": {"method": "muonh", "weight_decay": 0.1}}, r"weight_decay = 0.1: is not a rate of muonh"),
        ({"q.weight": {"lr": -1.0}}, r"groups\[q.weight\].lr = -1.0: lies outside"),
        ({"q.weight": {"method": "muonbp", "period": 2.5}}, r"period = 2.5: must be an integer"),
        ({"q.weight": {"method": "soap", "basis_every": 0}}, "basis_every = 0: is out of range; use an integer from 1"),
        ({"q.weight": {"method": "dion2", "fraction": 1.5}}, r"fraction = 1.5: lies outside \(0, 1\]"),
        # AdamW takes an eps of 0, of which NorMuon makes NaN.
        ({"q.weight": {"method": "normuon", "eps": 0.0}}, r"groups\[q.weight\].eps = 0.0: lies outside \(0, inf\)"),
    ],
)
def test_mistakes_name_group_value_and_remedy(groups: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(groups=groups)
    with pytest.raises(ConfigError, match=said.replace("groups", "(optimizer.)?groups", 1)):
        MuonZero.from_config(Model(), load_config({"optimizer": {"groups": groups}}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "normuon", "rates": {"eps": 0.0}}, r"rates.eps = 0.0: lies outside \(0, inf\)"),
        ({"rates": {"beta2": 0.9}}, r"rates.beta2 = 0.9: is not a rate of adamw, muon; use one of cautious_decay"),
        ({"rates": {"eps": 1e-6}}, r"rates.eps = 1e-06: is not a rate of adamw, muon; use"),  # it is adamw_eps
        (
            {"rates": {"fraction": 0.5}, "groups": {"up.weight": {"method": "soap"}}},
            r"rates.fraction = 0.5: is not a rate of adamw, muon, soap",
        ),
    ],
)
def test_rates_for_all_groups_are_those_of_a_method_and_in_its_range(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**settings)
    if "groups" in settings:
        made(**settings | {"rates": {"basis_every": 3}})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"method": "muonh", "weight_decay": 0.05, "adamw_weight_decay": 0.05}, "weight_decay"),
        ({"method": "soap", "momentum": 0.9, "adjust_lr": "spectral"}, "momentum, adjust_lr"),
        ({"method": "soap", "ns_steps": 6, "ns_eps": 1e-6}, "ns_steps, ns_eps"),
        ({"method": "dion2", "nesterov": False, "adjust_lr": 0.2}, "nesterov"),
        ({"auxiliary": "lion", "adamw_betas": (0.8, 0.9), "adamw_eps": 1e-6}, "adamw_eps"),
        ({"method": "soap", "momentum": 0.9, "groups": {"up.weight": {"method": "normuon"}}}, None),
        ({"momentum": 0.9, "nesterov": False, "adamw_eps": 1e-6}, None),
    ],
)
def test_a_setting_that_no_method_reads_is_told(settings: dict[str, Any], told: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made(**settings)
    found = [str(w.message).partition(":")[0] for w in caught if "no method in use" in str(w.message)]
    assert found == ([] if told is None else [told])


def test_all_mistakes_are_in_one_message() -> None:
    three: dict[str, Any] = {"q.*": {"lr": -1, "method": "lyon"}, "up*": {"betaz": 1}}
    for groups, number in ((three, 3), ({"q.*": {"lr": 1.0}, "*.bias": {"lr": 1.0}, "z": {}}, 2)):
        with pytest.raises(ConfigError) as caught:
            made(groups=groups)
        assert len(caught.value.errors) == number


def test_what_was_frozen_joins_its_group_or_gets_one() -> None:
    """A finetuning schedule as Lightning's BaseFinetuning has it, and the plain ``requires_grad_``."""
    torch.manual_seed(0)
    model = Model()
    for part in (model.q, model.up, model.norm):
        part.requires_grad_(False)
    everything = [{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.2, "name": "all"}]
    optimizer = MuonZero(model, groups=everything, update="step", ns_dtype="float32")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    before = told(optimizer)
    assert before["all_muon"][1] == {"down.weight"}
    loss_of(model).backward()
    optimizer.step()
    scheduler.step()
    model.q.requires_grad_(True)  # no word to the optimizer, as torch's that hold frozen parameters need none
    loss_of(model).backward()
    optimizer.step()
    found = told(optimizer)
    assert found["all_muon"] == ("muon", {"down.weight", "q.weight"}) and "q.bias" in found["all_adamw"][1]
    assert optimizer.param_groups[0]["lr"] == 0.05

    model.up.requires_grad_(True)
    optimizer.add_param_group({"params": model.up.parameters(), "lr": 0.01, "momentum": 0.5})
    found = told(optimizer)
    assert found["added_2_muon"] == ("muon", {"up.weight"}) and found["added_2_adamw_no_decay"][1] == {"up.bias"}
    group = next(group for group in optimizer.param_groups if group["name"] == "added_2_muon")
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.01, 0.5, 0.1)
    loss_of(model).backward()
    optimizer.step()
    moved = optimizer.state[group["params"][0]]["momentum_buffer"]
    assert torch.allclose(moved, 0.5 * group["params"][0].grad)
    assert optimizer.summary().muon_parameters == 8 * 8 + 2 * 8 * 16

    bad = {
        r"more than one parameter group: up.bias, up.weight|up.weight, up.bias": {"params": model.up.parameters()},
        r"add_param_group = 'norm.weight, norm.bias': needs no gradient": {"params": model.norm.parameters()},
        r"add_param_group\[x\].betaz = 1: is not a rate": {"params": ["norm.*"], "name": "x", "betaz": 1},
        r"is no parameter of the model": {"params": [nn.Parameter(torch.zeros(2))]},
        r"name = 'all_muon': is the name of another": {"params": ["norm.*"], "name": "all_muon"},
    }
    before = told(optimizer)
    for said, given in bad.items():
        with pytest.raises(ValueError, match=said):
            optimizer.add_param_group(given)
    assert told(optimizer) == before


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
        model, mine = made(auxiliary="sgd", adamw_lr=0.1, adamw_weight_decay=0.0)
        held = [dict(model.named_parameters())[name] for name in ("norm.weight", "head.weight")]
        theirs = [param.detach().clone().requires_grad_() for param in held]
        sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
        assert {group["momentum"] for group in mine.param_groups} == {0.95, 0.9}
        for _ in range(3):
            loss_of(model).backward()
            for param, own in zip(theirs, held, strict=True):
                param.grad = own.grad.clone()
            mine.step()
            sgd.step()
            mine.zero_grad()
        torch.testing.assert_close([param.detach() for param in held], [param.detach() for param in theirs])


def test_a_schedule_cycles_what_the_groups_have_and_says_what_they_miss() -> None:
    """Without a matrix there is no momentum of Muon's, and of other methods not all have betas."""
    cycle = {"max_lr": 0.01, "total_steps": 8, "base_momentum": 0.5, "max_momentum": 0.8}
    plain = ElementMethod("plain", "this test", (LR,), step=lambda params, *_: None)
    config = config_from_kwargs(adamw_lr=0.1)
    with known(SGD, plain):
        for auxiliary, cycled in (("adamw", "betas"), ("sgd", "momentum"), ("plain", "")):
            own = Config(config.muon, config.adamw, algorithm="adamw", auxiliary=auxiliary)
            optimizer = MuonZero.from_config(Model(), own)
            if not cycled:
                with pytest.raises(ValueError, match="momentum"):
                    lr_scheduler.OneCycleLR(optimizer, **cycle)
                continue
            scheduler = lr_scheduler.OneCycleLR(optimizer, **cycle)
            optimizer.step()
            scheduler.step()
            found = {group[cycled] if cycled == "momentum" else group[cycled][0] for group in optimizer.param_groups}
            assert len(found) == 1 and 0.5 < found.pop() < 0.8


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
        model, optimizer = made(update="auto", method="spectral", offload=offload, lr=0.02, weight_decay=0.1)
        run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
        weight = dict(model.named_parameters())["up.weight"]
        assert "momentum_buffer" not in optimizer.state[weight] and "momentum" not in optimizer.param_groups[0]
        for _ in range(2):
            loss_of(run).backward()
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
            elsewhere = "on every rank" if state.each == "parameter" else "cut as the parameter"
            assert where == ("at owners" if state.at_owner else elsewhere)
        assert not found, method.name


def test_groups_and_loads_are_linear_in_the_number_of_parameters(tmp_path: Path) -> None:
    """Calls that the package makes for twice the parameters: a look at each for each would be four times as many."""
    package = str(Path(compile_muon.__file__).parent)

    def calls(run: Any) -> int:
        made = 0

        def note(frame: Any, event: str, _: Any) -> None:
            nonlocal made
            made += event in ("call", "c_call") and frame.f_code.co_filename.startswith(package)

        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
        return made

    found: dict[str, list[int]] = {"groups": [], "load": []}
    for count in (100, 200):
        model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(count)])
        groups = {f"{number}.weight": {"lr": 0.01} for number in range(count)}
        built: list[MuonZero] = []
        found["groups"].append(calls(lambda m=model, g=groups, b=built: b.append(MuonZero(m, groups=g))))
        checkpointer = Checkpointer(tmp_path / str(count))
        checkpointer.save(1, model, built[0])
        found["load"].append(calls(lambda c=checkpointer, m=model, o=built[0]: c.load(m, o)))
    assert all(1.5 * once < twice < 2.2 * once for once, twice in found.values()), found
