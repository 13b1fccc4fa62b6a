"""Training equals training of the unsharded model: stages, updates, worlds, and every odd shape."""

import itertools
from typing import Any

import pytest
import torch
from support.harness import BACKEND, Ranks, RanksOf, on_ranks
from support.odd import AXES, Odd, cases, train_odd
from support.reference import DIRECTION_TOLERANCE, PARAMETER_TOLERANCE, full, world_and_rank
from torch import Tensor

import compile_muon

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


def test_pairwise_is_pairwise() -> None:
    for (i, left), (j, right) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(c[i], c[j]) for c in PAIRWISE} == set(itertools.product(left, right))


@pytest.mark.skipif(BACKEND != "nccl", reason="needs several ranks over NCCL, which can be captured")
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_steps_that_are_replayed(stage: int) -> None:
    train_odd(stage=stage, codegen="inductor", cuda_graphs=True, update="backward", checks="next_step").check()


@pytest.mark.campaign
@cases(itertools.product(*AXES.values()))
@on_ranks(2)
def test_two_ranks_in_every_combination(settings: dict[str, Any]) -> None:
    train_odd(**settings).check()


# Two ranks by generated code below, four on meshes in test_meshes.py.
@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.campaign)])
@cases(
    [(0, "step", 2), (3, "step", 2)],
    full=[given for given in PAIRWISE if given[1] == "step" and given[0] in (1, 2)],
    campaign=[given for given in PAIRWISE if given[1] == "backward"],
)
@on_ranks()
def test_every_pair_of_settings(settings: dict[str, Any]) -> None:
    train_odd(**settings).check()


@cases([(2, "backward", 2)], campaign=[given for given in PAIRWISE if given != (2, "backward", 2)])
def test_one_process(settings: dict[str, Any]) -> None:
    train_odd(**settings).check()


@cases((), full=((3, "backward", 2),), campaign=((1, "step", 2), (0, "backward", 2), (2, "step", 1)))
@on_ranks(2)
def test_two_ranks_inductor(settings: dict[str, Any]) -> None:
    train_odd(codegen="inductor", **settings).check()


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.campaign)])
@on_ranks(2)
def test_gathered_weights_kept_for_backward(codegen: str) -> None:
    settings = {"stage": 3, "update": "backward", "gradient_accumulation_steps": 2}
    train_odd(codegen=codegen, reshard_after_forward=False, **settings).check()


@on_ranks(2)
def test_gram_form() -> None:
    train_odd(stage=3, ns_method="gram").check()


@pytest.mark.parametrize(
    ("mistake", "stage"),
    [
        pytest.param({"slices": 2}, 3, id="newton-schulz-on-a-slice"),
        pytest.param({"used": 1}, 1, id="last-micro-batch"),
    ],
)
@on_ranks(2)
def test_a_wrong_reference_is_far_away(stage: int, mistake: dict[str, int]) -> None:
    report = train_odd(stage=stage, gradient_accumulation_steps=2, update="step", **mistake)
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
def test_all_ranks_start_from_the_first_ones_weights_and_buffers(ranks: RanksOf, stage: int) -> None:
    (first, _), (other, _), *_ = found = ranks(3).run(started, stage=stage)
    assert not all(map(torch.equal, first, other))
    for _, now in found:
        assert all(map(torch.equal, first, now))


def raise_on_rank_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def test_an_exception_on_one_rank_is_reported_with_its_traceback() -> None:
    group = Ranks(2)
    with pytest.raises(AssertionError, match="(?s)rank 0: .*rank 1: .*raise_on_rank_one.*only here"):
        group.run(raise_on_rank_one, grace=0.5)
