"""Edits of a part of a sharded tensor land or are refused by name; hooks run, and see what everybody else sees."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.harness import RanksOf, on_ranks
from support.reference import full, refusal, world_and_rank
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import compile_muon
from compile_muon import UnsupportedModelError


def swapped(x: Tensor) -> None:
    x[[0, 1]] = x[[1, 0]].clone()


def exchanged(x: Tensor) -> None:
    first = x[0].clone()
    x[0].copy_(x[3])
    x[3].copy_(first)


def assigned(x: Tensor) -> None:
    x[:2] = 0


def masked(x: Tensor) -> None:
    x[torch.arange(len(x)) > 1] = 0


#: of a matrix of 6 rows, in place
EDITS: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda x: x.mul_(0.5),
    "rows": lambda x: x[:2].zero_(),
    "rows of a second": lambda x: x[4:].mul_(0.5),
    "rows by name": lambda x: x.narrow(0, 0, 2).fill_(3.0),
    "rows by init": lambda x: nn.init.zeros_(x[:2]),
    "rows of a view": lambda x: x.view(-1)[:5].zero_(),
    "rows of a slice": lambda x: x[:4][:2].zero_(),
    "rows by list": lambda x: torch._foreach_mul_([x[:2], x[2:4]], 2.0),
    "rows onto others": lambda x: x[:2].copy_(x[2:4]),
    "columns": lambda x: x[:, -2:].add_(1.0),
    "columns of the transposed": lambda x: x.t()[-2:].add_(1.0),
    "rows of the transposed": lambda x: x.mT[:, :2].add_(1.0),
    "a row": lambda x: x[1].mul_(0.5),
    "a chunk": lambda x: x.chunk(2)[0].zero_(),
    "one of all rows": lambda x: x.unbind(0)[5].zero_(),
    "a diagonal": lambda x: x.diagonal().zero_(),
    "a filled diagonal": lambda x: x.fill_diagonal_(0.0),
    "an entry": lambda x: x[0, 0].fill_(7.0),
    "assigned": assigned,
    "masked": masked,
    "filled by a mask": lambda x: x.masked_fill_(torch.arange(6)[:, None] > 1, 0.0),
    "swapped": swapped,
    "exchanged": exchanged,
}
#: which of them land at every stage
LAND = ("all", "columns", "columns of the transposed")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_an_edit_of_a_part_lands_or_is_refused_by_name(stage: int) -> None:
    model = net()
    optimizer = compile_muon.MuonZero(model, stage=stage, ns_dtype="float32")
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(world_and_rank()[1]))).square().mean().backward()
    weight = model[0].weight
    tensors = {
        "0.weight": weight.data,
        "gradient of 0.weight": weight.grad,
        "momentum_buffer of 0.weight": optimizer.state[weight]["momentum_buffer"],
    }
    found = []
    for name, tensor in tensors.items():
        for about, edit in EDITS.items():
            before = full(tensor).clone()
            expected = before.clone()
            edit(expected)
            with torch.no_grad():
                said = refusal(edit, tensor)
            now = full(tensor)
            if not (name in said and torch.equal(now, before) if said else torch.equal(now, expected)):
                found.append(f"{name}, {about}: {said or now - expected}")
            if said and (about in LAND or stage == 0 and about in ("rows", "a row", "assigned")):
                found.append(f"{name}, {about}, is refused: {said}")
    assert not found, "\n".join(found)


def tripled(param: Tensor) -> None:
    param.grad.mul_(3)


def hooked(stage: int) -> dict[str, Any]:
    model, seen = net(), dict[str, Any]()

    def reads(grad: Tensor) -> None:
        seen["type"] = type(grad)
        try:
            seen["norm"] = grad.norm().item()
        except compile_muon.MuonZeroError as error:
            seen["refused"] = str(error)

    def edits(grad: Tensor) -> None:
        try:
            grad[:2].zero_()
            seen["zeroed"] = True
        except UnsupportedModelError as error:
            seen["slice"] = str(error)

    before = model[0].weight.register_hook(lambda grad: 2 * grad)
    removed = model[0].weight.register_hook(lambda grad: 1000 * grad)
    model[2].weight.register_post_accumulate_grad_hook(tripled)
    compile_muon.MuonZero(model, stage=stage, ns_dtype="float32")
    removed.remove()
    model[2].weight.register_hook(reads)
    model[2].bias.register_hook(lambda grad: grad / 2)
    if stage:
        model[0].weight.register_hook(edits)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    seen["grads"] = [full(p.grad) for p in model.parameters()]
    before.remove()
    model.zero_grad()
    model(x).square().mean().backward()
    seen["last"] = full(model[0].weight.grad)
    return seen


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 0), (2, 1), (2, 3)])
def test_hooks_from_before_sharding_run_and_see_gradients_as_all_do(ranks: RanksOf, world: int, stage: int) -> None:
    model = net()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    for seen in ranks(world).run(hooked, stage=stage):
        first = expected[0].clone()
        if world == 1:
            first[:2] = 0
        torch.testing.assert_close(seen["grads"], [2 * first, 3 * expected[1], expected[2] / 2])
        torch.testing.assert_close(seen["last"], first)
        if world == 1 or stage == 0:
            assert seen["norm"] == pytest.approx(expected[1].norm().item(), rel=1e-5)
        else:
            assert "norm().item()" not in seen and "call .full_tensor() first" in seen["refused"]
            assert seen["slice"].startswith("gradient of 0.weight: ")


class Normed(nn.Module):
    """With buffers, a number and rows that two ranks hold unevenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(self.norm(self.up(x)))


