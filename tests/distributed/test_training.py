"""Training equals training of the unsharded model: stages, updates, worlds, and every odd shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness import BACKEND, Ranks
from reference import DIRECTION_TOLERANCE, PARAMETER_TOLERANCE, Report, full, train, world_and_rank
from torch import Tensor, nn
from torch.nn import functional as F

import compile_muon

STEPS = 5
AXES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "update": ("backward", "step"),
    "gradient_accumulation_steps": (1, 2),
}
#: Each pair of values of two axes is in one of these.
PAIRWISE = (
    (0, "backward", 1),
    (0, "step", 2),
    (1, "backward", 2),
    (1, "step", 1),
    (2, "backward", 2),
    (2, "step", 1),
    (3, "backward", 1),
    (3, "step", 2),
)


class Odd(nn.Module):
    """Every kind of parameter that sharding along dim 0 can stumble over, in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.uneven = nn.Linear(8, 13)
        self.norm = nn.LayerNorm(13)
        self.even = nn.Linear(13, 8, bias=False)
        self.narrow = nn.Linear(8, 2)  # fewer rows than ranks in a world of 3
        self.widen = nn.Linear(2, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(2, 5, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(3, 8, 10) / 4)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.even(torch.relu(self.norm(self.uneven(self.embedding(tokens)))))
        h = h + self.widen(self.narrow(h)) * self.scale
        image = self.conv(torch.stack([h, h.flip(1)], dim=1))
        # each channel is used in its own way: with a plain mean its gradient would have rank 1, and the rest be noise
        h = h + sum(image[:, channel].roll(channel, -1).tanh() for channel in range(5)) / 5
        h = h + torch.einsum("btc,ecd->btd", h, self.experts)[..., :8].tanh()
        return self.head(h)


MATRICES = {
    "uneven.weight": (1, 13, 8),
    "even.weight": (1, 8, 13),
    "narrow.weight": (1, 2, 8),
    "widen.weight": (1, 8, 2),
    "conv.weight": (1, 5, 18),
    "experts": (3, 8, 10),
}


def data(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, 16, (4, 5), generator=generator)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train_odd(**settings: Any) -> Report:
    torch.manual_seed(0)
    return train(Odd(), MATRICES, loss, data, steps=STEPS, **settings)


def check(group: Ranks, **settings: Any) -> list[Report]:
    reports = group.run(train_odd, **settings)
    for rank, report in enumerate(reports):
        assert not report.problems(), f"rank {rank}: {report.problems()}"
    return reports


def cases(
    combinations: Iterable[tuple[Any, ...]],
    *,
    full: Iterable[tuple[Any, ...]] = (),
    campaign: Iterable[tuple[Any, ...]] = (),
) -> pytest.MarkDecorator:
    """Parametrize ``settings`` by combinations of the axes: of the default tier, of the full one, of campaigns."""
    marked = [(values, ()) for values in combinations]
    marked += [(values, (pytest.mark.full,)) for values in full]
    marked += [(values, (pytest.mark.campaign,)) for values in campaign]
    listed = [
        pytest.param(dict(zip(AXES, values, strict=True)), id="stage{}-{}-micro{}".format(*values), marks=marks)
        for values, marks in marked
    ]
    return pytest.mark.parametrize("settings", listed)


def test_pairwise_is_pairwise() -> None:
    for (i, left), (j, right) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(c[i], c[j]) for c in PAIRWISE} == set(itertools.product(left, right))


@pytest.mark.skipif(BACKEND != "nccl", reason="needs several ranks over NCCL, which can be captured")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_steps_that_are_replayed(ranks: Callable[[int], Ranks], stage: int) -> None:
    settings = {"codegen": "inductor", "cuda_graphs": True, "update": "backward", "checks": "next_step"}
    check(ranks(2), stage=stage, **settings)


