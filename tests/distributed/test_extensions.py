"""A feature is one file and one line: an average of the weights, that no file of the package knows of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.averages import DECAY, Averages
from support.harness import RanksOf
from support.reference import DEVICE, full, placed, refusal, train_step, world_and_rank
from support.zoo import Uneven
from torch import Tensor

import compile_muon
from compile_muon import Checkpointer, Extension


class Run:
    """A compiled model in training."""

    def __init__(self, stage: int, *extensions: Extension, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = Uneven().to(DEVICE)
        self.optimizer = compile_muon.MuonZero(
            self.model, stage=stage, muon_params=["up.weight", "down.weight"], extensions=extensions, **settings
        )
        self.forward = torch.compile(self.model, backend="muon_zero", options={"codegen": "eager"})

    def step(self, number: int) -> None:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * number + world_and_rank()[1]))
        train_step(self.optimizer, self.forward(placed(x)).square().mean())

    def weights(self) -> dict[str, Tensor]:
        return {name: full(param).detach().clone() for name, param in self.model.named_parameters()}

    def averages(self) -> dict[str, Tensor]:
        state = self.optimizer.state
        return {name: full(state[param]["average"]).clone() for name, param in self.model.named_parameters()}


def trained(stage: int, folder: str) -> dict[str, Any]:
    """The weights without averages, the averages by the definition, and what the extension has; saved."""
    plain = Run(stage)
    expected = plain.weights()
    for number in range(3):
        plain.step(number)
        expected = {name: expected[name].lerp(weight, 1 - DECAY) for name, weight in plain.weights().items()}
    run = Run(stage, Averages())
    before = run.optimizer.metrics()
    for number in range(3):
        run.step(number)
    Checkpointer(folder).save(3, run.model, run.optimizer)
    traffic = [each.optimizer.traffic for each in (plain, run)]
    return {
        "before": before,
        "metrics": run.optimizer.metrics(),
        "alike": all(torch.equal(weight, plain.weights()[name]) for name, weight in run.weights().items()),
        "sent": traffic[0] == traffic[1],
        "expected": expected,
        "found": run.averages(),
        "weights": run.weights(),
    }


@pytest.mark.full
def test_averages_are_kept_shown_and_resharded(ranks: RanksOf, tmp_path: Path) -> None:
    found, other = ranks(2).run(trained, stage=3, folder=str(tmp_path))
    assert found["alike"] and found["sent"]
    assert "average_distance" not in found["before"]
    squares = [(w - found["expected"][n]).double().square().sum() for n, w in found["weights"].items()]
    distance = float(torch.stack(squares).sum().sqrt())
    assert found["metrics"]["average_distance"] == pytest.approx(distance, rel=1e-5)
    assert found["metrics"] == other["metrics"]
    for name, expected in found["expected"].items():
        assert torch.equal(found["found"][name], expected) and torch.equal(other["found"][name], expected), name
        assert not torch.equal(expected, found["weights"][name])
    # on one rank, at another stage
    alone = Run(0, Averages())
    Checkpointer(tmp_path).load(alone.model, alone.optimizer)
    assert all(torch.equal(value, found["found"][name]) for name, value in alone.averages().items())
    kept = alone.averages()
    alone.step(3)
    for name, weight in alone.weights().items():
        assert torch.equal(alone.averages()[name], kept[name].lerp(weight, 1 - DECAY))
    assert alone.optimizer.metrics()["average_distance"] > 0


def spoiled(nonfinite: str) -> tuple[bool, str]:
    """One rank's part of one average is inf: whether all is as it was, and what is said."""
    run = Run(3, Averages(), nonfinite=nonfinite, checks="in_step")
    run.step(0)
    before = run.weights()
    if world_and_rank()[1] == 1:
        state: Any = run.optimizer.state[dict(run.model.named_parameters())["up.weight"]]["average"]
        state.to_local()[:1] = torch.inf
    said = refusal(run.step, 1)
    return all(torch.equal(weight, before[name]) for name, weight in run.weights().items()), said


def test_what_an_extension_finds_stops_the_step_on_all_ranks(ranks: RanksOf) -> None:
    for same, said in ranks(2).run(spoiled, nonfinite="error"):
        assert same and said.startswith("average of up.weight = inf or nan on rank 1: nothing was updated in step 2")
    assert all(same and not said for same, said in ranks(2).run(spoiled, nonfinite="skip"))
