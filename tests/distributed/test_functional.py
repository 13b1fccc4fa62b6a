"""Derivatives that are asked for by function: of other weights, of gradients, of single weights, by torch.func."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.harness import on_ranks
from support.reference import full, world_and_rank
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import compile_muon


class Net(nn.Module):
    """A layer that is used twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.head = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.mid(self.up(x).sin()).tanh()))


def batch(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def made(model: Any, stage: int, compiled: bool = False) -> tuple[compile_muon.MuonZero, Any]:
    optimizer = compile_muon.MuonZero(model, stage=stage, ns_dtype="float32")
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    return optimizer, run


def loss_of(model: Any, rank: int, params: Any = None) -> Tensor:
    x = batch(rank)
    out = model(x) if params is None else functional_call(model, params, (x,))
    return out.square().mean() + out.sin().mean()


def over_ranks(loss: Callable[[int], Tensor]) -> Tensor:
    world, _ = world_and_rank()
    return sum(loss(rank) for rank in range(world)) / world


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(full(found[name]), value, atol=1e-6, rtol=1e-4, msg=name)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda p: 1.5 * full(p) - 0.1 * full(p).square(),
    "computed": lambda p: 1.5 * p - 0.1 * p.square(),
    "whole leaf": lambda p: (1.5 * full(p.detach())).requires_grad_(),
    "leaf": lambda p: (1.5 * p.detach()).requires_grad_(),
    "teacher": lambda p: 1.5 * full(p.detach()),
}


def cases(*short: tuple[int, bool], full: tuple[tuple[int, bool], ...]) -> pytest.MarkDecorator:
    """Stages, and whether compiled."""
    params = [*short, *(pytest.param(*case, marks=pytest.mark.full) for case in full)]
    return pytest.mark.parametrize(("stage", "compiled"), params)


@cases((3, False), full=((0, False), (1, True)))
@on_ranks(2)
def test_functional_call_computes_with_what_it_is_given(stage: int, compiled: bool) -> None:
    _, rank = world_and_rank()
    for kind, of in OTHERS.items():
        model, plain, prefix = Net(), Net(), "_orig_mod." if compiled else ""
        optimizer, run = made(model, stage, compiled)
        run(batch(rank))
        params, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
        given, expected = ({name: of(p) for name, p in own.items()} for own in (params, theirs))
        each = lambda rank, expected=expected, plain=plain: loss_of(plain, rank, expected)  # noqa: E731
        want = each(rank) if kind == "whole leaf" else over_ranks(each)  # a plain tensor of this rank's own
        found = loss_of(run, rank, {prefix + name: value for name, value in given.items()})
        torch.testing.assert_close(found, loss_of(plain, rank, expected), atol=1e-6, rtol=1e-5)
        if kind != "teacher":
            want.backward()
            found.backward()
            ours, others = (given, expected) if "leaf" in kind else (params, theirs)
            same({n: p.grad for n, p in ours.items()}, {n: p.grad for n, p in others.items()})
        torch.testing.assert_close(run(batch(rank)), Net()(batch(rank)))  # the module has its own again
        optimizer.zero_grad()
    with pytest.raises(compile_muon.UnsupportedModelError, match=r"head\.bias: functional_call .* shape \[2\]"):
        functional_call(model, {"head.bias": torch.zeros(2)}, (batch(rank),))


def squares(values: Any) -> Any:
    return sum(value.square().sum() for value in values)


def penalty(loss: Any, params: dict[str, Any], again: Any) -> None:
    (loss + 0.5 * squares(torch.autograd.grad(loss, list(params.values()), create_graph=True))).backward()


def third_derivative(loss: Any, params: dict[str, Any], again: Any) -> None:
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    squares(torch.autograd.grad(squares(grads), list(params.values()), create_graph=True)).backward()


def of_grad_itself(loss: Any, params: dict[str, Any], again: Any) -> None:
    loss.backward(create_graph=True)
    grads = [p.grad for p in params.values()]
    for p, g in zip(params.values(), torch.autograd.grad(squares(grads), list(params.values())), strict=True):
        p.grad = g


def inner_step(loss: Any, params: dict[str, Any], again: Any) -> None:
    """MAML."""
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    again({name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}).backward()


