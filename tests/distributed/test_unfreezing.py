"""Parameters that are frozen at first: trained later as if their gradient had been dropped until then, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness import RankError
from support.reference import full, world_and_rank
from support.zoo import Uneven
from torch import Tensor

import compile_muon
from compile_muon import PeerError, UnsupportedModelError

STEPS, UNTIL = 4, 2
LATER = ("up.weight", "up.bias", "thin.weight", "head.weight")


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def built(*, frozen: bool, stage: int, **settings: Any) -> tuple[Any, compile_muon.MuonZero]:
    torch.manual_seed(0)
    model = Uneven()
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_(name not in LATER)
    return model, compile_muon.MuonZero(model, stage=stage, adamw_lr=0.01, ns_dtype="float32", **settings)


def unfreeze(model: Any, names: tuple[str, ...] = LATER) -> None:
    for name, param in model.named_parameters():
        if name in names:
            param.requires_grad_(True)


def losses(*, frozen: bool, stage: int, compiled: bool, **settings: Any) -> list[Tensor]:
    rank = world_and_rank()[1]
    model, optimizer = built(frozen=frozen, stage=stage, **settings)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    for step in range(STEPS):
        if frozen and step == UNTIL:
            unfreeze(model)
        run(batch(step, rank)).square().mean().backward()
        if not frozen and step < UNTIL:
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
def test_trained_later_as_if_its_gradient_had_been_dropped(ranks, stage, compiled, settings) -> None:  # type: ignore[no-untyped-def]
    late = ranks(2).run(losses, frozen=True, stage=stage, compiled=compiled, **settings)
    # What is unfrozen stays on the device, in full precision: compared with a run in which all does.
    plain = {key: value for key, value in settings.items() if key not in ("offload", "momentum_dtype")}
    dropped = ranks(2).run(losses, frozen=False, stage=stage, compiled=compiled, **{**plain, "update": "step"})
    lossy = "momentum_dtype" in settings
    for one, other in zip(late[0], dropped[0], strict=True):
        assert torch.allclose(one, other, atol=2e-2) if lossy else torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(late[0], late[1], strict=True))


def one_rank_alone(names: tuple[tuple[str, ...], ...]) -> tuple[str, str]:
    rank = world_and_rank()[1]
    model, optimizer = built(frozen=True, stage=2)
    unfreeze(model, names[rank])
    try:
        optimizer.step()
    except (PeerError, UnsupportedModelError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_ranks_that_unfreeze_otherwise_are_told(ranks) -> None:  # type: ignore[no-untyped-def]
    for kind, said in ranks(2).run(one_rank_alone, names=(("up.weight",), ("up.bias",))):
        assert kind == "UnsupportedModelError"
        assert "unfrozen otherwise: up.weight on rank 0, up.bias on rank 1" in said


def unfrozen_alone() -> None:
    model, optimizer = built(frozen=True, stage=2)
    if world_and_rank()[1] == 0:
        unfreeze(model)
    optimizer.step()


def test_a_rank_that_unfreezes_alone_is_told(ranks) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RankError, match=r"PeerError: this rank trains what was frozen .*: unfreeze it on"):
        ranks(2).run(unfrozen_alone)