@pytest.mark.campaign
@cases(itertools.product(*AXES.values()))
def test_two_ranks_in_every_combination(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    check(ranks(2), **settings)


# Two ranks by generated code below, four on meshes in test_meshes.py.
@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.campaign) for world in (2, 4))])
@cases(
    [given for given in PAIRWISE if given[1] == "step"],
    full=[(3, "backward", 1)],
    campaign=[given for given in PAIRWISE if given[1] == "backward" and given != (3, "backward", 1)],
)
def test_every_pair_of_settings(ranks: Callable[[int], Ranks], world: int, settings: dict[str, Any]) -> None:
    check(ranks(world), **settings)


@pytest.mark.parametrize("world", [1])
@cases(
    [given for given in PAIRWISE if given[0] == 2],
    campaign=[given for given in PAIRWISE if given[0] != 2],
)
def test_one_process(ranks: Callable[[int], Ranks], world: int, settings: dict[str, Any]) -> None:
    check(ranks(world), **settings)


@cases(
    (),
    full=((3, "backward", 2),),
    campaign=((1, "step", 2), (0, "backward", 2), (2, "step", 1)),
)
def test_two_ranks_inductor(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    check(ranks(2), codegen="inductor", **settings)


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.campaign)]
)
def test_other_worlds_inductor(ranks: Callable[[int], Ranks], world: int) -> None:
    check(ranks(world), codegen="inductor", stage=3, update="backward")


@pytest.mark.parametrize(
    ("world", "codegen", "update", "micro"),
    [
        (2, "eager", "backward", 2),
        pytest.param(2, "inductor", "backward", 2, marks=pytest.mark.campaign),
        pytest.param(3, "eager", "step", 2, marks=pytest.mark.campaign),
        pytest.param(3, "eager", "backward", 1, marks=pytest.mark.campaign),
    ],
)
def test_gathered_weights_kept_for_backward(
    ranks: Callable[[int], Ranks], world: int, codegen: str, update: str, micro: int
) -> None:
    settings = {"stage": 3, "update": update, "gradient_accumulation_steps": micro}
    check(ranks(world), codegen=codegen, reshard_after_forward=False, **settings)


@pytest.mark.parametrize("stage", [1, 3])
def test_gram_form(ranks: Callable[[int], Ranks], stage: int) -> None:
    check(ranks(2), stage=stage, ns_method="gram")


# ------------------------------------------------------------------- no wrong answer could pass the tolerances


@pytest.mark.parametrize(
    ("mistake", "stage"),
    [
        pytest.param({"slices": 2}, 1, id="newton-schulz-on-a-slice-1", marks=pytest.mark.campaign),
        pytest.param({"slices": 2}, 3, id="newton-schulz-on-a-slice-3"),
        pytest.param({"used": 1}, 1, id="last-micro-batch-1"),
        pytest.param({"used": 1}, 3, id="last-micro-batch-3", marks=pytest.mark.campaign),
    ],
)
def test_a_wrong_reference_is_far_away(ranks: Callable[[int], Ranks], stage: int, mistake: dict[str, int]) -> None:
    for report in ranks(2).run(train_odd, stage=stage, gradient_accumulation_steps=2, update="step", **mistake):
        assert max(report.parameters.values()) / PARAMETER_TOLERANCE > 100
        assert max(report.directions.values()) / DIRECTION_TOLERANCE > 100


def started(stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """A model that each rank has made otherwise, before MuonZero has it and behind."""
    torch.manual_seed(world_and_rank()[1])
    model = Odd()
    model.register_buffer("table", torch.randn(3))
    before = [value.clone() for value in model.state_dict().values()]
    compile_muon.MuonZero(model, stage=stage)
    return before, [full(value.detach()) for value in model.state_dict().values()]


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_start_from_the_first_ones_weights_and_buffers(ranks: Callable[[int], Ranks], stage: int) -> None:
    (first, _), (other, _), *_ = found = ranks(3).run(started, stage=stage)
    assert not all(map(torch.equal, first, other))
    for _, now in found:
        assert all(map(torch.equal, first, now))


# ------------------------------------------------------------------------------------------- the harness itself


def raise_on_rank_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def test_an_exception_on_one_rank_is_reported_with_its_traceback() -> None:
    group = Ranks(2)
    with pytest.raises(AssertionError, match="(?s)rank 0: .*rank 1: .*raise_on_rank_one.*only here"):
        group.run(raise_on_rank_one)