@cases((2, False), full=((0, False), (3, False)))
@on_ranks(2)
def test_losses_of_gradients(stage: int, compiled: bool) -> None:
    _, rank = world_and_rank()
    for way in (penalty, third_derivative, of_grad_itself, inner_step):
        model, plain = Net(), Net()
        optimizer, run = made(model, stage, compiled)
        params = dict(model.named_parameters())
        way(loss_of(run, rank), params, lambda fast, run=run: loss_of(run, rank, fast))
        theirs = dict(plain.named_parameters())
        again = lambda fast, plain=plain: over_ranks(lambda rank: loss_of(plain, rank, fast))  # noqa: E731
        way(over_ranks(lambda rank, plain=plain: loss_of(plain, rank)), theirs, again)
        same({n: p.grad for n, p in params.items()}, {n: p.grad for n, p in theirs.items()})
        optimizer.step()


TRANSFORMS: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "grad": lambda model, x, _: grad(lambda x: model(x).square().sum())(x),
    "jvp": lambda model, x, _: jvp(model, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda model, x, _: jacrev(model)(x),
    "vmap": lambda model, x, _: vmap(grad(lambda x: model(x).sum()))(x),
    "of weights": lambda model, x, params: grad(lambda p: functional_call(model, p, (x,)).sum())(params)["up.bias"],
}


@cases((2, False), full=((0, False), (3, False)))
@on_ranks(2)
def test_transforms_of_torch_func(stage: int, compiled: bool) -> None:
    (_, rank), model = world_and_rank(), Net()
    optimizer, run = made(model, stage, compiled)
    params = {name: full(p.detach()) for name, p in model.named_parameters()}
    for name, transform in TRANSFORMS.items():
        expected = transform(Net(), batch(rank), params)
        torch.testing.assert_close(transform(run, batch(rank), params), expected, atol=1e-6, rtol=1e-4, msg=name)
    with pytest.raises(compile_muon.UnsupportedModelError, match=r"up\.\w+: a shard meets a plain tensor"):
        TRANSFORMS["of weights"](model, batch(rank), dict(model.named_parameters()))
    loss_of(model, rank).backward()
    optimizer.step()


#: what a forward adds to its loss, of its own parameters; what of them is read as an attribute is ``.own`` alone
DIRECT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "table": lambda net, h: (h @ net._parameters["own"]).sin().mean(),
    "table and attribute": lambda net, h: (h @ net._parameters["own"] @ net.own).mean(),
    "list and attribute": lambda net, h: (h @ dict(net.named_parameters())["own"] @ net.own).mean(),
    "penalty": lambda net, h: 0.1 * sum(p.square().sum() for p in net.parameters()) + (h @ net.own).mean(),
    "penalty alone": lambda net, h: 0.1 * sum(p.square().sum() for p in net.parameters()),
    "sizes": lambda net, h: (h @ net.own).mean() * sum(p.numel() for p in net.parameters()),
}
#: refused: a shard that meets data, and a loss of shards in a frame
_NAMED = {"table", "table and attribute", "list and attribute"}
_NAMED_IN_FRAMES = _NAMED | {"penalty", "penalty alone"}


class Direct(Net):
    """One that reads a parameter of its own as ``way`` says; tied."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.tied = way, nn.Linear(9, 9)
        self.tied.weight = self.mid.weight
        self.own = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.tied(self.mid(self.up(x).sin())))
        return h.square().mean() + DIRECT[self.way](self, h)


@cases((0, False), (3, False), full=((3, True),))
@on_ranks(2)
def test_reads_past_attributes_are_whole_or_named(stage: int, compiled: bool) -> None:
    _, rank = world_and_rank()
    for way in DIRECT:
        torch._dynamo.reset()
        model, plain = Direct(way), Direct(way)
        _, run = made(model, stage, compiled)
        try:
            run(batch(rank)).backward()
        except Exception as problem:
            named = _NAMED_IN_FRAMES if compiled else _NAMED
            assert way in named and (compiled or "a shard meets a plain tensor" in str(problem)), way
            continue
        over_ranks(lambda rank, plain=plain: plain(batch(rank))).backward()
        same(*({n: p.grad for n, p in each.named_parameters() if p.grad is not None} for each in (model, plain)))
