"""Who holds a parameter beside the model: as it was before it was sharded, or in an optimizer of its own."""

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.harness import RanksOf, on_ranks
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import compile_muon
from compile_muon.engine.other_holders import watched

X = torch.ones(2, 6)


class Net(nn.Module):
    """Reads ``b.weight`` by another way than the module that has it."""

    def __init__(self, keep: Callable[[nn.Parameter], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.kept = None if keep is None else keep(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        return self.head(self.b(x) if self.kept is None else self.kept(x))


KEPT: dict[str, Callable[[nn.Parameter], Callable[[torch.Tensor], torch.Tensor]]] = {
    "a list": lambda w: (lambda held: lambda x: F.linear(x, held[0]))([w]),
    "a dict": lambda w: (lambda held: lambda x: F.linear(x, held["w"]))({"w": w}),
    "a closure": lambda w: lambda x: F.linear(x, w),
    "a partial": lambda w: functools.partial(F.linear, weight=w),
    "an object": lambda w: (lambda held: lambda x: x @ held.weight.t())(SimpleNamespace(weight=w)),
    "a view": lambda w: (lambda view: lambda x: x @ view)(w.t()),
}


def said_of(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@on_ranks(2)
def test_a_second_reference_to_a_weight_is_refused_by_name() -> None:
    for stage in (0, 3):
        for how, keep in KEPT.items():
            for compiled in (False, True) if how == "a view" else (False,):
                model = Net(keep)
                compile_muon.MuonZero(model, stage=stage)
                run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
                text = said_of(lambda run=run: run(X).square().mean().backward())
                # Dynamo puts its own error around one of a backend.
                assert "UnsupportedModelError" in text or "BackendCompilerFailed" in text, (stage, how, compiled)
                assert "b.weight: " in text and "from model.parameters() anew" in text, (stage, how, compiled)
                torch._dynamo.reset()


@on_ranks(2)
def test_lists_from_before_sharding_are_refused() -> None:
    """As loops have them; then loops that take theirs afterwards."""
    said: dict[str, str] = {}
    for stage in (0, 3):
        model = Net()
        before = list(model.parameters())
        values = [param.detach().clone() for param in before]
        other = torch.optim.AdamW(before)
        optimizer = compile_muon.MuonZero(model, stage=stage)
        model(X).square().mean().backward()
        said[f"{stage} clip"] = said_of(lambda before=before: torch.nn.utils.clip_grad_norm_(before, 1.0))
        said[f"{stage} zero_grad"] = said_of(other.zero_grad)
        said[f"{stage} step"] = said_of(other.step)
        said[f"{stage} write"] = said_of(torch.no_grad()(lambda before=before: before[0].copy_(torch.ones(8, 6))))
        said[f"{stage} average"] = said_of(
            lambda values=values, before=before: [v.lerp(p, 0.1) for v, p in zip(values, before, strict=True)]
        )
        said[f"{stage} count"] = said_of(lambda before=before: sum(param.numel() for param in before))
        said[f"{stage} copy"] = said_of(lambda before=before: copy.deepcopy(before))
        optimizer.step()
    for what, text in said.items():
        assert text.startswith("UnsupportedModelError: a.weight: "), (what, text)
        assert "as it was before MuonZero sharded it" in text and "from model.parameters() anew" in text, (what, text)


def test_one_process_shares_its_parameters_with_lists_from_before() -> None:
    model = Net(KEPT["a list"])
    before = list(model.parameters())
    optimizer = compile_muon.MuonZero(model)
    model(X).square().mean().backward()
    assert torch.nn.utils.clip_grad_norm_(before, 1e-3) > 1e-3
    assert torch.nn.utils.clip_grad_norm_(before, 1e-3) < 2e-3
    optimizer.step()
    assert all(param is mine for param, mine in zip(before, model.parameters(), strict=True))


def beside(stage: int = 0) -> str:
    model = Net()
    optimizer = compile_muon.MuonZero(model, stage=stage)
    named = dict(model.named_parameters())
    rest = torch.optim.AdamW([named["head.weight"], named["head.bias"]])
    before = [getattr(param, "_local_tensor", param).detach().clone() for param in model.parameters()]
    model(X).square().mean().backward()
    said = said_of(rest.step)
    after = [getattr(param, "_local_tensor", param) for param in model.parameters()]
    assert all(map(torch.equal, before, after))
    optimizer.step()
    return said


def test_an_optimizer_beside_ours_is_refused_where_it_steps(ranks: RanksOf) -> None:
    for said in (beside(), *ranks(2).run(beside, stage=3)):
        assert said.startswith("UnsupportedModelError: head.weight, head.bias: AdamW steps what MuonZero trains")


class Wrapper(torch.optim.Optimizer):
    """Has the groups of another, or just the other itself, and hands the step on."""

    def __init__(self, inner: torch.optim.Optimizer, *, groups: bool) -> None:
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})
        self.inner = [inner]
        if groups:
            self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        (self.inner[0] if isinstance(self.inner, list) else self.inner).step()


@pytest.mark.parametrize("groups", [True, False])
def test_wrappers_step_ours(groups: bool) -> None:
    model = Net()
    wrapper = Wrapper(compile_muon.MuonZero(model), groups=groups)
    before = dict(model.named_parameters())["a.weight"].detach().clone()
    model(X).square().mean().backward()
    wrapper.step()
    assert not torch.equal(dict(model.named_parameters())["a.weight"], before)


def test_an_optimizer_of_another_model_steps_as_ever() -> None:
    """And nothing of ours is asked any more once it is gone."""
    gc.collect()
    living = len(watched())
    hooks = len(_global_optimizer_pre_hooks)  # which must not change while PyTorch runs through them
    first, second = Net(), Net()
    optimizer, other = compile_muon.MuonZero(first), torch.optim.AdamW(second.parameters())
    for model in (first, second):
        model(X).square().mean().backward()
    optimizer.step()
    other.step()
    del model, first, optimizer
    gc.collect()
    assert len(watched()) == living and len(_global_optimizer_pre_hooks) == hooks


def gradients_from_before(stage: int = 0) -> tuple[list[str], bool]:
    model = Net()
    model(X).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile_muon.MuonZero(model, stage=stage)
    return [str(each.message) for each in caught], all(param.grad is None for param in model.parameters())


def test_gradients_from_before_are_dropped_and_told(ranks: RanksOf) -> None:
    for everywhere in ([gradients_from_before()], ranks(2).run(gradients_from_before, stage=3)):
        assert all(dropped for _, dropped in everywhere)
        # Rank 0 tells it for all.
        assert any("from a backward before MuonZero are dropped" in text for text in everywhere[0][0])
