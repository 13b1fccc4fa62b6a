"""How a matrix is orthogonalized, as its shape, the device and the settings say."""

from dataclasses import replace

import pytest
import torch

from compile_muon.config import Config, config_from_kwargs
from compile_muon.kernels.call_plan import AUTO_LIMIT
from compile_muon.model.assignment import Assignment
from compile_muon.model.param_spec import muon_spec
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import MuonSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def spec_of(rows: int, cols: int, device: torch.device, config: Config, method: str = "muon") -> MuonSpec:
    return muon_spec(Assignment("w", method, "", (1, rows, cols)), config, device, Layout((rows, cols), 0))


@pytest.mark.parametrize(
    ("rows", "cols", "method"),
    [(768, 1024, "gram"), (1024, 768, "gram"), (769, 1024, "standard"), (1024, 1024, "standard")],
)
def test_cuda_computes_in_float16_in_gram_form_from_four_thirds_on(rows, cols, method, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # planned, wherever the test runs
    found = spec_of(rows, cols, CUDA, config_from_kwargs())
    assert (found.dtype, found.form, found.restarts) == ("float16", method, (3,))
    assert spec_of(rows, cols, CPU, config_from_kwargs(ns_dtype="fp16")) == found  # as a plan made there says


def test_without_symmetric_kernels_it_is_three_halves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for config, device in ((config_from_kwargs(ns_backend="aten"), CUDA), (config_from_kwargs(), CPU)):
        assert spec_of(300, 450, device, config).form == "standard"
        assert spec_of(300, 451, device, config).form == "gram"
    assert spec_of(300, 450, CUDA, config_from_kwargs(ns_dtype="fp32")).form == "standard"


def test_eps_and_memory_are_as_they_were_given():
    found = spec_of(8, 8, CPU, config_from_kwargs(ns_eps=0, ns_memory_limit=7))
    assert (found.eps, found.memory_limit) == (0.0, 7)
    plain = spec_of(8, 8, CPU, config_from_kwargs())
    assert (plain.eps, plain.memory_limit) == (1e-7, AUTO_LIMIT)
    assert replace(plain, memory_limit=2**30).kernel_settings != plain.kernel_settings


@pytest.mark.parametrize(("given", "travels"), [("auto", "float32"), ("bf16", "float32"), ("float64", "float64")])
def test_a_method_without_newton_schulz_has_gradients_of_float32_at_least(given, travels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert spec_of(8, 8, CUDA, config_from_kwargs(ns_dtype=given), "soap").dtype == travels
