"""What people do to a sharded model (load, edit, copy, save, move) works on every rank or raises on every rank."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import on_ranks
from support.reference import full, refusal, train_step
from support.zoo import Uneven
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import compile_muon
from compile_muon import UnsupportedModelError, full_parameters

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def net(seed: int = 0) -> Uneven:
    torch.manual_seed(seed)
    return Uneven().eval()  # the running statistics stay what they are


def sharded(stage: int, seed: int = 0, **settings: Any) -> tuple[Uneven, compile_muon.MuonZero]:
    model = net(seed)
    return model, compile_muon.MuonZero(model, stage=stage, adamw_eps=1e-4, ns_dtype="float32", **settings)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="muon_zero", options={"codegen": "eager"})


def step(model: nn.Module, optimizer: compile_muon.MuonZero, run: Any = None) -> None:
    train_step(optimizer, (model if run is None else run)(X).square().mean())


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value).detach().clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, expected: dict[str, Tensor], run: Any = None) -> None:
    """Parameters, buffers, and what a forward (eager, or ``run``) makes of them, which reads the replicas."""
    now = values(model)
    assert now.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(now[name], value.to(now[name].dtype)), name
    plain = net(99)
    plain.load_state_dict(expected)
    with torch.no_grad():
        torch.testing.assert_close((model if run is None else run)(X), plain(X), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2))])
@on_ranks(2)
def test_state_dicts_load_whole_and_sharded_and_of_other_placements(stage: int) -> None:
    model, optimizer = sharded(stage)
    run = compiled(model) if stage == 2 else model
    step(model, optimizer, run)
    params = dict(model.named_parameters())
    momenta = [held.momentum.clone() for held in optimizer.engine.step.muon]
    for assign in (False, True):
        for seed, dtype in ((3, torch.float32), (4, torch.bfloat16)):
            whole = {
                name: value.to(dtype) if name in {*params, "tied.weight"} else value + seed
                for name, value in net(seed).state_dict().items()
            }
            kept = dict(whole)
            assert not any(model.load_state_dict(whole, assign=assign))
            assert all(whole[name] is kept[name] for name in kept)  # the caller's dictionary is the caller's
            same(model, whole, run)
            same(model, whole)
    other, plain = sharded(stage, seed=5)[0], dict(net(7).state_dict())
    given = [(other.state_dict(), values(other), assign) for assign in (False, True)]
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(0), Shard(1)) if stage in (1, 3) else ():
        names = ("up.weight", "head.weight", "tied.weight")
        given.append((plain | {n: distribute_tensor(plain[n], mesh, [placement]) for n in names}, plain, False))
    for state, expected, assign in given:
        with torch.no_grad():
            for p in params.values():
                p.zero_()
        model.load_state_dict(state, assign=assign)
        same(model, expected, run)
    assert all(p is params[name] for name, p in model.named_parameters())
    assert all(torch.equal(a.momentum, m) for a, m in zip(optimizer.engine.step.muon, momenta, strict=True))
    step(model, optimizer, run)


@pytest.mark.parametrize("stage", [2, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1))])
@on_ranks(2)
def test_state_dicts_are_saved_on_every_rank(stage: int) -> None:
    model, optimizer = sharded(stage)
    step(model, optimizer)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    want = values(model)
    for name, value in loaded.items():
        assert torch.equal(full(value), want[name]), name
    for held in optimizer.engine.params:  # of the file are the bytes of its shard
        assert held.local.untyped_storage().nbytes() == held.local.numel() * held.local.element_size(), held.name
        if held.resident is not None and held.local.numel():  # no memory of its own
            start = held.spec.layout.local_rows.start
            assert held.local.data_ptr() == held.resident[start:].data_ptr()
    fresh, _ = sharded(stage, seed=8)
    fresh.load_state_dict(loaded)
    same(fresh, want)


@pytest.mark.parametrize("stage", [2, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1))])
@on_ranks(2)
def test_deep_copies_are_models_of_their_own(stage: int) -> None:
    """An average of weights: follows its own parameters, and training the first does not touch it."""
    model, optimizer = sharded(stage)
    step(model, optimizer)
    twin = copy.deepcopy(model)
    before = values(model)
    run = compiled(twin) if stage in (1, 3) else twin
    same(twin, before, run)
    assert twin.tied._parameters["weight"] is twin.head._parameters["weight"]
    step(model, optimizer)
    same(twin, before)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    after = values(model)
    average = {
        name: torch.lerp(value, after[name], 0.5) if value.is_floating_point() else value
        for name, value in before.items()
    }
    for name, value in values(twin).items():
        torch.testing.assert_close(value, average[name], msg=name)
    same(twin, values(twin), run)
    assert not any(torch.equal(after[n], before[n]) for n in ("up.weight", "head.weight"))
    step(model, optimizer)


@pytest.mark.parametrize("stage", [2, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1))])
@on_ranks(2)
def test_full_parameters_of_all_ranks(stage: int) -> None:
    model, optimizer = sharded(stage)
    step(model, optimizer)
    kinds = {name: type(p) for name, p in model.named_parameters()}
    params = dict(model.named_parameters())
    for p in params.values():
        p.grad = torch.ones_like(p)
    before = values(model)
    with full_parameters(model):
        assert type(model.up) is nn.Linear
        for name, p in model.named_parameters():
            assert type(p) is nn.Parameter and p.dtype is torch.float32 and torch.equal(p, before[name]), name
        assert model.tied.weight is model.head.weight
        plain = copy.deepcopy(model)
        torch.testing.assert_close(model(X), plain(X))
    with full_parameters(model, write=True), torch.no_grad():
        model.up.weight.copy_(torch.full((9, 6), float(dist.get_rank() + 1)))  # ranks that drift apart
        nn.init.constant_(model.thin.bias, 7)
        model.scale.data = torch.tensor(3.0)
        model.head.weight = model.tied.weight = nn.Parameter(torch.eye(6))
    expected = before | {
        "up.weight": torch.ones(9, 6), "thin.bias": torch.full((1,), 7.0), "scale": torch.tensor(3.0),
        "head.weight": torch.eye(6), "tied.weight": torch.eye(6),
    }  # fmt: skip
    same(model, expected)
    assert {name: type(p) for name, p in model.named_parameters()} == kinds
    for name, p in model.named_parameters():
        assert p is params[name] and torch.equal(full(p.grad), torch.ones_like(full(p))), name
    optimizer.zero_grad()
    step(model, optimizer)
    with full_parameters(model.up, write=True):  # one module only
        assert isinstance(model.head.weight, DTensor)
        nn.init.zeros_(model.up.weight)
    assert not full(params["up.weight"]).any()
    model, optimizer = sharded(stage, param_dtype="bfloat16")  # master values, not what the model computes with
    third = torch.full((9, 6), 1 / 3)
    with full_parameters(model, write=True):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        model.up.weight = nn.Parameter(third.clone())
    assert torch.equal(full(model.up._parameters["weight"]), third)


@on_ranks(2)
def test_full_parameters_refuse_alike_on_all_ranks() -> None:
    model, _ = sharded(3)
    before = values(model)

    def one_rank_only() -> None:
        with full_parameters(model, write=True):
            nn.init.zeros_(model.up.weight)
            if dist.get_rank() == 1:
                model.up.weight = nn.Parameter(torch.zeros(2, 2))

    def without_write() -> None:
        with full_parameters(model):
            nn.init.zeros_(model.thin.weight)

    def raising() -> None:
        with full_parameters(model, write=True):
            nn.init.zeros_(model.up.weight)
            raise UnsupportedModelError("on purpose")

    by_rank = ("refused by another rank", "up.weight: its shape changed from [9, 6] to [2, 2]")
    for wrong, said in (
        (one_rank_only, by_rank[dist.get_rank()]),
        (without_write, "thin.weight: was edited in a full_parameters block without write=True"),
        (raising, "on purpose"),
    ):
        assert said in refusal(wrong)
        same(model, before)


@on_ranks(2)
def test_misuse_is_refused_by_name() -> None:
    """What moves or replaces parameters is named, with a remedy."""
    model, optimizer = sharded(3)
    step(model, optimizer)
    before = values(model)
    whole = "full_parameters(module, write=True)"
    moves: list[tuple[Callable[[], Any], str, str]] = [
        (model.half, "scale", "param_dtype='float16'"),
        (lambda: model.to("meta"), "scale", "move the model before"),
        (lambda: setattr(model.up, "weight", nn.Parameter(torch.zeros(9, 6))), "up.weight", whole),
        (lambda: delattr(model.up, "weight"), "up.weight", "before MuonZero"),
    ]
    for move, name, remedy in moves:
        said = refusal(move)
        assert name in said and remedy in said, said
    ids = [id(p) for p in model.parameters()]
    assert model.to("cpu") is model and model.float() is model
    assert [id(p) for p in model.parameters()] == ids
    same(model, before)
    step(model, optimizer)
