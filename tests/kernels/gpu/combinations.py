"""Settings of Triton's kernels, and products of them, of which the suite runs a part: the interpreter takes seconds for
what a GPU does at once."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from compile_muon.kernels.gpu.model import Tile

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALVES = [torch.float16, torch.bfloat16]
# Sums of small integers are exact in both, and the interpreter computes both in float32.
EXACT = HALVES[1:] if INTERPRETED else HALVES
DOUBLE = Tile(rows=16, cols=32, depth=16, group=2, stages=2, warps=4)
SQUARE = Tile(rows=32, cols=32, depth=32, group=3, stages=2, warps=4)
LOADS = ["pointers", "descriptors"]


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
