"""Checks read in the next step: a gradient that a graph has not made alone takes no direction, and accuses nobody."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.harness import on_ranks
from support.reference import world_and_rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_muon

EAGER = {"codegen": "eager"}
STEPS = 4


class Net(nn.Module):
    """One block that is compiled by itself and used three times, between two that are used once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.block, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        x = self.up(x).tanh()
        for _ in range(times):
            x = self.block(x).tanh()
        return self.head(x)


def batch(step: int, part: int) -> Tensor:
    seed = 100 * step + 10 * part + world_and_rank()[1]
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def a_block_thrice(model: Net, step: int) -> None:
    model(batch(step, 0), 3).square().mean().backward()


def recomputed(model: Net, step: int) -> None:
    first, second = (checkpoint(model, batch(step, part), use_reentrant=False) for part in range(2))
    (first.square().mean() - second.mean()).backward()


def hooks_that_replace(model: Net, step: int) -> None:
    loss = model(batch(step, 0)).square().mean()
    if step == 0:
        model.block.weight.register_hook(lambda grad: 2 * grad)
    loss.backward()


#: and whether some matrices take a direction of backward; what users do otherwise is among test_fuzz.py's actions
LOOPS: dict[Callable[[Net, int], None], bool] = {a_block_thrice: False, recomputed: False, hooks_that_replace: True}


def trained(stage: int, checks: str, loop: Callable[[Net, int], None]) -> tuple[list[Tensor], bool]:
    """Weights after all steps, and whether a direction of backward was used."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    settings: dict[str, Any] = {"update": "backward", "nonfinite": "skip", "ns_dtype": "float32"}
    optimizer = compile_muon.MuonZero(model, lr=0.1, stage=stage, checks=checks, **settings)
    whole: nn.Module = model.block if loop is a_block_thrice else model
    whole.compile(backend="muon_zero", options=EAGER)
    for step in range(STEPS):
        loop(model, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.metrics()  # reads the last step's checks
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [w.detach().clone() for w in weights], optimizer.totals()["directions_used"] > 0


@pytest.mark.parametrize(
    ("world", "stage"), [(1, 1), *(pytest.param(2, stage, marks=pytest.mark.full) for stage in (1, 3))]
)
@on_ranks()
def test_next_step_is_in_step_whoever_else_made_a_gradient(stage: int) -> None:
    for loop, uses in LOOPS.items():
        (expected, _), (weights, used) = (trained(stage, checks, loop) for checks in ("in_step", "next_step"))
        assert all(map(torch.equal, weights, expected)), loop.__name__
        assert used or not uses, loop.__name__
