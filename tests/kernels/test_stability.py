"""Gram restarts: what the scalar model predicts, and that it is what matrices in half precision do."""

from itertools import pairwise

import pytest
import torch

from compile_muon.kernels import COEFFICIENTS, newton_schulz, resolve_coefficients
from compile_muon.kernels.stability import BFLOAT16, FLOAT16, FLOAT32, amplification, choose_restarts

AGGRESSIVE = [(20.0, -300.0, 300.0)] * 5


RESTARTS = {
    "jordan": {"float16": (3,), "bfloat16": (2, 4), "float32": (3,)},  # published for float16: (3,)
    "you": {"float16": (2,), "bfloat16": (1, 3), "float32": (2,)},  # published for float16: (2,)
    "polar_express": {"float16": (2,), "bfloat16": (1, 3), "float32": (2,)},  # published for float16: (2,)
    "cans": {"float32": (2,)},
    "four_steps": {"float16": (2,), "bfloat16": (2,), "float32": (2,)},
    "deepseek_v4": {"float16": (3, 6, 9), "bfloat16": (2, 4, 6, 8), "float32": (3, 6)},
}


@pytest.mark.parametrize("name", list(RESTARTS))
def test_restarts(name):
    """As measured: see stability, and `python tests/kernels/test_accuracy.py restarts`."""
    chosen = COEFFICIENTS[name]
    assert {d: chosen.gram_restarts(getattr(torch, d)) for d in RESTARTS[name]} == RESTARTS[name]
    assert chosen.gram_restarts(torch.float64) == chosen.gram_restarts(torch.float32)


def test_short_schedules_need_no_restart_and_long_ones_several():
    assert resolve_coefficients("jordan", 2).gram_restarts(torch.float16) == ()
    assert resolve_coefficients("jordan", 10).gram_restarts(torch.float16) == (3, 6, 9)
    assert resolve_coefficients("jordan", 3).gram_restarts(torch.float32) == ()


@pytest.mark.parametrize("precision", [FLOAT16, BFLOAT16, FLOAT32])
def test_no_segment_exceeds_what_is_tolerated(precision):
    for name, coefficients in COEFFICIENTS.items():
        bounds = (0, *choose_restarts(coefficients.steps, precision), len(coefficients.steps))
        for start, stop in pairwise(bounds):
            damage = amplification(coefficients.steps[start:stop], precision.perturbation)
            assert damage <= precision.tolerated, name


@pytest.mark.parametrize("coefficients", ["cans", AGGRESSIVE], ids=["cans", "aggressive"])
def test_gram_refuses_what_float16_does_not_survive(coefficients):
    with pytest.raises(ValueError, match=r"method='gram'.*unstable.*method='standard'"):
        newton_schulz(torch.randn(4, 8), method="gram", coefficients=coefficients, dtype="float16")


@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize("coefficients", ["cans", AGGRESSIVE], ids=["cans", "aggressive"])
def test_no_method_takes_what_bfloat16_does_not_survive(coefficients, method):
    with pytest.raises(ValueError, match=r"dtype=bfloat16.*diverges.*dtype='float32'"):
        newton_schulz(torch.randn(4, 8), method=method, coefficients=coefficients, dtype="bfloat16")
