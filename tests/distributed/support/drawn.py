"""Values of settings, good and bad, drawn from the range that each field states in words (``taken``).

What a field says and what it checks are two things: a good value that is refused and a bad one that is taken are errors
of one of them.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st

from compile_muon import config as settings
from compile_muon.config.checked import Checked
from compile_muon.config.settings import ARGUMENTS

HUGE = 10**400
#: what few settings take
OTHERS = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 1.5, "1", "auto", "", "a\0b", [1.0], {}, math.nan, math.inf, -math.inf, HUGE,
        -HUGE, 1j,
    ]
)  # fmt: skip
#: of what only the field can tell whether it is one
EXAMPLES: dict[str, list[Any]] = {
    "a triple": [[3, -4.5, 2], (1.0, 2.0, 3.0)],
    "a triple per step": [[[1, 2, 3], (4, 5, 6)]],
    "name patterns": [["a.*"], ("a", "b.*")],
    "a predicate": [lambda name, param: True],
    "rates by name": [{"beta2": 0.75}],
    "a file": [],
    "a list of them": [["a", "b.c"]],
    "a list of mappings": [[{"params": "*.q", "lr": 0.5}]],
    "a mapping of patterns for groups": [{"*.q": {"lr": 0.5}}, {"*.q": {"weight_decay": 0.5}, "*.k": {"lr": 0.1}}],
    "a mapping of patterns for muon_views": [
        {"*.q": {"split": [8, 4]}},
        {"*.q": {"heads": 2}, "*.o": {"dim": 1, "heads": 2}},
    ],
}


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b": a config that says nothing else."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def params(**given: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Muon", "params": given}}


def adamw(**given: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": given}}


@dataclasses.dataclass(frozen=True)
class Range:
    """Values of a field: ``holds`` says whether a value is one (None where only the field can tell); ``good`` and
    ``bad`` are values, near its ends above all; ``said`` is what an error says to a number outside."""

    holds: Callable[[Any], bool] | None
    good: st.SearchStrategy[Any]
    bad: st.SearchStrategy[Any] = st.nothing()
    said: str = ""


def _number(opening: str = "[", high: float = math.inf, closing: str = ")") -> Range:
    def holds(value: Any) -> bool:
        if type(value) not in (int, float):
            return False
        return (value > 0 or value == 0 and opening == "[") and (value < high or value == high and closing == "]")

    some = st.floats(0, min(high, 1e3), exclude_min=opening == "(", exclude_max=closing == ")")
    ends = st.sampled_from([-1e-9, -0.5, -1, 0, 0.0, high, high * 1.5])
    return Range(lambda value: holds(value) and value != HUGE, some | st.just(min(high, 2.0) / 2), ends,
                 f"{opening}0, {high:g}{closing}")  # fmt: skip


def _integer(low: int, high: int | None) -> Range:
    most = 2**63 - 1 if high is None else high
    said = f"an integer from {low}" if high is None else f"an integer from {low} to {high}"
    some = st.integers(low, min(most, low + 200)) | st.just(most)
    ends = st.sampled_from([low - 1, low + 0.5, most + 1])
    return Range(lambda value: type(value) is int and low <= value <= most, some, ends, said)


def _choice(*allowed: Any) -> Range:
    words = [word for word in allowed if isinstance(word, str)]
    near = [word[1:] for word in words] + [word.upper() for word in words] + [f"{word}s" for word in words]
    return Range(
        lambda value: any(type(value) is type(own) and value == own for own in allowed), st.sampled_from(allowed),
        st.sampled_from(near) if near else st.nothing(),
    )  # fmt: skip


def _pair(below: float, bad: list[Any]) -> Range:
    one = _number(high=below)
    return Range(
        lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and all(map(one.holds, value)),
        st.tuples(one.good, one.good), st.sampled_from(bad),
    )  # fmt: skip


def _rate(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor) and not value.dim() and not value.is_complex() and 0 <= float(value) < math.inf
    )


def _parts(words: str, field: str) -> Iterator[Range]:
    """The range of each alternative."""
    if choices := re.findall(r'"([^"]+)"', words):
        yield _choice(*choices)
    for phrase in re.split(r",(?![^\[(]*[\])])", re.sub(r'"[^"]+"', "", words)):
        phrase = phrase.strip().removeprefix("or").strip()
        number = re.fullmatch(r"a number (?:in ([\[(])0, ([\d.]+)([\])])|(from|above) 0)", phrase)
        integer = re.fullmatch(r"an integer from (\d+)(?: to (\d+))?", phrase)
        if number:
            opening, high, closing, word = number.groups()
            yield _number(opening, float(high), closing) if high else _number("[" if word == "from" else "(")
        elif integer:
            yield _integer(int(integer[1]), integer[2] and int(integer[2]))
        elif phrase in ("-1", "False", "None", "a boolean"):
            yield _choice(*{"-1": (-1,), "False": (False,), "None": (None,), "a boolean": (True, False)}[phrase])
        elif phrase == "a tensor of one":
            wrong = st.sampled_from([[0.1], -1.0, math.nan, 1j])
            yield Range(_rate, st.floats(0, 1).map(torch.tensor), wrong.map(torch.tensor))
        elif phrase == "two numbers in [0, 1)":
            yield _pair(1.0, [(0.5,), "ab", 0.9, (0.9, None), (0.5, 1.0), (-0.1, 0.5), (HUGE, 0.5)])
        elif phrase == "a list [muon, adamw] of them":
            yield _pair(math.inf, [[], [0.5], [0.5] * 3, [0.5, -1]])
        elif phrase == "a path":
            some = st.sampled_from(["graphs", "a/b.c"])
            yield Range(lambda value: isinstance(value, str) and value != "" and "\0" not in value, some)
        elif phrase.startswith("fields of "):
            name = phrase.removeprefix("fields of ")
            kind = settings.WarmupLR if name == "ScheduleConfig" else getattr(settings, name)
            alone = choices == []  # else a mapping or a word stands for it
            yield Range((lambda value, kind=kind: isinstance(value, kind)) if alone else None, st.builds(kind))
        elif phrase:
            examples = EXAMPLES[f"{phrase} for {field}" if phrase == "a mapping of patterns" else phrase]
            yield Range(None, st.sampled_from(examples) if examples else st.nothing())


def range_of(kind: type[Checked], name: str) -> Range:
    """The range of a field, as its own words have it."""
    field = kind.__dataclass_fields__[name]
    parts = list(_parts(field.metadata["values"](), name))
    if field.default is None and not field.metadata["needed"]:
        parts.append(_choice(None))
    good = st.one_of([part.good for part in parts])
    tests = [part.holds for part in parts]
    if None in tests or name == "offload_param":  # which DeepSpeed's ways to say that nothing is offloaded are, too
        return Range(None, good)

    def holds(value: Any) -> bool:
        return any(test(value) for test in tests if test is not None)

    bad = st.one_of([part.bad for part in parts]) | OTHERS
    return Range(holds, good, bad.filter(lambda value: not holds(value)), parts[0].said if len(parts) == 1 else "")


def _records(kind: type[Checked] = Checked) -> Iterator[type[Checked]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _records(sub)


#: every field of every section
FIELDS = sorted({(kind, field.name) for kind in _records() for field in dataclasses.fields(kind)}, key=str)


@st.composite
def keywords(draw: st.DrawFn, most: int = 8) -> dict[str, Any]:
    """Some arguments of MuonZero, with good values."""
    names = draw(st.lists(st.sampled_from(sorted(ARGUMENTS)), max_size=most, unique=True))
    return {name: draw(range_of(*ARGUMENTS[name]).good) for name in names}
