"""What a loop prints of shards: whole numbers, or an error that says how to get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from support.harness import Ranks
from support.reference import full, world_and_rank
from support.zoo import Uneven
from torch import Tensor, nn

import compile_muon
from compile_muon import MuonZeroError


def net() -> Uneven:
    torch.manual_seed(0)
    return Uneven().eval()


def trained(stage: int) -> tuple[nn.Module, Tensor]:
    """After a backward, its loss with a penalty over parameters, as this rank has it."""
    model = net()
    if stage >= 0:
        compile_muon.MuonZero(model, stage=stage)
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
    "mean": lambda p: p.mean(),
    "max": lambda p: p.max(),
    "min": lambda p: p.min(),
    "std": lambda p: p.std(),
    "sum": lambda p: p.abs().sum(),
    "rms": lambda p: p.square().mean().sqrt(),
    "finite": lambda p: p.isfinite().all(),
    "zeros": lambda p: (p == 0).sum(),
    "large": lambda p: p.abs().amax() > 0.3,
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


def logged(stage: int) -> dict[str, Any]:
    """What each read gives, or the error that it is."""
    model, loss = trained(stage)
    matrix = dict(model.named_parameters())["up.weight"]
    found: dict[str, Any] = {}
    for what, tensor in (("weight", matrix), ("grad", matrix.grad)):
        assert tensor is not None
        for name, number in NUMBERS.items():
            value = number(tensor)
            found[f"{what} {name}, whole"] = full(value).item()
            for how, read in READS.items():
                try:
                    found[f"{what} {name}, {how}"] = read(value)
                except MuonZeroError as error:
                    found[f"{what} {name}, {how}"] = str(error)
    for how in ("item", "float", "format") if stage else ():  # at stage 0 the loss is plain, of this rank's data
        try:
            found[f"loss, {how}"] = READS[how](loss.detach())
        except MuonZeroError as error:
            found[f"loss, {how}"] = str(error)
    found["loss, whole"] = full(loss.detach()).item()
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_number_that_is_read_is_that_of_the_whole(ranks: Callable[[int], Ranks], stage: int) -> None:
    (whole, *_) = ranks(2).run(logged, stage=-1)
    for found in ranks(2).run(logged, stage=stage):
        assert stage == 0 or found.keys() == whole.keys()
        refused = 0
        for name, value in found.items():
            if stage == 0 and "loss" in name:
                continue
            if isinstance(value, str):
                assert ".full_tensor() first, on every rank" in value, name
                refused += 1
            else:
                assert value == pytest.approx(whole[name], rel=1e-5, abs=1e-7), name
        assert (refused > 30) == (stage > 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_of_all_parameters_are_whole(ranks: Callable[[int], Ranks], stage: int) -> None:
    expected = ranks(2).run(norms, stage=-1)[0]
    for weights, gradients, collectives in ranks(2).run(norms, stage=stage):
        assert weights == pytest.approx(expected[0], rel=1e-5)
        assert gradients == pytest.approx(expected[1], rel=1e-5)
        assert collectives <= 2  # one, under the names of the call and of the backend


def test_one_process_reads_as_ever() -> None:
    model, loss = trained(stage=3)
    assert isinstance(loss.item(), float)
    assert compile_muon.parameter_norms(model)["up.weight"] == pytest.approx(
        dict(model.named_parameters())["up.weight"].norm().item()
    )
