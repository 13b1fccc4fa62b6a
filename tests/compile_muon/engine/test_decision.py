"""What a step does, by tables: its flags are a function of settings and facts, its decision one of facts."""

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest

from compile_muon.engine.decision import Decision, Facts, decide, over, planned

NAN = math.nan
FINE = {"a": 9.0, "b": 16.0}  # a norm of 5
LIMITS = {"none": None, "under": 10.0, "over": 4.0}

#: stages, speculating, later, ready and limit -> its flags, and the decision: clip, use, make, wait; in groups of
#: values that make no difference. Of a, b and c, a and b have a gradient here, and c may have one on another rank.
TABLE: list[tuple[str, str, str, str, str, str, bool, str, str, bool]] = [
    ("no", "yes", "no", "-", "none under", "wait", False, "", "ab", True),
    ("no", "yes", "no", "a", "none under", "wait", False, "a", "b", True),
    ("no", "yes", "no", "ab abz", "none under", "wait", False, "ab", "", False),
    ("no", "yes", "no", "- a ab abz", "over", "wait", True, "", "ab", True),
    # what a step must know for its own course it waits for: some must be made, or the norm says whether all
    ("no", "yes", "yes", "-", "none under", "wait", False, "", "ab", True),
    ("no", "yes", "yes", "a", "none under", "wait", False, "a", "b", True),
    ("no", "yes", "yes", "ab abz", "under", "wait", False, "ab", "", False),
    ("no", "yes", "yes", "- a ab abz", "over", "wait", True, "", "ab", True),
    ("no", "yes", "yes", "ab abz", "none", "", False, "ab", "", False),
    # the device scales them to the limit, if there is one; of what this rank lacks it sends zeros
    ("no", "no", "no", "- a ab abz", "none", "wait remake", False, "", "abc", True),
    ("no", "no", "no", "- a ab abz", "under over", "wait remake", True, "", "abc", True),
    ("no", "no", "yes", "- a ab abz", "none", "remake", False, "", "abc", False),
    ("no", "no", "yes", "- a ab abz", "under over", "remake", True, "", "abc", False),
    ("yes", "no yes", "no", "-", "none under", "wait", False, "", "ab", True),
    ("yes", "no yes", "no", "a", "none under", "wait", False, "a", "b", True),
    ("yes", "no yes", "no", "ab abz", "none under", "wait", False, "ab", "", False),
    ("yes", "no yes", "no", "- a ab abz", "over", "wait", True, "", "ab", True),
]


def rows() -> Iterator[tuple[tuple[str, ...], str, Decision]]:
    """Each combination of settings and facts by itself."""
    for *given, flags, clip, use, make, reads_again in TABLE:
        decision = Decision(clip, frozenset(use), frozenset(make), reads_again, {})
        for one in itertools.product(*(str(values).split() for values in given)):
            yield one, flags, decision


def names(text: str) -> frozenset[str]:
    return frozenset(text.strip("-"))


@pytest.mark.parametrize(("given", "flags", "decision"), [pytest.param(*row, id=" ".join(row[0])) for row in rows()])
def test_a_step_follows_from_its_settings_and_facts(given: tuple[str, ...], flags: str, decision: Decision) -> None:
    stages, speculating, later, ready, limit = given
    known = planned(
        Facts(names("ab"), LIMITS[limit], names(ready), names("abc")),
        speculating=speculating == "yes", later=later == "yes", together=stages == "yes",
    )  # fmt: skip
    assert (known.wait, known.remake) == ("wait" in flags, "remake" in flags)
    reads_first = known.wait and not known.remake
    assert decide(replace(known, gradients=FINE) if reads_first else known) == decision


def test_the_table_has_every_combination_once() -> None:
    """But for checks that pipeline stages read in the next step: there are none."""
    every = itertools.product(("no", "yes"), ("no", "yes"), ("no", "yes"), ("-", "a", "ab", "abz"), LIMITS)
    assert sorted(given for given, _, _ in rows()) == sorted(one for one in every if one[0] == "no" or one[2] == "no")
    assert {flags for _, flags, _ in rows()} == {"wait", "wait remake", "remake", ""}


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
    facts: dict[str, Any], limit: float | None, use: str, wrong: dict[str, list[str]]
) -> None:
    read = {"gradients": FINE, **{k: frozenset(v) if isinstance(v, str) else v for k, v in facts.items()}}
    decision = decide(Facts(names("ab"), limit, **read))
    assert (decision.use, decision.wrong) == (names(use), wrong)


@pytest.mark.parametrize(("made", "wrong"), [("", {}), ("a", {"direction": ["a"]}), ("ab", {"direction": ["a", "b"]})])
def test_what_a_step_has_made_is_looked_at_before_it_is_written(
    made: Collection[str], wrong: dict[str, list[str]]
) -> None:
    assert Facts(gradients=FINE, directions=frozenset("abc")).wrong(made) == wrong


def test_pipeline_stages_decide_by_the_norm_of_all() -> None:
    def of_all(limit: float, norm: float) -> Decision:
        return decide(Facts(names("ab"), limit, names("ab"), names("ab"), gradients=FINE, total=norm))

    assert of_all(10.0, 9.0).use == {"a", "b"}
    assert of_all(10.0, 11.0) == Decision(True, frozenset(), frozenset("ab"), True, {})
    assert not of_all(4.0, 0.0).clip


@pytest.mark.parametrize(
    ("limit", "norm", "clips"),
    [(None, 1e9, False), (1.0, 1.0, True), (1.0, 0.99999, False), (1.0, 0.0, False), (1.0, NAN, False)],
)
def test_clipping_is_torchs(limit: float | None, norm: float, clips: bool) -> None:
    assert over(limit, norm) is clips
