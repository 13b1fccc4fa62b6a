"""Edits of weights between steps, as people make them: right in every forward after them, in every file, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import Ranks
from support.reference import full, world_and_rank
from support.zoo import Uneven
from torch import Tensor, nn

import compile_muon

STEPS = 2


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


EVERYONE = batch(9, 9)


def net() -> Uneven:
    torch.manual_seed(0)
    return Uneven().eval()


def sharded(stage: int, model: nn.Module | None = None) -> tuple[Any, compile_muon.MuonZero]:
    model = net() if model is None else model
    return model, compile_muon.MuonZero(model, stage=stage, adamw_lr=0.01, ns_dtype="float32")


# ------------------------------------------------------------------------------------------------ averages, swapped in


def counted(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


def data(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    """diffusers' ``EMAModel.copy_to()`` and ``restore()``."""
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value.to(param.device).data)


def assigned(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    for param, value in zip(params, values, strict=True):
        param.data = value.clone()


def foreach(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    torch._foreach_lerp_(list(params), list(values), 1.0)


def of_a_view(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    for param, value in zip(params, values, strict=True):
        (param.data.t() if param.ndim == 2 else param.data).copy_(value.t() if param.ndim == 2 else value)


def foreach_of_a_state_dict(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    """timm's ``ModelEmaV3``, between two models of equal layout."""
    named = dict(zip((name for name, _ in model.named_parameters()), values, strict=True))
    state = {name: value for name, value in model.state_dict().items() if name in named}
    torch._foreach_lerp_(list(state.values()), [named[name] for name in state], 1.0)


def state_dict(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(zip(names, values, strict=True)), strict=False)


def shards(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    for param, value in zip(params, values, strict=True):
        getattr(param, "to_local", lambda param=param: param)().copy_(getattr(value, "_local_tensor", value))


SWAPS = [counted, data, assigned, foreach, of_a_view, foreach_of_a_state_dict, state_dict, shards]


def training(stage: int, swap: Any, *, compiled: bool = False, plain: bool = False) -> list[float]:
    """Store, swap an average in, evaluate, swap back, train on; what evaluations and trainings saw, all ranks' mean."""
    world, rank = world_and_rank()
    model, optimizer = sharded(stage)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    average = [param.detach().clone() for param in model.parameters()]
    seen: list[float] = []
    for step in range(STEPS):
        losses = [run(batch(step, r)).square().mean() for r in (range(2) if plain else [rank])]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            params = list(model.parameters())
            for value, param in zip(average, params, strict=True):
                value.lerp_(param, 0.3)
            stored = [param.detach().clone() for param in params]
            swap(model, params, average)
            seen.append(run(EVERYONE).square().mean().item())
            swap(model, params, stored)
            seen.append(run(EVERYONE).square().mean().item())
    seen.append(sum(float(full(param.detach()).square().sum()) for param in model.parameters()))
    return seen


#: the three ways of PyTorch to see no edit, and none
SHORT = [data, foreach, shards]


def trainings(stage: int, swaps: list[str], compiled: bool) -> dict[str, list[float]]:
    found = {swap.__name__: training(stage, swap) for swap in SWAPS if swap.__name__ in swaps}
    return found | ({"compiled": training(stage, data, compiled=True)} if compiled else {})


@pytest.mark.parametrize(
    ("stage", "swaps", "compiled"),
    [(1, SHORT, False), (3, SHORT[:2], False), *(pytest.param(s, SWAPS, True, marks=pytest.mark.full) for s in (1, 3))],
)
def test_an_average_that_is_swapped_in_is_what_every_rank_evaluates(
    ranks: Callable[[int], Ranks], stage: int, swaps: list[Any], compiled: bool
) -> None:
    expected = training(0, counted, plain=True)
    names = [swap.__name__ for swap in swaps]
    for found in ranks(2).run(trainings, stage=stage, swaps=names, compiled=compiled):
        assert len(found) == len(names) + compiled
        for how, seen in found.items():
            assert seen == pytest.approx(expected, rel=2e-5), how


def evaluated_after_other_edits() -> str:
    model, _ = sharded(1)
    with torch.no_grad():
        for param in model.parameters():
            param.data.mul_(2)
        if dist.get_rank() == 1:
            for param in model.parameters():
                param.data.mul_(2)
        try:
            model(EVERYONE)
        except compile_muon.LedgerError as error:
            return str(error)
    return "no error"


def test_ranks_that_read_after_different_edits_are_told(ranks: Callable[[int], Ranks]) -> None:
    for said in ranks(2).run(evaluated_after_other_edits):
        assert "ranks read the weight after different numbers of edits (1 on rank 0, 2 on rank 1 of" in said


def clipped(stage: int) -> tuple[float, float]:
    """Weights held within bounds, as critics of old: most ranks have nothing to clip."""
    model, _ = sharded(stage)
    plain = net()
    for each in (model, plain):
        for param in each.parameters():
            param.data.clamp_(-0.4, 0.4)
    with torch.no_grad():
        return model(EVERYONE).sum().item(), plain(EVERYONE).sum().item()


def test_an_edit_that_changes_one_ranks_rows_alone(ranks: Callable[[int], Ranks]) -> None:
    for found, expected in ranks(3).run(clipped, stage=1):
        assert found == pytest.approx(expected, rel=1e-5)


def data_that_does_not_fit() -> list[str]:
    model, _ = sharded(3)
    said = []
    for value in (torch.zeros(3), next(iter(model.parameters())).detach().double()):
        try:
            next(iter(model.parameters())).data = value
        except compile_muon.UnsupportedModelError as error:
            said.append(str(error))
    whole = torch.randn(list(model.parameters())[0].shape, generator=torch.Generator().manual_seed(3))
    next(iter(model.parameters())).data = whole
    assert torch.equal(full(next(iter(model.parameters())).detach()), whole)
    return said


def test_data_takes_a_whole_tensor_or_says_what_does_not_fit(ranks: Callable[[int], Ranks]) -> None:
    for said in ranks(2).run(data_that_does_not_fit):
        assert len(said) == 2 and all("a sharded parameter stays torch.float32 [" in text for text in said)


# ------------------------------------------------------------------------------------------ penalties outside the model


def penalized() -> tuple[float, float]:
    """The largest distance to an unsharded model, of gradients and of the loss."""
    _, rank = world_and_rank()
    model, _ = sharded(2)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    loss = run(batch(0, rank)).square().mean() + 0.1 * sum(param.pow(2).sum() for param in model.parameters())
    loss.backward()
    plain = net()
    expected = sum(plain(batch(0, r)).square().mean() for r in range(2)) / 2
    expected = expected + 0.1 * sum(param.pow(2).sum() for param in plain.parameters())
    expected.backward()
    grads = [full(param.grad) for param in model.parameters()]
    distance = max(float((g - p.grad).abs().max()) for g, p in zip(grads, plain.parameters(), strict=True))  # type: ignore[operator]
    return distance, abs(float(full(loss.detach())) - float(expected))  # a DTensor's loss is that of all ranks


def test_a_penalty_of_the_parameters_meets_the_loss(ranks: Callable[[int], Ranks]) -> None:
    for distance, loss in ranks(2).run(penalized):
        assert distance < 1e-6 and loss < 1e-5


# ------------------------------------------------------------------------------------------------- one rank by itself


def evaluates_alone() -> str:
    model, optimizer = sharded(3)
    for step in range(2):
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with torch.no_grad():
                return f"evaluated {model(EVERYONE).sum().item()}"
    return "trained on"


def test_a_rank_that_evaluates_alone_at_stage_3_is_told_before_it_gets_a_number(ranks: Callable[[int], Ranks]) -> None:
    first, _ = ranks(2).outcomes(evaluates_alone)
    assert first.value is None and first.failure is not None
    told = "PeerError: this rank changes over from training to evaluation, and at stage 3 weights are gathered"
    assert told in first.failure and "wait in step 2, an eager read (up)" in first.failure


def changes(batches: int) -> int:
    """Evaluations and trainings by turns, on all ranks: they go through, and meet only at the turns."""
    model, optimizer = sharded(3)
    for step in range(2):
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(batches):
                model(EVERYONE)
    return optimizer.engine.ledger.status.changes


def test_ranks_that_evaluate_together_meet_once_a_turn(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(changes, batches=5) == [3, 3]


# ------------------------------------------------------------------------------------------------------ half precision


def masters(stage: int, settings: dict[str, Any], dtype: str) -> tuple[set[str], set[str], str, float]:
    """Dtypes of parameters and state, of what the model computes; how far 30 tiny steps move a norm of ones."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4))
    model = model.to(getattr(torch, dtype))
    frozen = model[0].bias.requires_grad_(False)
    config = {"optimizer": {"params": {"adam_lr": 1e-5, "ns_dtype": "fp32", **settings}}, "bf16": {"enabled": True}}
    model, optimizer = compile_muon.initialize(model, {**config, "zero_optimization": {"stage": stage}})
    for step in range(30):
        made = model(batch(step, dist.get_rank() if dist.is_initialized() else 0).bfloat16())
        (made.float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = [param for param in model.parameters() if param.requires_grad]
    assert model[0]._parameters["bias"].dtype is frozen.dtype
    state = {str(v.dtype) for slots in optimizer.state.values() for k, v in slots.items() if k != "step"}
    moved = float((full(model[1]._parameters["weight"].detach().float()) - 1).abs().mean())
    return {str(param.dtype) for param in trained}, state, str(made.dtype), moved


@pytest.mark.parametrize(("world", "stage", "dtype"), [(1, 2, "float32"), (2, 3, "bfloat16")])
def test_masters_are_float32_whatever_the_model_is_in(
    ranks: Callable[[int], Ranks], world: int, stage: int, dtype: str
) -> None:
    for params, state, made, moved in ranks(world).run(masters, stage=stage, settings={}, dtype=dtype):
        assert params == state == {"torch.float32"} and made == "torch.bfloat16"
        assert 1e-4 < moved < 3.1e-4  # 30 steps of at most 1e-5


def test_half_masters_are_told_by_name(ranks: Callable[[int], Ranks]) -> None:
    with pytest.warns(UserWarning, match=r"optimizer state of 0.weight, 1.weight, .* are bfloat16 \(master_dtype\)"):
        ((params, state, _, moved),) = ranks(1).run(
            masters, stage=2, settings={"master_dtype": "bf16"}, dtype="float32"
        )
    assert params == state == {"torch.bfloat16"} and moved == 0


# -------------------------------------------------------------------------------------------- not everything goes along


def type_of(model: Any) -> None:
    made = type(model.down)(3, 4)
    assert type(made) is nn.Linear and made.weight.shape == (4, 3)


def misuse() -> dict[str, str]:
    said = {}
    misuses: dict[str, Callable[[Any], Any]] = {
        "save": lambda model: torch.save(model, "/dev/null"),
        "script": torch.jit.script,
        "trace": lambda model: torch.jit.trace(model, EVERYONE),
        "again": lambda model: compile_muon.initialize(model, {}),
        "ddp": nn.parallel.DistributedDataParallel,
        "type": type_of,
        "copy": lambda model: copy.copy(model.down)(torch.zeros(2, 1)),
    }
    for name, act in misuses.items():
        model, _ = sharded(3)
        try:
            act(model)
            said[name] = "no error"
        except compile_muon.UnsupportedModelError as error:
            said[name] = str(error)
    return said


def test_what_a_sharded_model_cannot_do_says_so_in_a_sentence(ranks: Callable[[int], Ranks]) -> None:
    for said in ranks(2).run(misuse):
        assert "cannot be pickled (torch.save(model), spawned processes); save weights with" in said["save"]
        assert "cannot be compiled by torch.jit" in said["script"] and "cannot be traced by torch.jit" in said["trace"]
        assert "is sharded by a MuonZero already; go on with that optimizer" in said["again"]
        assert "DistributedDataParallel: the model is sharded by MuonZero" in said["ddp"]
        assert said["type"] == said["copy"] == "no error"


# -------------------------------------------------------------------------------------------------- inference mode


def evaluated_under(stage: int, mode: Any, compiled: bool) -> list[Any]:
    """Evaluations under ``mode`` before, between and after steps: what they saw, and what training made of it."""
    model, optimizer = sharded(stage)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    seen: list[Any] = []
    for step in range(STEPS):
        with mode():
            seen.append(run(EVERYONE))
            if step:
                state = {name: full(value) + 0.1 for name, value in model.state_dict().items()}
                model.load_state_dict({k: v for k, v in state.items() if not k.startswith("norm")}, strict=False)
                seen += [run(EVERYONE), copy.deepcopy(model)(EVERYONE)]  # resident copies were refreshed inside
        model.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
        run(batch(step, world_and_rank()[1])).square().mean().backward()
        with mode():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            twin = copy.deepcopy(model)
        with torch.no_grad():
            for param in twin.parameters():
                param.mul_(2)  # an edit of a copy that was made inside counts
        seen += [full(param.detach()).clone() for param in model.parameters()]
        seen.append(twin(EVERYONE).detach())
    return [value.clone() for value in seen]


def inference(cases: list[tuple[int, bool]]) -> None:
    for stage, compiled in cases:
        found = evaluated_under(stage, torch.inference_mode, compiled)
        expected = evaluated_under(stage, torch.no_grad, compiled)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (stage, compiled)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [(1, False), (3, False)]),
        pytest.param(1, [(2, True)], marks=pytest.mark.full),
        pytest.param(2, [(0, False), (3, True)], marks=pytest.mark.full),
    ],
)
def test_evaluation_and_steps_inside_inference_mode_are_those_of_no_grad(
    ranks: Callable[[int], Ranks], world: int, cases: list[tuple[int, bool]]
) -> None:
    ranks(world).run(inference, cases=cases)
