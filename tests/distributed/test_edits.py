"""What loops do with parameters between steps: edits, unfreezing and numbers that are read are right, or refused."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from support.harness import RankError, RanksOf, on_ranks
from support.reference import full, refusal, train_step, world_and_rank
from support.zoo import Uneven
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_muon

STEPS = 2


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


EVERYONE = batch(9, 9)


def net() -> Uneven:
    torch.manual_seed(0)
    return Uneven().eval()


def sharded(stage: int, model: nn.Module | None = None, **settings: Any) -> tuple[Any, compile_muon.MuonZero]:
    model = net() if model is None else model
    return model, compile_muon.MuonZero(model, stage=stage, adamw_lr=0.01, ns_dtype="float32", **settings)


def each(edit: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda model, params, values: [edit(*pair) for pair in zip(params, values, strict=True)]


def foreach_of_a_state_dict(model: Any, params: Sequence[Any], values: Sequence[Any]) -> None:
    """timm's ``ModelEmaV3``, between two models of equal layout."""
    named = dict(zip((name for name, _ in model.named_parameters()), values, strict=True))
    state = {name: value for name, value in model.state_dict().items() if name in named}
    torch._foreach_lerp_(list(state.values()), [named[name] for name in state], 1.0)


#: ways to write values to the parameters of a model; those of :data:`SHORT` are the three of PyTorch to see no edit
SWAPS: dict[str, Callable[..., Any]] = {
    "counted": each(lambda param, value: param.copy_(value)),
    # diffusers' `EMAModel.copy_to()` and `restore()`
    "data": each(lambda param, value: param.data.copy_(value.to(param.device).data)),
    "assigned": each(lambda param, value: setattr(param, "data", value.clone())),
    "foreach": lambda model, params, values: torch._foreach_lerp_(list(params), list(values), 1.0),
    "foreach_of_a_state_dict": foreach_of_a_state_dict,
    "shards": each(
        lambda param, value: getattr(param, "to_local", lambda: param)().copy_(getattr(value, "_local_tensor", value))
    ),
}
SHORT = ["data", "foreach", "shards"]


def training(stage: int, swap: str, *, compiled: bool = False, plain: bool = False) -> list[float]:
    """Store, swap an average in, evaluate, swap back, train on; what evaluations and trainings saw, all ranks' mean."""
    world, rank = world_and_rank()
    model, optimizer = sharded(stage)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    average = [param.detach().clone() for param in model.parameters()]
    seen: list[float] = []
    for step in range(STEPS):
        losses = [run(batch(step, r)).square().mean() for r in (range(2) if plain else [rank])]
        train_step(optimizer, sum(losses) / len(losses))
        with torch.no_grad():
            params = list(model.parameters())
            for value, param in zip(average, params, strict=True):
                value.lerp_(param, 0.3)
            stored = [param.detach().clone() for param in params]
            SWAPS[swap](model, params, average)
            seen.append(run(EVERYONE).square().mean().item())
            SWAPS[swap](model, params, stored)
            seen.append(run(EVERYONE).square().mean().item())
    seen.append(sum(float(full(param.detach()).square().sum()) for param in model.parameters()))
    return seen


def trainings(stage: int, swaps: list[str], compiled: bool) -> dict[str, list[float]]:
    found = {swap: training(stage, swap) for swap in swaps}
    return found | ({"compiled": training(stage, "data", compiled=True)} if compiled else {})


@pytest.mark.parametrize(
    ("stage", "swaps", "compiled"),
    [
        (1, SHORT, False),
        (3, SHORT[:2], False),
        *(pytest.param(s, [*SWAPS], True, marks=pytest.mark.full) for s in (1, 3)),
    ],
)
def test_an_average_that_is_swapped_in_is_what_every_rank_evaluates(
    ranks: RanksOf, stage: int, swaps: list[str], compiled: bool
) -> None:
    expected = training(0, "counted", plain=True)
    for found in ranks(2).run(trainings, stage=stage, swaps=swaps, compiled=compiled):
        assert len(found) == len(swaps) + compiled
        for how, seen in found.items():
            assert seen == pytest.approx(expected, rel=2e-5), how


