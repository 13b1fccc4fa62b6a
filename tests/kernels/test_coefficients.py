"""Coefficient schedules: what each name means, and what bad input says."""

import math

import pytest
import torch

from compile_muon.kernels import COEFFICIENTS, resolve_coefficients

JORDAN = (3.4445, -4.7750, 2.0315)


def test_the_sets_on_offer():
    assert list(COEFFICIENTS) == ["jordan", "you", "polar_express", "cans", "four_steps", "deepseek_v4"]


# Where singular values in [0.01, 1] end, as published, and of four_steps as it was made for; cans and polar_express
# divide by `safety` first.
PUBLISHED_RANGE = {
    "jordan": (0.682, 1.134),
    "you": (0.978, 1.032),
    "polar_express": (0.859, 1.141),
    "cans": (0.884, 1.120),
    "four_steps": (0.708, 1.262),
}


@pytest.mark.parametrize("name", list(PUBLISHED_RANGE))
def test_singular_values_end_where_published(name):
    s = torch.linspace(0.01, 1, 20001, dtype=torch.float64)
    if name == "four_steps":  # made from 0.0025 on, for what it divides by
        s = torch.logspace(math.log10(0.0025), 0, 20001, dtype=torch.float64) / COEFFICIENTS[name].safety
    for a, b, c in COEFFICIENTS[name].steps:
        s = s * (a + b * s**2 + c * s**4)
    low, high = PUBLISHED_RANGE[name]
    assert s.min().item() == pytest.approx(low, abs=6e-4)
    assert s.max().item() == pytest.approx(high, abs=6e-4)


def test_deepseek_contracts_after_eight_jordan_steps():
    steps = COEFFICIENTS["deepseek_v4"].steps
    assert steps[:8] == (JORDAN,) * 8
    assert steps[8:] == ((2.0, -1.5, 0.5),) * 2


def test_steps_cut_and_repeat():
    you = COEFFICIENTS["you"].steps
    assert resolve_coefficients("you", 3).steps == you[:3]
    assert resolve_coefficients("you", 7).steps == you + you[-1:] * 2
    assert resolve_coefficients("jordan", 2).steps == (JORDAN,) * 2


def test_several_triples_keep_their_order():
    several = [[3, -4, 2], [2, -1.5, 0.5]]
    assert resolve_coefficients(several).steps == ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))
    assert resolve_coefficients(several, 3).steps == ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5), (2.0, -1.5, 0.5))


def test_deepseek_is_all_or_nothing():
    assert resolve_coefficients("deepseek_v4", 10) == COEFFICIENTS["deepseek_v4"]
    with pytest.raises(ValueError, match=r"steps=5.*'deepseek_v4'.*steps=10"):
        resolve_coefficients("deepseek_v4", 5)


def test_unknown_name_says_the_nearest():
    with pytest.raises(ValueError, match=r"'polar-expres'.*did you mean 'polar_express'"):
        resolve_coefficients("polar-expres")


@pytest.mark.parametrize("steps", [0, -1, 100])
def test_steps_out_of_range(steps):
    with pytest.raises(ValueError, match=f"steps={steps}"):
        resolve_coefficients("jordan", steps)
