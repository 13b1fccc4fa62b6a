"""What a step does, by tables: a mode is a function of settings and facts, a decision one of facts and mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from compile_muon.engine.decision import Decision, Facts, Mode, decide, mode_of, over

NAN = math.nan
FINE = {"a": 9.0, "b": 16.0}  # a norm of 5
LIMITS = {"none": None, "under": 10.0, "over": 4.0}

#: stages, speculating, later, held and limit -> the mode, and the decision: clip, use, make, wait; in groups of values
#: that make no difference. Of a, b and c, a and b have a gradient here, and c may have one on another rank.
TABLE: list[tuple[str, str, str, str, str, Mode, bool, str, str, bool]] = [
    ("no", "yes", "no", "-", "none under", Mode.IN_STEP, False, "", "ab", True),
    ("no", "yes", "no", "a", "none under", Mode.IN_STEP, False, "a", "b", True),
    ("no", "yes", "no", "ab abz", "none under", Mode.IN_STEP, False, "ab", "", False),
    ("no", "yes", "no", "- a ab abz", "over", Mode.IN_STEP, True, "", "ab", True),
    # what a step must know for its own course it waits for: some must be made, or the norm says whether all
    ("no", "yes", "yes", "-", "none under", Mode.IN_STEP, False, "", "ab", True),
    ("no", "yes", "yes", "a", "none under", Mode.IN_STEP, False, "a", "b", True),
    ("no", "yes", "yes", "ab abz", "under", Mode.IN_STEP, False, "ab", "", False),
    ("no", "yes", "yes", "- a ab abz", "over", Mode.IN_STEP, True, "", "ab", True),
    ("no", "yes", "yes", "ab abz", "none", Mode.LATER, False, "ab", "", False),
    # the device scales them to the limit, if there is one; of what this rank lacks it sends zeros
    ("no", "no", "no", "- a ab abz", "none", Mode.AT_ONCE, False, "", "abc", True),
    ("no", "no", "no", "- a ab abz", "under over", Mode.AT_ONCE, True, "", "abc", True),
    ("no", "no", "yes", "- a ab abz", "none", Mode.AT_ONCE_LATER, False, "", "abc", False),
    ("no", "no", "yes", "- a ab abz", "under over", Mode.AT_ONCE_LATER, True, "", "abc", False),
    ("yes", "no yes", "no", "-", "none under", Mode.TOGETHER, False, "", "ab", True),
    ("yes", "no yes", "no", "a", "none under", Mode.TOGETHER, False, "a", "b", True),
    ("yes", "no yes", "no", "ab abz", "none under", Mode.TOGETHER, False, "ab", "", False),
    ("yes", "no yes", "no", "- a ab abz", "over", Mode.TOGETHER, True, "", "ab", True),
]


def rows() -> Iterator[tuple[tuple[str, ...], Mode, Decision]]:
    """Each combination of settings and facts by itself."""
    for *given, mode, clip, use, make, wait in TABLE:
        decision = Decision(clip, frozenset(use), frozenset(make), wait, {})
        for one in itertools.product(*(str(values).split() for values in given)):
            yield one, mode, decision


def names(text: str) -> frozenset[str]:
    return frozenset(text.strip("-"))


@pytest.mark.parametrize(("given", "mode", "decision"), [pytest.param(*row, id=" ".join(row[0])) for row in rows()])
def test_a_step_follows_from_its_settings_and_facts(given: tuple[str, ...], mode: Mode, decision: Decision) -> None:
    stages, speculating, later, held, limit = given
    known = Facts(names("ab"), LIMITS[limit], names(held), names("abc"))
    assert mode is mode_of(known, speculating=speculating == "yes", later=later == "yes", together=stages == "yes")
    blind = mode.at_once or mode.later
    seen = known if blind else Facts(names("ab"), LIMITS[limit], names(held), names("abc"), FINE)
    assert decide(seen, mode) == decision


def test_the_table_has_every_combination_once() -> None:
    """But for checks that pipeline stages read in the next step: there are none."""
    every = itertools.product(("no", "yes"), ("no", "yes"), ("no", "yes"), ("-", "a", "ab", "abz"), LIMITS)
    assert sorted(given for given, _, _ in rows()) == sorted(one for one in every if one[0] == "no" or one[2] == "no")
    assert {mode for _, mode, _ in rows()} == set(Mode)


@pytest.mark.parametrize("mode", [Mode.IN_STEP, Mode.TOGETHER])
@pytest.mark.parametrize(
    ("facts", "limit", "use", "wrong"),
    [
        # whoever is not finite is named, and what follows from it is not
        (
            {"gradients": {"a": NAN, "b": math.inf}, "speculated": "ab", "directions": "a"},
            None,
            "ab",
            {"gradient": ["a", "b"]},
        ),
        ({"spoiled": {"momentum": ["b"]}, "speculated": "ab", "directions": "b"}, None, "ab", {"momentum": ["b"]}),
        ({"spoiled": {"momentum": [], "rate": ["muon lr"]}}, None, "", {"rate": ["muon lr"]}),
        ({"speculated": "ab", "directions": "b"}, None, "ab", {"direction": ["b"]}),
        # a direction that nobody uses may be what it likes
        ({"speculated": "a", "directions": "b"}, None, "a", {}),
        ({"speculated": "ab", "directions": "ab"}, 4.0, "", {}),
        # a norm that is not a number is over no limit: the step is refused for the gradient
        ({"gradients": {"a": NAN}, "speculated": "a"}, 4.0, "a", {"gradient": ["a"]}),
        ({"gradients": {"a": math.inf}, "speculated": "a"}, 4.0, "", {"gradient": ["a"]}),
    ],
)
def test_a_step_names_what_is_not_finite(
    mode: Mode, facts: dict[str, Any], limit: float | None, use: str, wrong: dict[str, list[str]]
) -> None:
    read = {"gradients": FINE, **{k: frozenset(v) if isinstance(v, str) else v for k, v in facts.items()}}
    decision = decide(Facts(names("ab"), limit, **read), mode)
    assert (decision.use, decision.wrong) == (names(use), wrong)


@pytest.mark.parametrize(("made", "wrong"), [("", {}), ("a", {"direction": ["a"]}), ("ab", {"direction": ["a", "b"]})])
def test_what_a_step_has_made_is_looked_at_before_it_is_written(
    made: Collection[str], wrong: dict[str, list[str]]
) -> None:
    assert Facts(gradients=FINE, directions=frozenset("abc")).wrong(made) == wrong


def test_pipeline_stages_decide_by_the_norm_of_all() -> None:
    def of_all(limit: float, norm: float) -> Decision:
        return decide(Facts(names("ab"), limit, names("ab"), names("ab"), FINE, total=norm), Mode.TOGETHER)

    assert of_all(10.0, 9.0).use == {"a", "b"}
    assert of_all(10.0, 11.0) == Decision(True, frozenset(), frozenset("ab"), True, {})
    assert not of_all(4.0, 0.0).clip


@pytest.mark.parametrize(
    ("limit", "norm", "clips"),
    [(None, 1e9, False), (1.0, 1.0, True), (1.0, 0.99999, False), (1.0, 0.0, False), (1.0, NAN, False)],
)
def test_clipping_is_torchs(limit: float | None, norm: float, clips: bool) -> None:
    assert over(limit, norm) is clips
