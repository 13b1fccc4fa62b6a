"""Products of settings, of which the suite runs a part: the interpreter takes seconds for what a GPU does at once."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def halved(axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrize by the product of ``axes``, of which every second case runs in campaigns alone. Every value stays,
    and every two values of two axes where a third axis has several. A key with commas is of several arguments."""
    cases = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        given, said = [], []
        for (names, values), place in zip(axes.items(), places, strict=True):
            each = values[place] if "," in names else [values[place]]
            given += each
            said += [str(value) if isinstance(value, (str, int, float)) else f"{names}{place}" for value in each]
        marks = pytest.mark.campaign if sum(places) % 2 else ()
        cases.append(pytest.param(*given, id="-".join(said), marks=marks))
    fixtures = [name for name in ("tile", "descriptors") if name in axes]
    return pytest.mark.parametrize(",".join(axes), cases, indirect=fixtures)
