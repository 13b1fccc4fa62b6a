"""Steps as CUDA graphs on several ranks: checks, gathers of resident weights and sums of micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from as_graphs import AsGraphs, outputs_in_place
from harness import Ranks
from reference import full, world_and_rank
from zoo import Uneven

import compile_muon


def trained(stage: int, graphs: AsGraphs | None) -> bytes:
    torch.manual_seed(0)
    model = Uneven()
    settings = {"adamw_lr": 0.01, "ns_dtype": "float32", "update": "backward", "checks": "next_step"}
    optimizer = compile_muon.MuonZero(model, stage=stage, gradient_accumulation_steps=2, **settings)
    optimizer.engine.step.recorded = graphs
    options = {"codegen": "eager", "cuda_graphs": True}
    run = torch.compile(model, backend="muon_zero", options=options)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
        for part in range(2):
            seed = 100 * step + 10 * part + world_and_rank()[1]
            run(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = optimizer.traffic.bytes_sent
    torch.compiler.reset()
    return sent.to_bytes(8, "big") + b"".join(
        full(p.detach()).contiguous().numpy().tobytes() for p in model.parameters()
    )


def both(stages: tuple[int, ...]) -> list[tuple[int, bool, int]]:
    """By stage, whether graphs write the same bits and send as much, and how often one was replayed."""
    found = []
    for stage in stages:
        graphs, without = AsGraphs(), trained(stage, None)
        with pytest.MonkeyPatch.context() as patch:
            outputs_in_place(patch)
            found.append((stage, trained(stage, graphs) == without, graphs.replays))
    return found


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.full)])
def test_replays_are_the_steps_of_all_ranks(ranks: Callable[[int], Ranks], stages: tuple[int, ...]) -> None:
    for found in ranks(2).run(both, stages=stages):
        assert found == [(stage, True, 3) for stage in stages]
