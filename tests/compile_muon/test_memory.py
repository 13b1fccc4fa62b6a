"""``compile.memory``: plans of frames within a budget, from shapes alone."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_muon
from compile_muon import memory as memory_module
from compile_muon.config import load_config, read_options
from compile_muon.memory import BudgetError
from compile_muon.passes.pipeline import Kept
from compile_muon.passes.torch_private import without_numbers
from compile_muon.planning import Captured, capture_step
from compile_muon.simulate.machine import load_machine

GIB = 2**30


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))))


class Tower(nn.Module):
    def __init__(self, layers: int = 2, width: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h.square().mean()


@functools.cache
def planned(
    memory: float | None, stage: int = 3, rows: int = 8192, machine: str = "h100", batches: int = 1, **options: object
) -> Captured:
    chosen = {"codegen": "inductor", **options, **({} if memory is None else {"memory": memory})}
    accumulation = {"gradient_accumulation_steps": batches}
    config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "Muon"}, "machine": machine, **accumulation}
    with without_numbers():
        batch = (torch.zeros(rows, 1024),)

    def tower() -> nn.Module:
        with without_numbers():
            return Tower()

    return capture_step(tower, batch, world=4, config=load_config(config), options=read_options(chosen), backend="nccl")


def peak(captured: Captured) -> float:
    return captured.simulated(load_machine("h100")).peak.total / GIB


def seconds(captured: Captured, machine: str = "h100") -> float:
    return captured.simulated(load_machine(machine)).seconds


def least(stage: int = 3) -> float:
    """GiB of the error's table."""
    with pytest.raises(BudgetError, match="offload_optimizer") as error:
        planned(1e-6, stage)
    found = re.search(r"allow ([\d.]+) or more", str(error.value))
    assert found is not None
    return float(found[1])


@pytest.mark.full
@pytest.mark.parametrize("stage", [3, 1])
def test_a_step_stays_within_its_budget_and_more_memory_takes_no_longer(stage: int) -> None:
    low, high = least(stage), peak(planned(100.0, stage))
    steps = [planned(low + (high - low) * part / 4, stage) for part in range(5)]
    times = [seconds(step) for step in steps]
    for part, step in enumerate(steps):
        assert peak(step) <= (low + (high - low) * part / 4) * 1.02
    assert all(later <= earlier * 1.002 for earlier, later in zip(times, times[1:], strict=False)), times
    assert len({*times}) > 1


@pytest.mark.full
def test_the_ends_are_those_of_reshard_after_forward() -> None:
    """All that fits is at least as fast as keeping all weights; what PyTorch saves by default needs no budget."""
    assert seconds(planned(100.0)) <= seconds(planned(None, reshard_after_forward=False)) * 1.02
    assert seconds(planned(peak(planned(None)) * 1.001)) <= seconds(planned(None)) * 1.02


@pytest.mark.full
def test_activations_move_where_the_link_is_fast(tmp_path: Path) -> None:
    """Over a link that costs nothing, less memory takes little longer than all of it."""
    link = tmp_path / "link.json"
    link.write_text(json.dumps({**load_machine("h100").to_json(), "name": "link", "host_bandwidth": 1e15}))
    full = seconds(planned(None, 3))
    step = planned(least(3) * 1.4, machine=str(link))
    (words,) = step.kept.values()
    assert "in host memory" in words
    assert peak(step) <= least(3) * 1.43
    assert seconds(step, str(link)) <= full * 1.02


@pytest.mark.full
def test_what_is_kept_follows_the_budget() -> None:
    """More than enough, and just too little for all weights to stay."""
    (words,) = planned(100.0).kept.values()
    assert (
        "100% of gathered weights stay" in words
        and "100% of activations are saved" in words
        and "of 100.00 GiB" in words
    )
    budget = peak(planned(100.0)) - 0.001
    (words,) = planned(budget).kept.values()
    assert "100% of gathered weights stay" not in words or "100% of activations are saved" not in words
    assert peak(planned(budget)) <= budget * 1.02


@pytest.mark.full
def test_weights_stay_for_the_whole_step_where_they_fit() -> None:
    step, without = planned(100.0, rows=4096, batches=3), planned(None, rows=4096, batches=3)
    (words,) = step.kept.values()
    assert "100% of gathered weights stay for the whole step" in words
    assert seconds(step) < seconds(without)
    h100 = load_machine("h100")
    assert step.simulated(h100).traffic.bytes_sent < 0.6 * without.simulated(h100).traffic.bytes_sent


def graphs_of(memory: float | None) -> int:
    """Compiled graphs of steps whose micro-batches differ in size."""
    torch.compiler.reset()
    model = Tower(layers=1, width=32)
    optimizer = compile_muon.MuonZero(model)
    chosen = {"codegen": "eager"} | ({} if memory is None else {"memory": memory})
    run = torch.compile(model, backend="muon_zero", dynamic=True, options=chosen)
    for rows in (64, 96, 8192):
        run(torch.randn(rows, 32)).backward()
        optimizer.step()
    return int(optimizer.engine.ledger.counters.graphs)


def test_a_choice_guards_no_size() -> None:
    """Simulated sizes are numbers: one frame serves micro-batches of all sizes, with a budget as without."""
    assert graphs_of(1.0) == graphs_of(None)


def test_passed_weights_are_read_beside_those_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank casts stay, of the module's own weights."""
    monkeypatch.setattr(memory_module, "_CHOICES", (Kept(1.0, persistent=True),))
    torch.compiler.reset()
    model = Tower(layers=1, width=32)
    settings = {"param_dtype": "bfloat16", "gradient_accumulation_steps": 9, "stage": 0}
    optimizer = compile_muon.MuonZero(model, **settings)
    run: Any = torch.compile(model, backend="muon_zero", options={"codegen": "eager", "memory": 1.0})
    inputs = torch.randn(64, 32, dtype=torch.bfloat16)
    for _ in range(2):
        own = run(inputs)
        own.backward()
    for factor in (1.0, 2.0, 3.0):
        others = {name: nn.Parameter(factor * value.detach()) for name, value in model.named_parameters()}
        passed = torch.func.functional_call(model, others, (inputs,))
        prefixed = {f"_orig_mod.{name}": value for name, value in others.items()}
        torch.testing.assert_close(torch.func.functional_call(run, prefixed, (inputs,)), passed)
    assert torch.equal(run(inputs), own)
    assert all(choice.kept.persistent for choice in optimizer.engine.ledger.memory.chosen.values())