def pairs(stage: int) -> tuple[Normed, Normed]:
    """A sharded model and a plain one after a backward of the same batch."""
    model, plain = Normed(), Normed()
    compile_muon.MuonZero(model, stage=stage)
    for each in (model, plain):
        each(torch.randn(4, 5, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    return model, plain


def clip_by_units(parameters: Iterable[Tensor]) -> None:
    """Adaptive clipping as timm has it: each row's norm against that of its weights, a vector's as one."""
    for param in parameters:
        weight, grad = param.detach(), param.grad.detach()
        dims = tuple(range(1, weight.ndim))
        weights, norm = (x.norm(2.0, dim=dims, keepdim=True) if dims else x.norm(2.0) for x in (weight, grad))
        limit = weights.clamp_(min=1e-3).mul_(0.01)
        clipped = grad * (limit / norm.clamp(min=1e-6))
        grad.copy_(torch.where(norm < limit, grad, clipped))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_adaptive_clipping_and_averages_of_buffers_too_are_a_plain_models(stage: int) -> None:
    """Adaptive clipping; averages of weights and buffers in one list, and their way back."""
    model, plain = pairs(stage)
    averages = []
    for each in (model, plain):
        clip_by_units(each.parameters())
        average = AveragedModel(each, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.update_parameters(each)
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(3)
            each.norm.running_mean += 1
        average.update_parameters(each)
        averages.append(average.module)
        torch._foreach_copy_(
            [*(param.data for param in each.parameters()), each.norm.running_var],
            [*(param.data for param in average.module.parameters()), each.norm.running_mean],
        )
    for found, expected in [*zip(averages[0].state_dict().items(), averages[1].state_dict().items(), strict=True)]:
        torch.testing.assert_close(full(found[1]), expected[1], msg=found[0])
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad)
    for found, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(full(found), expected)


MASK = torch.tensor([[0.0]] * 7 + [[1.0]] * 2)
ALIKE = "distribute_tensor(mask, x.device_mesh, x.placements); copies and averages of weights begin behind MuonZero"
WHOLE = "compute with .full_tensor(), on every rank"
#: what is done -> what is said to it
NAMED: dict[str, tuple[Callable[[Normed], Any], str]] = {
    "a masked gradient": (lambda model: model.up.weight.grad * MASK, ALIKE),
    "a gradient masked in place": (lambda model: model.up.weight.grad.mul_(MASK), ALIKE),
    "a masked weight": (lambda model: model.up.weight.data.mul_(MASK), ALIKE),
    "an average of before": (lambda model: Normed().up.weight.detach() - model.up.weight, ALIKE),
    "an average of a number": (lambda model: torch.ones(()).sub_(torch.ones(()) - model.scale), ALIKE),
    "an average in lists": (lambda m: torch._foreach_sub([*Normed().parameters()], [*m.parameters()]), ALIKE),
    "a flat weight": (lambda model: model.up.weight.detach().reshape(-1), WHOLE),
    "finite entries": (lambda model: model.up.weight.grad[torch.isfinite(model.up.weight.grad)], WHOLE),
    "a histogram": (
        lambda model: model.up.bias.grad.histc(8, -1, 1).tolist(),
        "call .full_tensor() first, on every rank",
    ),
    "torch.export": (lambda model: torch.export.export(model, (torch.randn(4, 5),)), "copy.deepcopy(model) inside"),
    "torch.jit.trace": (lambda model: torch.jit.trace(model, (torch.randn(4, 5),)), "cannot be traced by torch.jit"),
    "torch.jit.script": (torch.jit.script, "cannot be compiled by torch.jit"),
}


@on_ranks(2)
def test_what_shards_do_not_is_named_with_the_way_to_do_it() -> None:
    model, _ = pairs(3)
    with torch.no_grad():
        said = {what: refusal(do, model) for what, (do, _) in NAMED.items()}
    assert not {what: said[what] for what, (_, remedy) in NAMED.items() if remedy not in said[what]}
    optimizer = compile_muon.MuonZero(model := Normed(), stage=3, weight_decay=0)
    weight = model.up.weight
    mask = distribute_tensor(MASK, weight.device_mesh, weight.placements)
    weight.register_hook(lambda grad: grad * mask)
    before = full(weight).clone()
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    assert (full(weight) != before).any(1).tolist() == [False] * 7 + [True] * 2