@on_ranks(2)
def test_ranks_that_read_after_different_edits_are_told() -> None:
    model, _ = sharded(1)
    with torch.no_grad():
        for _ in range(1 + dist.get_rank()):
            for param in model.parameters():
                param.data.mul_(2)
        said = refusal(model, EVERYONE)
    assert "ranks read the weight after different numbers of edits (1 on rank 0, 2 on rank 1 of" in said


@on_ranks(2)
def test_data_takes_a_whole_tensor_or_says_what_does_not_fit() -> None:
    model, _ = sharded(3)
    param = next(iter(model.parameters()))
    for value in (torch.zeros(3), param.detach().double()):
        with pytest.raises(compile_muon.UnsupportedModelError, match=r"a sharded parameter stays torch\.float32 \["):
            param.data = value
    whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(3))
    param.data = whole
    assert torch.equal(full(next(iter(model.parameters())).detach()), whole)


@on_ranks(2)
def test_a_penalty_of_the_parameters_meets_the_loss() -> None:
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
    distance = max(float((g - p.grad).abs().max()) for g, p in zip(grads, plain.parameters(), strict=True))
    assert distance < 1e-6
    assert abs(float(full(loss.detach())) - float(expected)) < 1e-5  # a DTensor's loss is that of all ranks


WAYS: dict[str, Callable[[Any], Any]] = {
    "init": lambda module: nn.init.constant_(module.weight, 0.5),
    "data": lambda module: module.weight.data.mul_(2),
    "assigned": lambda module: setattr(module.weight, "data", module.weight.detach() + 1),
    "foreach": lambda module: torch._foreach_add_(list(module.parameters()), 1.0),
    "apply": lambda module: module.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None),
    "frozen": lambda module: module.weight.requires_grad_(False).add_(1.0),
}


@pytest.mark.parametrize("stage", [0, 3, pytest.param(1, marks=pytest.mark.full)])
@on_ranks(2)
def test_an_attribute_outside_forward_is_the_parameter(stage: int) -> None:
    for way, edit in WAYS.items():
        (model, optimizer), plain = sharded(stage), net()
        model(EVERYONE)
        params = dict(model.named_parameters())
        assert model.up.weight is params["up.weight"] and model.tied.weight is model.head.weight
        model.up.weight = model.up.weight
        with torch.no_grad():
            edit(model.up)
            edit(plain.up)
            torch.testing.assert_close(model(EVERYONE), plain(EVERYONE), msg=way)
        assert torch.equal(full(model.state_dict()["up.weight"].detach()), plain.up.weight), way
        loss, expected = (each(EVERYONE).square().mean() for each in (model, plain))
        found, wanted = torch.autograd.grad(loss, model.head.weight), torch.autograd.grad(expected, plain.head.weight)
        torch.testing.assert_close(full(found[0]), wanted[0])
        model(EVERYONE).square().mean().backward(inputs=[model.head.weight])
        torch.testing.assert_close(full(model.head.weight.grad), wanted[0])
        assert model.down.weight.grad is None
        optimizer.step()


