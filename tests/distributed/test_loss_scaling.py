"""torch.amp.GradScaler around a sharded model: all ranks leave out the same steps."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import on_ranks
from support.reference import full
from torch import Tensor, nn

import compile_muon
from compile_muon.passes.collectives import Traffic

STEPS, LEFT_OUT = 4, (1, 2)


def trained(
    stage: int, nonfinite: str, overflow: str | None, scaled: bool
) -> tuple[list[Tensor], list[float], Traffic]:
    """Weights after some steps, and the scale ahead of each; without a GradScaler (``scaled``) steps that overflow are
    not made. ``overflow``: on rank 1 alone, the "whole" loss, or one "row" of a weight that one rank holds."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    settings = {"stage": stage, "nonfinite": nonfinite, "update": "step", "ns_dtype": "float32"}
    optimizer = compile_muon.MuonZero(model, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    scales, norms = [], []
    for step in range(STEPS):
        if not scaled and step in LEFT_OUT:
            continue
        scales.append(scaler.get_scale())
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        hidden = model[0](inputs)
        loss = model[2](model[1](hidden)).square().mean()
        if overflow is not None and step in LEFT_OUT and dist.get_rank() == 1:
            loss = loss * math.inf if overflow == "whole" else loss + hidden[:, 7].sum() * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [full(p.detach()) for p in model.parameters()], scales, optimizer.traffic


@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
@on_ranks(2)
def test_an_overflow_on_one_rank_is_left_out_on_all_and_the_rest_is_as_unscaled(stage: int) -> None:
    right, *_ = trained(stage, "error", None, False)
    for nonfinite in ("error", "skip"):
        for overflow in ("whole", "row"):
            found, scales, _ = trained(stage, nonfinite, overflow, True)
            assert scales == [1024.0, 1024.0, 512.0, 256.0], (nonfinite, overflow, scales)
            for ours, theirs in zip(found, right, strict=True):  # powers of two: not a bit is lost
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_float16_trains_by_a_scaler_that_finds_its_scale() -> None:
    """Losses in float16 beside float32, each with its scaler."""
    found = []
    for dtype in (None, "float16"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = compile_muon.MuonZero(model, param_dtype=dtype, update="step", ns_dtype="float32")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)  # too large for float16 until it has come down
        losses = []
        for _ in range(16):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
            loss = model(inputs if dtype is None else inputs.half()).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append([losses[0], losses[-1], scaler.get_scale(), optimizer.totals()["skipped_steps"]])
    single, half = found
    assert half[0] == pytest.approx(single[0], rel=1e-2)
    assert half[1] < 0.8 * half[0]
    assert single[2] == 2.0**26 and half[2] < 2.0**26
    assert half[3] == 0  # the optimizer never saw what the scaler left out
