"""What a step does, by tables: a decision is a function of facts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from compile_muon.runtime.decision import Decision, Facts, decide, over

NAN = math.nan
BAD = {"gradients": {"a": NAN, "b": math.inf}}
FINE = {"a": 9.0, "b": 16.0}  # a norm of 5


@pytest.mark.parametrize(
    ("facts", "limit", "clip", "use", "make", "wrong"),
    [
        ({}, None, False, "", "ab", {}),
        ({"held": "ab"}, None, False, "ab", "", {}),
        ({"held": "a"}, None, False, "a", "b", {}),
        # of a gradient that another group has, or nobody any more
        ({"held": "abz"}, None, False, "ab", "", {}),
        # a direction is of the gradient as it was
        ({"held": "ab"}, 4.0, True, "", "ab", {}),
        ({"held": "ab"}, 5.1, False, "ab", "", {}),
        # whoever is not finite is named, and what follows from it is not
        (
            {"gradients": {"a": NAN, "b": math.inf}, "held": "ab", "directions": "ab"},
            None,
            False,
            "ab",
            "",
            {"gradient": ["a", "b"]},
        ),
        (
            {"spoiled": {"momentum": ["b"], "rate": []}, "held": "ab", "directions": "b"},
            None,
            False,
            "ab",
            "",
            {"momentum": ["b"]},
        ),
        ({"spoiled": {"rate": ["muon lr"]}}, None, False, "", "ab", {"rate": ["muon lr"]}),
        ({"held": "ab", "directions": "b"}, None, False, "ab", "", {"direction": ["b"]}),
        # a direction that nobody uses may be what it likes
        ({"held": "a", "directions": "b"}, None, False, "a", "b", {}),
        ({"held": "ab", "directions": "ab"}, 4.0, True, "", "ab", {}),
        # a norm that is not a number is over no limit: the step is refused for the gradient
        ({"gradients": {"a": NAN}, "held": "a"}, 4.0, False, "a", "b", {"gradient": ["a"]}),
        ({"gradients": {"a": math.inf}, "held": "a"}, 4.0, True, "", "ab", {"gradient": ["a"]}),
    ],
)
def test_a_step_follows_from_its_facts(
    facts: dict[str, Any], limit: float | None, clip: bool, use: str, make: str, wrong: dict[str, list[str]]
) -> None:
    given = {"gradients": FINE, **{k: frozenset(v) if isinstance(v, str) else v for k, v in facts.items()}}
    assert decide(Facts(**given), "ab", limit) == Decision(clip, frozenset(use), frozenset(make), wrong)


def test_pipeline_stages_decide_by_the_norm_of_all() -> None:
    facts = Facts(FINE, held=frozenset("ab"))
    assert decide(facts, "ab", 10.0).use == {"a", "b"}
    assert decide(facts, "ab", 10.0, norm=11.0) == Decision(True, frozenset(), frozenset("ab"), {})
    assert not decide(facts, "ab", 4.0, norm=0.0).clip


@pytest.mark.parametrize(
    ("limit", "norm", "clips"),
    [(None, 1e9, False), (1.0, 1.0, True), (1.0, 0.99999, False), (1.0, 0.0, False), (1.0, NAN, False)],
)
def test_clipping_is_torchs(limit: float | None, norm: float, clips: bool) -> None:
    assert over(limit, norm) is clips
