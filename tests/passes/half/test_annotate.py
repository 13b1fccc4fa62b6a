"""NVTX ranges stay where they were put, in eager and generated code."""

import pytest
import torch
from torch import nn
from torch.profiler import profile

import compile_muon


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_ranges_surround_newton_schulz(codegen):
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = compile_muon.MuonZero(model)
    compiled = torch.compile(model, backend="muon_zero", options={"codegen": codegen, "nvtx": True})
    compiled(torch.randn(3, 8)).square().mean().backward()  # compiling runs the ops on fake tensors, recorded too
    optimizer.zero_grad()
    with profile() as recorded:
        compiled(torch.randn(3, 8)).square().mean().backward()
    wanted = ("muon_zero::range_push", "muon_zero::newton_schulz", "muon_zero::range_pop")
    events = sorted((e for e in recorded.events() if e.name in wanted), key=lambda e: e.time_range.start)
    assert [e.name for e in events] == list(wanted)


def test_no_range_unless_asked():
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    compile_muon.MuonZero(model)
    compiled = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    with profile() as recorded:
        compiled(torch.randn(3, 8)).square().mean().backward()
    assert not [e for e in recorded.events() if "range_" in e.name]
