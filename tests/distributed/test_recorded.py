"""Steps as CUDA graphs on several ranks: checks, gathers of resident weights and sums of micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.as_graphs import AsGraphs, outputs_in_place
from support.harness import Ranks
from support.reference import full, world_and_rank
from support.zoo import Uneven

import compile_muon
from compile_muon.passes.methods import MatrixMethod, matrix_method, method_names


def trained(stage: int, method: str, graphs: AsGraphs | None) -> bytes:
    torch.manual_seed(0)
    model = Uneven()
    settings = {"adamw_lr": 0.01, "ns_dtype": "float32", "checks": "next_step"}
    settings |= {"method": method, "update": "step" if matrix_method(method).in_step else "backward"}
    settings |= {"rates": {"basis_every": 4}} if method == "soap" else {}
    optimizer = compile_muon.MuonZero(model, stage=stage, gradient_accumulation_steps=2, **settings)
    optimizer.engine.step.recorded = graphs
    options = {"codegen": "eager", "cuda_graphs": True}
    run = torch.compile(model, backend="muon_zero", options=options)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
            if "momentum" in group:
                group["momentum"] = 0.9 + 0.01 * step
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


def both(cases: tuple[tuple[int, str], ...]) -> list[tuple[int, str, bool, int]]:
    """By stage and method, whether graphs write the same bits and send as much, and how often one was replayed."""
    found = []
    for stage, method in cases:
        graphs, without = AsGraphs(), trained(stage, method, None)
        with pytest.MonkeyPatch.context() as patch:
            outputs_in_place(patch)
            found.append((stage, method, trained(stage, method, graphs) == without, graphs.replays))
    return found


@pytest.mark.parametrize(
    "cases",
    [
        ((3, "normuon"),),
        pytest.param(
            ((1, "muon"), *((3, name) for name in method_names(MatrixMethod))),
            marks=pytest.mark.full,
        ),
    ],
)
def test_replays_are_the_steps_of_all_ranks(ranks: Callable[[int], Ranks], cases: tuple[tuple[int, str], ...]) -> None:
    for found in ranks(2).run(both, cases=cases):
        # The first step of a kind is launched, and SOAP's first besides; MuonBP's is of its own kind.
        replays = [2 if method in ("soap", "muonbp") else 3 for _, method in cases]
        assert found == [(*case, True, times) for case, times in zip(cases, replays, strict=True)]
