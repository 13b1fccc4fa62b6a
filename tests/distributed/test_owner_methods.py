"""Methods that keep states at the owners of matrices, or have several graphs, beside what their papers say.

Gradients are multiples of 1/8 here, so that every world has the same to the bit: of a gram of less than full rank any
basis of the null space is one of eigenvectors, and which one comes out hangs on the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import books
import pytest
import torch
from harness import Ranks
from reference import DECAY, LR, MOMENTUM, full, newton_schulz, relative_error, world_and_rank
from torch import Tensor, nn

import compile_muon

SHAPES = {"wide": (6, 12), "tall": (13, 6), "square": (8, 8), "stack": (3, 6, 8), "vector": (5,)}
STEPS = 8
TOLERANCE = 1e-5


class Exact(nn.Module):
    """A loss that is linear in all parameters: its gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) / 4))

    def forward(self, *given: Tensor) -> Tensor:
        params = (self.wide, self.tall, self.square, self.stack, self.vector)
        return torch.stack([(param * own).sum() for param, own in zip(params, given, strict=True)]).sum()


def gradients(step: int) -> list[Tensor]:
    """Their means over the ranks."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(-16, 17, shape, generator=generator) / 8 for shape in SHAPES.values()]


def given(step: int) -> list[Tensor]:
    """This rank's, which differ."""
    world, rank = world_and_rank()
    return [own + own.sign() * (2 * rank - world + 1) for own in gradients(step)]


HEADS = {"square": {"heads": 4}, "wide": {"heads": 2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "soap": {"rates": {"basis_every": 3}},
    "muonbp": {"rates": {"period": 3, "block_lr_factor": 0.5}, "muon_views": HEADS},
    "dion2": {"rates": {"fraction": 0.4}},
}


def by_the_book(way: str, steps: int = STEPS) -> dict[str, Tensor]:
    found = {}
    for place, (name, weight) in enumerate(Exact().named_parameters()):
        if name == "vector":
            continue
        several = []
        for number, own in enumerate(weight.detach().unbind() if weight.ndim == 3 else [weight.detach()]):
            grads = [gradients(step)[place] for step in range(steps)]
            grads = [grad[number] for grad in grads] if weight.ndim == 3 else grads
            if way == "soap":
                several.append(books.soap(own, grads, lr=LR, decay=DECAY, every=3))
            elif way == "dion2":
                several.append(books.dion2(newton_schulz, own, grads, lr=LR, decay=DECAY, keep=MOMENTUM, fraction=0.4))
            else:
                blocks = HEADS.get(name, {"heads": 1})["heads"]
                factor = 0.5  # of what has one block, too
                several.append(
                    books.muonbp(newton_schulz, own, grads, lr=LR, decay=DECAY, momentum=MOMENTUM, period=3,
                                 factor=factor, blocks=blocks)
                )  # fmt: skip
        found[name] = torch.stack(several) if weight.ndim == 3 else several[0]
    return found


def made(way: str, **settings: Any) -> tuple[Exact, compile_muon.MuonZero]:
    model = Exact()
    given = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "ns_dtype": "float32", "method": way}
    return model, compile_muon.MuonZero(model, **{**given, **SETTINGS.get(way, {}), **settings})


def train(model: Exact, optimizer: compile_muon.MuonZero, steps: range, *, compiled: bool = False) -> dict[str, Tensor]:
    run: Any = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    for step in steps:
        run(*given(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(param).detach().clone() for name, param in model.named_parameters()}


def errors(way: str, compiled: bool = False, **settings: Any) -> dict[str, float]:
    found = train(*made(way, **settings), range(STEPS), compiled=compiled)
    return {name: relative_error(found[name], weight) for name, weight in by_the_book(way).items()}


def everywhere(way: str) -> dict[str, dict[str, float]]:
    found = {f"stage {stage}": errors(way, stage=stage, update="step") for stage in (0, 1, 2, 3)}
    found["compiled"] = errors(way, compiled=True, stage=3)
    found["skips"] = errors(way, stage=2, update="step", nonfinite="skip")
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("way", SETTINGS)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_a_method_is_what_its_paper_says(ranks: Callable[[int], Ranks], way: str, world: int) -> None:
    for found in ranks(world).run(everywhere, way=way):
        for case, own in found.items():
            assert all(error <= TOLERANCE for error in own.values()), (case, own)


def saved(folder: str, way: str, first: int, last: int, stage: int, whole: bool) -> dict[str, Tensor]:
    model, optimizer = made(way, stage=stage, update="step")
    checkpointer = compile_muon.Checkpointer(Path(folder))
    checkpointer.load(model, optimizer)
    weights = train(model, optimizer, range(first, last))
    checkpointer.save(last, model, optimizer)
    return weights


@pytest.mark.parametrize("way", SETTINGS)
def test_states_follow_their_matrices_to_other_owners(ranks: Callable[[int], Ranks], tmp_path: Path, way: str) -> None:
    folder = str(tmp_path)
    ranks(2).run(saved, folder=folder, way=way, first=0, last=3, stage=3, whole=False)
    ranks(1).run(saved, folder=folder, way=way, first=3, last=5, stage=2, whole=False)
    for found in ranks(4).run(saved, folder=folder, way=way, first=5, last=STEPS, stage=1, whole=False):
        for name, weight in by_the_book(way).items():
            assert relative_error(found[name], weight) <= TOLERANCE, name
