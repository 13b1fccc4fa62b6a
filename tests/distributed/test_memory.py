"""``compile.memory`` on two ranks: the same bits, fewer bytes, and one choice of gathers for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import Ranks
from support.reference import full
from torch import Tensor, nn

import compile_muon
from compile_muon import memory as memory_module
from compile_muon.memory import BudgetError, Choice
from compile_muon.passes.pipeline import Kept


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(48, 96) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(96, 48) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, h: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            h = h + self.dropout(down(nn.functional.gelu(up(h)).tanh()))
        return h.square().mean()


def trained(
    memory: float | None,
    rows: int = 256,
    codegen: str = "eager",
    regional: bool = False,
    kept: Kept | None = None,
    **settings: Any,
) -> tuple[dict[str, Tensor], int, list[Choice]]:
    """Two steps: parameters, bytes that forward saves, and what was chosen: ``kept``, if it is given."""
    choices, memory_module._CHOICES = memory_module._CHOICES, (kept,) if kept else memory_module._CHOICES
    try:
        return _trained(memory, rows, codegen, regional, **settings)
    finally:
        memory_module._CHOICES = choices


def _trained(
    memory: float | None, rows: int, codegen: str, regional: bool, **settings: Any
) -> tuple[dict[str, Tensor], int, list[Choice]]:
    torch.manual_seed(0)
    model = Tower()
    optimizer = compile_muon.MuonZero(model, ns_dtype="float32", **settings)
    torch.compiler.reset()
    options = {"codegen": codegen} | ({} if memory is None else {"memory": memory})
    run: Any = torch.compile(model, backend="muon_zero", options=options)
    if regional:
        run = model
        for half in (*model.up, *model.down):
            half.compile(backend="muon_zero", options=options)
    saved = dict[int, int]()

    def pack(value: Tensor) -> Tensor:
        saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    for step in range(2):
        saved.clear()
        inputs = torch.randn(rows, 48, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        torch.manual_seed(step)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            loss = run(inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    chosen = list(optimizer.engine.ledger.memory.chosen.values())
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}, sum(saved.values()), chosen


def budgets(**settings: Any) -> list[tuple[int, list[Choice]]]:
    """Without a budget, with all that it takes, and with less and less; the same bits each time."""
    usual, saved, _ = trained(None, **settings)
    runs = [(saved, list[Choice]())]
    memory = 1.0
    for _ in range(3):
        try:
            now, saved, chosen = trained(memory, **settings)
        except BudgetError:
            break
        for name, value in usual.items():
            assert torch.equal(value, now[name]), (name, memory)
        runs.append((saved, chosen))
        memory = 0.98 * max(choice.peak for choice in chosen) / 2**30
    return runs


CASES: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "regional": True},
    {"stage": 1},
    {"stage": 0},
    {"stage": 3, "codegen": "inductor"},
    {"stage": 3, "update": "step"},
    {"stage": 2, "gradient_accumulation_steps": 1, "method": "normuon"},
]


@pytest.mark.full
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_budgets_change_no_bit_and_less_is_saved(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    for rank in ranks(2).run(budgets, **settings):
        (usual, _), (most, _), *less = rank
        assert less, rank
        assert less[-1][0] < most
        if settings["stage"] == 3:
            assert most > usual  # gathered weights stay
            assert all(c.kept.weights == 1 for c in rank[1][1])


MOVED: list[dict[str, Any]] = [
    {"stage": 3, "codegen": "eager"},
    {"stage": 1, "codegen": "inductor"},
    {"stage": 3, "codegen": "inductor", "regional": True, "gradient_accumulation_steps": 1},
]


def moved() -> None:
    """Activations in host memory of a GPU that is described, and gathered weights that stay beside them."""
    for settings in MOVED:
        usual, *_ = trained(None, **settings)
        for kept in (Kept(0.0, 1.0, 0.4), Kept(1.0, 1.0, 1.0) if settings["stage"] == 3 else Kept(0.0, 0.5, 1.0)):
            now, _, chosen = trained(1.0, kept=kept, machine="h100", **settings)
            assert {choice.kept for choice in chosen} <= {kept, replace(kept, weights=0.0)}, chosen
            assert any(choice.kept.moved for choice in chosen)
            for name, value in usual.items():
                assert torch.equal(value, now[name]), (name, kept, settings)


@pytest.mark.full
def test_moved_activations_change_no_bit(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(moved)


def persistent(codegen: str, regional: bool = False) -> None:
    """Weights that stay for the whole step: the bits, fewer bytes, edits between micro-batches."""

    def three_steps(kept: Kept | None, number: int = 3) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        model = Tower()
        optimizer = compile_muon.MuonZero(model, ns_dtype="float32", stage=3, gradient_accumulation_steps=number)
        torch.compiler.reset()
        choices, memory_module._CHOICES = memory_module._CHOICES, (kept,) if kept else memory_module._CHOICES
        options = {"codegen": codegen} | ({"memory": 1.0} if kept else {})
        run: Any = model if regional else torch.compile(model, backend="muon_zero", options=options)
        for half in (*model.up, *model.down) if regional else ():
            half.compile(backend="muon_zero", options=options)
        for step in range(3):
            for micro in range(number if step else number - 1):  # the first step ends early
                torch.manual_seed(10 * step + micro + dist.get_rank())
                run(torch.randn(64, 48)).backward()
                if micro == 0 and step == 1:
                    with torch.no_grad():
                        model.up[1].weight.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        memory_module._CHOICES = choices
        if kept is not None:
            assert all(choice.kept == kept for choice in optimizer.engine.ledger.memory.chosen.values())
        sent = optimizer.totals()["bytes_sent"]
        return {name: full(p).detach().clone() for name, p in model.named_parameters()}, sent

    usual, _ = three_steps(None)
    _, sent = three_steps(Kept(1.0))
    weights, sent_persistent = three_steps(Kept(1.0, persistent=True))
    for name, value in usual.items():
        assert torch.equal(value, weights[name]), name
    assert sent_persistent < sent


@pytest.mark.parametrize("settings", [{"codegen": "eager"}])
def test_weights_that_stay_for_a_step_change_no_bit(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    ranks(2).run(persistent, **settings)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"codegen": "inductor"}, {"codegen": "inductor", "regional": True}])
def test_generated_code_leaves_weights_that_stay(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    ranks(2).run(persistent, **settings)


def live_peaks(stage: int) -> list[tuple[int, int]]:
    """Bytes that a step allocates at most, measured and planned, within less and less memory."""
    peaks, memory = [], 1.0
    for _ in range(3):
        torch.manual_seed(0)
        model = Tower()
        optimizer = compile_muon.MuonZero(model, ns_dtype="float32", stage=stage)
        torch.compiler.reset()
        run: Any = torch.compile(model, backend="muon_zero", options={"codegen": "eager", "memory": memory})
        # An exchange's buffer is freed by its thread or by this one, which alone is counted: here 1 % of a difference.
        inputs = torch.randn(32768, 48)

        def step(run: Any = run, inputs: Tensor = inputs, optimizer: compile_muon.MuonZero = optimizer) -> None:
            run(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        (choice,) = optimizer.engine.ledger.memory.chosen.values()
        peaks.append((max(accumulate(event.nbytes() for event in events)), choice.peak))
        memory = 0.9 * choice.peak / 2**30
    return peaks


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_live_bytes_of_a_step_fall_as_planned(ranks: Callable[[int], Ranks], stage: int) -> None:
    for peaks in ranks(2).run(live_peaks, stage=stage):
        for (most, most_planned), (less, less_planned) in pairwise(peaks):
            assert less < most
            assert most - less == pytest.approx(most_planned - less_planned, rel=0.03)


def apart() -> tuple[list[Choice], list[Choice]]:
    """Ranks whose batches differ in size, and one of which has a smaller budget: gathers must be the same on all."""
    rank = dist.get_rank()
    *_, alone = trained(1.0, rows=256)
    just = alone[0].peak / 2**30
    *_, chosen = trained(just * 1.001 if rank == 0 else just * 0.9, rows=256 if rank else 128, stage=3)
    return alone, chosen


def test_ranks_follow_the_first_in_what_they_gather(ranks: Callable[[int], Ranks]) -> None:
    (_, first), (_, second) = ranks(2).run(apart)
    for one, other in zip(first, second, strict=True):
        assert (one.kept.weights, one.kept.buckets) == (other.kept.weights, other.kept.buckets)
