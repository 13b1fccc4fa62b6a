"""Edits of a part of a sharded tensor land or are refused by name; hooks run, and see what everybody else sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.harness import Ranks
from support.reference import full, world_and_rank
from torch import Tensor, nn

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


def edited(stage: int) -> list[str]:
    """What is wrong."""
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
            said = ""
            try:
                with torch.no_grad():
                    edit(tensor)
            except UnsupportedModelError as error:
                said = str(error)
            now = full(tensor)
            if not (name in said and torch.equal(now, before) if said else torch.equal(now, expected)):
                found.append(f"{name}, {about}: {said or now - expected}")
            if said and (about in LAND or stage == 0 and about in ("rows", "a row", "assigned")):
                found.append(f"{name}, {about}, is refused: {said}")
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_edit_of_a_part_lands_or_is_refused_by_name(ranks: Callable[[int], Ranks], stage: int) -> None:
    for found in ranks(2).run(edited, stage=stage):
        assert not found, "\n".join(found)


def tripled(param: Tensor) -> None:
    assert param.grad is not None
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
def test_hooks_from_before_sharding_run_and_see_gradients_as_all_do(
    ranks: Callable[[int], Ranks], world: int, stage: int
) -> None:
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
