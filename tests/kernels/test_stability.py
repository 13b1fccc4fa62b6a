"""Gram restarts: what the scalar model predicts, and that it is what matrices in half precision do."""

from itertools import pairwise

import pytest
import torch

from compile_muon.kernels import COEFFICIENTS, newton_schulz, resolve_coefficients
from compile_muon.kernels.call_plan import Plan
from compile_muon.kernels.reference import orthogonalize
from compile_muon.kernels.stability import BFLOAT16, FLOAT16, FLOAT32, amplification, choose_restarts

STABLE_IN_HALF = ["jordan", "you", "polar_express", "deepseek_v4"]
AGGRESSIVE = [(20.0, -300.0, 300.0)] * 5


def decaying(k=64, n=192, power=1.0, seed=0):
    """A float64 matrix whose singular values are 1, 2^-power, 3^-power, …, as gradients' are."""
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(k, k, dtype=torch.float64, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64, generator=generator))
    return u * torch.arange(1, k + 1).double() ** -power @ v.mT


def relative_error(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


RESTARTS = {
    "jordan": {"float16": (3,), "bfloat16": (2, 4), "float32": (3,)},  # published for float16: (3,)
    "you": {"float16": (2,), "bfloat16": (1, 3), "float32": (2,)},  # published for float16: (2,)
    "polar_express": {"float16": (2,), "bfloat16": (1, 3), "float32": (2,)},  # published for float16: (2,)
    "cans": {"float32": (2,)},
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


def test_bfloat16_never_restarts_less():
    for name in STABLE_IN_HALF:
        steps = COEFFICIENTS[name].steps
        coarse, fine = choose_restarts(steps, BFLOAT16), choose_restarts(steps, FLOAT16)
        assert coarse is not None and fine is not None
        assert len(coarse) >= len(fine)


@pytest.mark.parametrize("precision", [FLOAT16, BFLOAT16, FLOAT32])
def test_no_segment_exceeds_what_is_tolerated(precision):
    for name, coefficients in COEFFICIENTS.items():
        bounds = (0, *choose_restarts(coefficients.steps, precision), len(coefficients.steps))
        for start, stop in pairwise(bounds):
            damage = amplification(coefficients.steps[start:stop], precision.perturbation)
            assert damage <= precision.tolerated, name


@pytest.mark.parametrize("name", STABLE_IN_HALF)
def test_restart_is_necessary_in_float16(name):
    """Without restarts gram is at least seven times worse than the standard form; with them within a small factor."""
    chosen = COEFFICIENTS[name]
    x = decaying(power=1.5 if name in ("jordan", "you") else 1.0)
    exact = newton_schulz(x, coefficients=name, steps=None, method="standard", dtype="float64")

    def error(method, restarts=()):
        plan = Plan(chosen.steps, method, torch.float16, 1e-7, chosen.safety, restarts)
        return relative_error(orthogonalize(x, plan), exact)

    standard = error("standard")
    assert not error("gram") < 7 * standard  # also where it is not a number
    assert error("gram", chosen.gram_restarts(torch.float16)) < 9 * standard


def test_a_restart_too_late_is_no_help():
    chosen = COEFFICIENTS["jordan"]
    x = decaying(power=1.5)
    exact = newton_schulz(x, method="standard", dtype="float64")
    errors = {
        at: relative_error(orthogonalize(x, Plan(chosen.steps, "gram", torch.float16, 1e-7, 1.0, (at,))), exact)
        for at in (3, 4)
    }
    assert errors[3] < errors[4] / 3


@pytest.mark.parametrize("coefficients", ["cans", AGGRESSIVE], ids=["cans", "aggressive"])
def test_gram_refuses_what_float16_does_not_survive(coefficients):
    with pytest.raises(ValueError, match=r"method='gram'.*unstable.*method='standard'"):
        newton_schulz(torch.randn(4, 8), method="gram", coefficients=coefficients, dtype="float16")


@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize("coefficients", ["cans", AGGRESSIVE], ids=["cans", "aggressive"])
def test_no_method_takes_what_bfloat16_does_not_survive(coefficients, method):
    with pytest.raises(ValueError, match=r"dtype=bfloat16.*diverges.*dtype='float32'"):
        newton_schulz(torch.randn(4, 8), method=method, coefficients=coefficients, dtype="bfloat16")


def test_cans_does_diverge_in_bfloat16():
    """Why it is refused: six singular values near 0.367 of the norm, which the first step sends to 1.99."""
    chosen = COEFFICIENTS["cans"]
    u, _, vh = torch.linalg.svd(decaying(12, 20), full_matrices=False)
    s = torch.cat([torch.linspace(0.355, 0.380, 6), torch.full((6,), 0.17)]).double()
    x = u * s @ vh
    largest = {}
    for dtype in (torch.bfloat16, torch.float32):
        out = orthogonalize(x, Plan(chosen.steps, "standard", dtype, 1e-7, chosen.safety))
        largest[dtype] = torch.linalg.svdvals(out.double())[0].item() if out.isfinite().all() else float("inf")
    assert largest[torch.float32] < 1.13
    assert largest[torch.bfloat16] > 3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gram_takes_cans_in_full_precision(dtype):
    x = decaying()
    standard = newton_schulz(x, method="standard", coefficients="cans", dtype="float64")
    gram = newton_schulz(x, method="gram", coefficients="cans", dtype=dtype)
    assert relative_error(gram, standard) < (1e-10 if dtype == "float64" else 1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", STABLE_IN_HALF)
def test_gram_keeps_singular_values_bounded(name, dtype):
    """Nearly rank-one matrices: the one large singular value is at the top of the interval, the others near zero."""
    generator = torch.Generator().manual_seed(1)
    for k, n in ((8, 8), (32, 100), (5, 200)):
        x = torch.randn(k, 1, generator=generator) @ torch.randn(1, n, generator=generator)
        x = x / x.norm() + 1e-2 * torch.randn(k, n, generator=generator) / (k * n) ** 0.5
        out = newton_schulz(x, method="gram", coefficients=name, steps=None, dtype=dtype)
        assert torch.linalg.svdvals(out.double())[0] < 1.3


def test_cans_without_its_safety_diverges_on_rank_one():
    """Why cans divides by 1.02 ‖X‖ here."""
    chosen = COEFFICIENTS["cans"]
    generator = torch.Generator().manual_seed(0)
    largest = {}
    for safety in (1.0, chosen.safety):
        out = []
        for k, n in ((8, 8), (32, 100), (5, 200), (64, 64)):
            x = torch.randn(k, 1, generator=generator) @ torch.randn(1, n, generator=generator)
            y = orthogonalize(x, Plan(chosen.steps, "standard", torch.float16, 1e-7, safety))
            out.append(torch.linalg.svdvals(y.double())[0].item())
        largest[safety] = max(out)
    assert largest[1.0] > 2
    assert largest[1.02] < 1.2
