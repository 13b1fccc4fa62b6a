"""Models nobody here wrote train like their unsharded selves: GPT-2, Llama and Mixtral of Hugging Face, a conv net."""

from typing import Any

import pytest
import torch
from support.harness import RanksOf, on_ranks
from support.reference import full, train, train_step, world_and_rank
from support.zoo import ZOO
from torch import Tensor, nn

from compile_muon import MuonZero

STEPS = 3


def train_model(name: str, **settings: Any) -> None:
    torch.manual_seed(0)
    entry = ZOO[name]
    model = entry.build()
    matrices = entry.matrices(model)
    train(model, matrices, entry.loss, entry.data, steps=STEPS, measure_noise=entry.noisy, **settings).check()


@pytest.mark.parametrize(
    ("name", "stage", "update", "micro"),
    [
        ("mixtral", 3, "auto", 2),
        pytest.param("gpt2", 2, "step", 2, marks=pytest.mark.full),
        pytest.param("llama", 3, "auto", 1, marks=pytest.mark.full),
        pytest.param("convnet", 1, "backward", 2, marks=pytest.mark.full),
    ],
)
@on_ranks(2)
def test_two_ranks(name: str, stage: int, update: str, micro: int) -> None:
    train_model(name, stage=stage, update=update, gradient_accumulation_steps=micro)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "stage"), [("gpt2", 3), ("llama", 1)])
@on_ranks(2)
def test_two_ranks_inductor(name: str, stage: int) -> None:
    train_model(name, stage=stage, codegen="inductor")


class Halves(nn.Module):
    """Two views of one tensor cross a graph break, as the images of LLaVA do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        left, right = h[:, :6], h[:, 6:]
        torch._dynamo.graph_break()
        return self.down(left.tanh() * right)


def weights_of_halves(stage: int, update: str, compiled: bool) -> tuple[list[Tensor], float]:
    torch.manual_seed(0)
    model: Any = Halves()
    optimizer = MuonZero(model, stage=stage, update=update, muon_params=["up.*", "down.*"], ns_dtype="float32")
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + world_and_rank()[1]))
        train_step(optimizer, run(x).square().mean())
    torch._dynamo.reset()
    return [full(param.detach()) for param in model.parameters()], optimizer.totals()["directions_used"]


def test_views_cross_a_graph_break(ranks: RanksOf) -> None:
    expected = ranks(2).run(weights_of_halves, stage=3, update="step", compiled=False)
    found = ranks(2).run(weights_of_halves, stage=3, update="backward", compiled=True)
    for (weights, used), (others, _) in zip(found, expected, strict=True):
        assert used == 4 and all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
