"""Values survive as they were, or are refused by name."""

import json
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from compile_muon import CheckpointError
from compile_muon.checkpoint.values import Values

EXAMPLES: dict[str, Any] = {
    "none": None,
    "numbers": [True, 0, -(2**70), 1.5, 1e-320, -0.0],
    "text": {"ä\ud800\n": "ä\ud800\n"},
    "tuple": (1, (2, []), ["x"]),
    "keys": {1: "a", (2, 3): "b", None: {"c": 1.0}},
    "reserved": {"!": "tensor", "at": "nowhere"},
    "milestones": Counter({30: 1, 60: 2}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_values_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    values = Values()
    values.put(name, EXAMPLES[name])
    values.write(tmp_path / "x")
    found = Values.read(tmp_path, "x", ["x.safetensors"] if (tmp_path / "x.safetensors").exists() else []).get(name)
    assert found == EXAMPLES[name] and type(found) is type(EXAMPLES[name])
    assert str(found) == str(EXAMPLES[name])  # True and 1, 0.0 and -0.0


def test_no_two_tensors_are_one_and_no_number_is_too_long(tmp_path: Path) -> None:
    """Paths that spell the same, within a value, over values and over ranks, came back as the last of them."""
    x = [torch.full((2,), float(i)) for i in range(8)]
    here, there, ours = Values(), Values(), Values()
    here.put("a", {"b": {"c": x[0]}, "b.c": x[1], "d": [x[2]], "d[0]": x[3], "\ud800": x[4]})
    here.put("a.b", {"c": x[5]})
    there.put("a.b.c", x[6])
    there.put("a.b", {"c": x[7], "long": -(10**5000)})
    for name, values in (("here", here), ("there", there)):
        values.write(tmp_path / name)
        ours.named |= Values.read(tmp_path, name, [f"{name}.safetensors"]).named
    a, b = ours.get("a"), ours.get("a.b")
    found = [a["b"]["c"], a["b.c"], a["d"][0], a["d[0]"], a["\ud800"], x[5], ours.get("a.b.c"), b["c"]]
    assert torch.equal(torch.stack(found), torch.stack(x)) and b["long"] == -(10**5000)
    del ours.named["a.b.c"]
    assert torch.equal(ours.get("a")["b"]["c"], x[0])


def test_tensors_and_what_json_has_no_word_for(tmp_path: Path) -> None:
    tensors = [torch.tensor(2.5), torch.zeros(0, 3), torch.randn(4, 3).T, torch.ones(2, dtype=torch.bfloat16)]
    values = Values()
    values.put("all", OrderedDict(tensors=tensors, odd=[math.inf, -math.inf, math.nan]))
    values.write(tmp_path / "x")
    text = (tmp_path / "x.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    found = Values.read(tmp_path, "x", ["x.safetensors"] if (tmp_path / "x.safetensors").exists() else []).get("all")
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, found["tensors"], strict=True))
    assert found["odd"][:2] == [math.inf, -math.inf] and math.isnan(found["odd"][2])


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "it"),
        ([1, {"a": (set(),)}], "it[1].a[0]"),
        (numpy.float64(1.0), "it"),
        ({"x": Path()}, "it.x"),
        ({b"k": 1}, "it, a key"),
        (lambda: 0, "it"),
        ([torch.zeros(2, dtype=torch.complex128)], "it[0]"),
        (torch.eye(2).to_sparse(), "it"),
    ],
)
def test_other_types_are_refused_by_name(value: object, where: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Values().put("it", value)
    assert str(caught.value).startswith(f"{where} = ") and "convert it" in str(caught.value)


def test_digests_tell_bits_apart() -> None:
    def digest(value: object) -> str:
        values = Values()
        values.put("x", value)
        return values.digests()["x"]

    different = [1, 1.0, True, "1", (1,), [1], torch.ones(1), torch.ones(1, 1), torch.ones(1).int(), torch.zeros(1)]
    assert len({digest(value) for value in different}) == len(different)
    assert digest([torch.ones(2), 3]) == digest([torch.ones(2), 3])