class Chunked(Uneven):
    """Returns what goes into its head, for a loss in chunks; its own forward runs the head again in backward."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.up(x) @ self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: h @ self.head.weight, self.hidden(x), use_reentrant=False)


@pytest.mark.parametrize("stage", [0, 3, pytest.param(1, marks=pytest.mark.full)])
@on_ranks(2)
def test_whole_weights_outside_forward_are_asked_for(stage: int) -> None:
    """A loss of whole weights outside forward has the gradients of all ranks; a shard says that it is none."""
    _, rank = world_and_rank()
    torch.manual_seed(0)
    plain, model = Chunked(), Chunked()
    model.load_state_dict(plain.state_dict())
    compile_muon.MuonZero(model, stage=stage)
    said = []
    for wrong in (lambda: model.hidden(EVERYONE), lambda: EVERYONE @ model.head.weight):
        with pytest.raises(compile_muon.UnsupportedModelError) as caught:
            wrong()
        said.append(str(caught.value))
    compile_muon.forward_methods(model, "hidden")
    for loss in (model.hidden(batch(0, rank)) @ model.head.weight.full_tensor(), model(batch(0, rank))):
        (loss.square().mean() / 2).backward()  # half of it by each
    losses = [(plain.hidden(batch(0, r)) @ plain.head.weight).square().mean() for r in range(2)]
    (sum(losses) / 2).backward()
    for name in ("up", "head"):
        found, expected = getattr(model, name).weight.grad, getattr(plain, name).weight.grad
        torch.testing.assert_close(full(found), expected)
    method, product = said[0], said[1]
    assert "up." in method and "compile_muon.forward_methods(model, name)" in method
    assert product.startswith("head.weight: a shard meets a plain tensor in mm.default; weights are whole")
    assert ".full_tensor(), on every rank" in product


def evaluates_by_turns(alone: bool) -> int:
    """Evaluations and trainings, on all ranks or of the first ``alone``; how often ranks meet to change over."""
    model, optimizer = sharded(3)
    for step in range(2):
        train_step(optimizer, model(batch(step, dist.get_rank())).square().mean())
        with torch.no_grad():
            for _ in range(0 if alone and dist.get_rank() else 5):
                model(EVERYONE)
    return optimizer.engine.ledger.status.changes


def test_a_rank_that_evaluates_alone_at_stage_3_is_told_before_it_gets_a_number(ranks: RanksOf) -> None:
    first, _ = ranks(2).outcomes(evaluates_by_turns, alone=True, grace=0.5)
    assert first.value is None and first.failure is not None
    told = "PeerError: this rank changes over from training to evaluation, and at stage 3 weights are gathered"
    assert told in first.failure and "wait in step 2, an eager read (up)" in first.failure


def test_ranks_that_evaluate_together_meet_once_a_turn(ranks: RanksOf) -> None:
    assert ranks(2).run(evaluates_by_turns, alone=False) == [3, 3]


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
        train_step(optimizer, (made.float() ** 2).mean())
    trained = [param for param in model.parameters() if param.requires_grad]
    assert model[0]._parameters["bias"].dtype is frozen.dtype
    state = {str(v.dtype) for slots in optimizer.state.values() for k, v in slots.items() if k != "step"}
    moved = float((full(model[1]._parameters["weight"].detach().float()) - 1).abs().mean())
    return {str(param.dtype) for param in trained}, state, str(made.dtype), moved


@pytest.mark.parametrize(("world", "stage", "dtype"), [(1, 2, "float32"), (2, 3, "bfloat16")])
def test_masters_are_float32_whatever_the_model_is_in(ranks: RanksOf, world: int, stage: int, dtype: str) -> None:
    for params, state, made, moved in ranks(world).run(masters, stage=stage, settings={}, dtype=dtype):
        assert params == state == {"torch.float32"} and made == "torch.bfloat16"
        assert 1e-4 < moved < 3.1e-4  # 30 steps of at most 1e-5


def test_half_masters_are_told_by_name(ranks: RanksOf) -> None:
    with pytest.warns(UserWarning, match=r"optimizer state of 0.weight, 1.weight, .* are bfloat16 \(master_dtype\)"):
        ((params, state, _, moved),) = ranks(1).run(
            masters, stage=2, settings={"master_dtype": "bf16"}, dtype="float32"
        )
    assert params == state == {"torch.bfloat16"} and moved == 0


def type_of(model: Any) -> None:
    made = type(model.down)(3, 4)
    assert type(made) is nn.Linear and made.weight.shape == (4, 3)


@on_ranks(2)
def test_what_a_sharded_model_cannot_do_says_so_in_a_sentence() -> None:
    misuses: dict[str, Callable[[Any], Any]] = {
        "save": lambda model: torch.save(model, "/dev/null"),
        "again": lambda model: compile_muon.initialize(model, {}),
        "ddp": nn.parallel.DistributedDataParallel,
        "type": type_of,
        "copy": lambda model: copy.copy(model.down)(torch.zeros(2, 1)),
    }
    sharded_ones = {name: sharded(3) for name in misuses}
    said = {name: refusal(functools.partial(act, sharded_ones[name][0])) for name, act in misuses.items()}
    assert "cannot be pickled (torch.save(model), spawned processes); save weights with" in said["save"]
    assert "is sharded by a MuonZero already; go on with that optimizer" in said["again"]
    assert "DistributedDataParallel: the model is sharded by MuonZero" in said["ddp"]
    assert said["type"] == said["copy"] == ""


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


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [(1, False), (3, False)]),
        pytest.param(1, [(2, True)], marks=pytest.mark.full),
        pytest.param(2, [(0, False), (3, True)], marks=pytest.mark.full),
    ],
)
@on_ranks()
def test_evaluation_and_steps_inside_inference_mode_are_those_of_no_grad(cases: list[tuple[int, bool]]) -> None:
    for stage, compiled in cases:
        found = evaluated_under(stage, torch.inference_mode, compiled)
        expected = evaluated_under(stage, torch.no_grad, compiled)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (stage, compiled)


LATER = ("up.weight", "up.bias", "thin.weight", "head.weight")


def built(*, frozen: bool, stage: int, **settings: Any) -> tuple[Any, compile_muon.MuonZero]:
    model = net()
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_(name not in LATER)
    return sharded(stage, model, **settings)


def unfreeze(model: Any, names: tuple[str, ...] = LATER) -> None:
    for name, param in model.named_parameters():
        if name in names:
            param.requires_grad_(True)


def losses(*, frozen: bool, stage: int, compiled: bool, **settings: Any) -> list[Tensor]:
    rank = world_and_rank()[1]
    model, optimizer = built(frozen=frozen, stage=stage, **settings)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    for step in range(4):
        if frozen and step == 2:
            unfreeze(model)
        run(batch(step, rank)).square().mean().backward()
        if not frozen and step < 2:
            for name, param in model.named_parameters():
                if name in LATER:
                    param.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return [full(param.detach()) for param in model.parameters()]


@pytest.mark.parametrize(
    ("stage", "compiled", "settings"),
    [
        (1, False, {}),
        (2, False, {"method": "normuon", "offload": "cpu", "momentum_dtype": "bfloat16"}),
        pytest.param(3, True, {"update": "backward"}, marks=pytest.mark.full),
    ],
)
def test_trained_later_as_if_its_gradient_had_been_dropped(
    ranks: RanksOf, stage: int, compiled: bool, settings: dict[str, Any]
) -> None:
    late = ranks(2).run(losses, frozen=True, stage=stage, compiled=compiled, **settings)
    # What is unfrozen stays on the device, in full precision: compared with a run in which all does.
    plain = {key: value for key, value in settings.items() if key not in ("offload", "momentum_dtype")}
    dropped = ranks(2).run(losses, frozen=False, stage=stage, compiled=compiled, **{**plain, "update": "step"})
    lossy = "momentum_dtype" in settings
    for one, other in zip(late[0], dropped[0], strict=True):
        assert torch.allclose(one, other, atol=2e-2) if lossy else torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(late[0], late[1], strict=True))


@on_ranks(2)
def test_ranks_that_unfreeze_otherwise_are_told() -> None:
    model, optimizer = built(frozen=True, stage=2)
    unfreeze(model, (("up.weight",), ("up.bias",))[world_and_rank()[1]])
    assert "unfrozen otherwise: up.weight on rank 0, up.bias on rank 1" in refusal(optimizer.step)


def unfrozen_alone() -> None:
    model, optimizer = built(frozen=True, stage=2)
    if world_and_rank()[1] == 0:
        unfreeze(model)
    optimizer.step()


def test_a_rank_that_unfreezes_alone_is_told(ranks: RanksOf) -> None:
    with pytest.raises(RankError, match=r"PeerError: this rank trains what was frozen .*: unfreeze it on"):
        ranks(2).run(unfrozen_alone, grace=0.5)


def trained(stage: int) -> tuple[nn.Module, Tensor]:
    """After a backward, its loss with a penalty over parameters, as this rank has it."""
    model = net() if stage < 0 else sharded(stage)[0]
    world, rank = world_and_rank()
    inputs = [torch.randn(5, 6, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    seen = inputs if stage < 0 else [inputs[rank]]
    data = sum(model(x).square().mean() for x in seen) / len(seen)
    loss = data + 0.1 * sum(param.square().sum() for param in model.parameters())
    loss.backward()
    return model, loss


#: numbers of a matrix, of its gradient and of what came of them, as loops log them
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda p: p.norm(),
    "max": lambda p: p.max(),
    "std": lambda p: p.std(),
    "rms": lambda p: p.square().mean().sqrt(),
    "finite": lambda p: p.isfinite().all(),
    "zeros": lambda p: (p == 0).sum(),
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().cpu().numpy().item(),
    "float": float,
    "bool": bool,
    "format": lambda x: float(f"{x:.9g}"),
    "array": lambda x: numpy.asarray(x.detach()).item(),
}


def logged(stage: int) -> dict[str, tuple[Any, float]]:
    """What each read gives, or the error that it is, and the number of the whole."""
    model, loss = trained(stage)
    matrix = dict(model.named_parameters())["up.weight"]
    values = {"loss": loss.detach()} if stage else {}  # at stage 0 the loss is plain, of this rank's data
    values |= {name: number(matrix) for name, number in NUMBERS.items()}
    values |= {f"{name} of grad": number(matrix.grad) for name, number in NUMBERS.items()}
    found: dict[str, tuple[Any, float]] = {}
    for (name, value), (how, read) in itertools.product(values.items(), READS.items()):
        try:
            found[f"{name}, {how}"] = read(value), full(value).item()
        except compile_muon.MuonZeroError as error:
            found[f"{name}, {how}"] = str(error), full(value).item()
    return found


def norms(stage: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Of weights and of gradients, and how many collectives they took."""
    model, _ = trained(stage)
    if stage < 0:
        weights = {name: param.norm().item() for name, param in model.named_parameters()}
        return weights, {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}, 0
    with torch.profiler.profile() as profile:
        weights = compile_muon.parameter_norms(model)
    sent = [event for event in profile.events() if "all_reduce" in event.name or "allreduce" in event.name]
    return weights, compile_muon.parameter_norms(model, gradients=True), len({event.name for event in sent})


@pytest.mark.parametrize("stage", [0, 2])
def test_a_number_that_is_read_is_that_of_the_whole(ranks: RanksOf, stage: int) -> None:
    plain = {name: whole for name, (_, whole) in ranks(2).run(logged, stage=-1)[0].items()}
    for found in ranks(2).run(logged, stage=stage):
        refused = {name for name, (value, _) in found.items() if isinstance(value, str)}
        assert bool(refused) == (stage > 0)
        assert all(".full_tensor() first, on every rank" in found[name][0] for name in refused)
        for name, (value, whole) in found.items():
            assert whole == pytest.approx(plain[name], rel=1e-5, abs=1e-7), name
            number = bool(whole) if name.endswith("bool") else whole
            assert name in refused or float(value) == pytest.approx(float(number), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("stage", [0, 3])
def test_norms_of_all_parameters_are_whole(ranks: RanksOf, stage: int) -> None:
    expected = ranks(2).run(norms, stage=-1)[0]
    for weights, gradients, collectives in ranks(2).run(norms, stage=stage):
        assert weights == pytest.approx(expected[0], rel=1e-5)
        assert gradients == pytest.approx(expected[1], rel=1e-5)
        assert collectives <= 2  # one, under the names of the call and of the backend
