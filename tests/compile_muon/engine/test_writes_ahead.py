"""The kernels that are compiled ahead of a step are those that its writes launch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compile_muon
from compile_muon.engine import commit
from compile_muon.engine.writes_ahead import launches_of_writes
from compile_muon.kernels import apply

triton = pytest.importorskip("triton", reason="Triton is not installed")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402

from compile_muon.kernels.gpu import newton_schulz  # noqa: E402
from compile_muon.kernels.gpu.jobs import jobs_of  # noqa: E402
from compile_muon.kernels.gpu.launch import Launch, noting  # noqa: E402
from compile_muon.kernels.gpu.tiles import load_tables  # noqa: E402


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        ({}, 4),
        ({"param_dtype": "bf16", "checks": "next_step", "nonfinite": "skip"}, 4),
        ({"method": "normuon"}, 0),  # whose weights are written piece by piece
        ({"method": "dion2"}, None),
    ],
)
def test_what_a_step_launches_is_what_was_compiled(
    settings: dict[str, str], kernels: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 7))
    optimizer = compile_muon.MuonZero(model, lr=0.1, **settings)
    step = optimizer.engine.step
    model(torch.randn(4, 16).to(torch.bfloat16 if "param_dtype" in settings else torch.float32)).sum().backward()
    products = newton_schulz.Products(load_tables()["sm_90"], 132)
    monkeypatch.setattr(newton_schulz, "_products_on", lambda device: products)
    monkeypatch.setattr(apply, "triton_kernels", lambda: newton_schulz)
    launches: list[Launch] = []

    def written(lists: tuple[Any, ...], rest: dict[str, Any]) -> None:
        with noting(torch.device("cuda")) as noted:
            apply.muon_apply(*lists, **rest | {"found_inf": torch.zeros(()) if step.ledger.checks_later else None})
        launches.extend(noted)

    monkeypatch.setattr(commit, "muon_apply", lambda *lists, **rest: written(lists, rest))
    cuda = torch.device("cuda")
    target = GPUTarget("cuda", 90, 32)
    ahead = {job.key for job in jobs_of(list(launches_of_writes(step, cuda)), target, tmp_path)}
    optimizer.step()
    assert {job.key for job in jobs_of(launches, target, tmp_path)} <= ahead
    assert kernels is None or len(ahead) == kernels and bool(launches) == bool(kernels)
