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


def two_forwards(model: Net, step: int) -> None:
    (model(batch(step, 0)).square().mean() + model(batch(step, 1)).abs().mean()).backward()


def a_block_thrice(model: Net, step: int) -> None:
    model(batch(step, 0), 3).square().mean().backward()


def visits_that_differ(model: Net, step: int) -> None:
    sum(model(batch(step, part)).square().mean() for part in range(1 + step % 2)).backward()


def a_penalty(model: Net, step: int) -> None:
    (model(batch(step, 0)).square().mean() + 0.1 * model.up.weight.square().sum()).backward()


def another_backward(model: Net, step: int) -> None:
    model(batch(step, 0)).square().mean().backward()
    if step % 2:
        model(batch(step, 1)).square().mean().backward()


def recomputed(model: Net, step: int) -> None:
    first, second = (checkpoint(model, batch(step, part), use_reentrant=False) for part in range(2))
    (first.square().mean() - second.mean()).backward()


def hooks_that_replace(model: Net, step: int) -> None:
    loss = model(batch(step, 0)).square().mean()
    if step == 0:
        model.block.weight.register_hook(lambda grad: 2 * grad)
    loss.backward()


def added_to_zeros(model: Net, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()
    two_forwards(model, step)


def plain(model: Net, step: int) -> None:
    model(batch(step, 0)).square().mean().backward()


#: and whether gradients are set to None between steps, which of all matrices take no direction of backward at last
LOOPS: dict[Callable[[Net, int], None], tuple[bool, bool]] = {
    two_forwards: (True, False),
    a_block_thrice: (True, False),
    visits_that_differ: (True, False),
    a_penalty: (True, True),
    another_backward: (True, True),
    recomputed: (True, False),
    hooks_that_replace: (True, True),
    added_to_zeros: (False, False),
    plain: (True, True),
}


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
        optimizer.zero_grad(set_to_none=LOOPS[loop][0])
    optimizer.metrics()  # reads the last step's checks
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [w.detach().clone() for w in weights], optimizer.totals()["directions_used"] > 0


@pytest.mark.parametrize(
    ("world", "stage", "loops"),
    [
        (1, 1, ["two_forwards", "a_block_thrice", "another_backward"]),
        (2, 3, ["visits_that_differ"]),
        *(pytest.param(*case, None, marks=pytest.mark.full) for case in ((1, 1), (2, 1), (2, 3))),
    ],
)
@on_ranks()
def test_next_step_is_in_step_whoever_else_made_a_gradient(stage: int, loops: list[str] | None) -> None:
    for loop, (_, uses) in LOOPS.items():
        if loops is None or loop.__name__ in loops:
            (expected, _), (weights, used) = (trained(stage, checks, loop) for checks in ("in_step", "next_step"))
            assert all(map(torch.equal, weights, expected)), loop.__name__
            assert used or not uses, loop.__name__
