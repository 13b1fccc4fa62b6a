"""Graphs, checkpoints and messages are the stored ones, and differences are said in words."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from against import differences as differences_of_bits
from captures import CELLS
from digests import differences, summary
from stored import PARTS, WRITE, another_torch, graphs, stored, words
from torch.fx import Graph, GraphModule

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GROUPS = {"7": "shard:2 [0, 1]", "8": "shard:2 [0, 1]"}


def check(part: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    said = words(part, old, new)
    assert not said, "\n".join([*said, f"if that is meant: {WRITE}, and commit what it wrote"])


@pytest.mark.parametrize("cell", CELLS)
def test_lowered_graphs_are_the_stored_ones(cell: str) -> None:
    if reason := another_torch():
        pytest.skip(reason)
    old = {key: value for key, value in stored("graphs").items() if key.partition(" | ")[0] == cell}
    check("graphs", old, graphs({cell: CELLS[cell]}))


def test_every_stored_cell_is_captured() -> None:
    assert {key.partition(" | ")[0] for key in stored("graphs") if key != "torch"} == CELLS.keys()


@pytest.mark.parametrize("part", ["checkpoints", "messages"])
def test_checkpoints_and_messages_are_the_stored_ones(part: str) -> None:
    check(part, stored(part), PARTS[part]())


def toy(
    *, name: str = "x", late: bool = False, rate: float = 0.5, other: bool = False, group: str = "7"
) -> GraphModule:
    """A reduction beside a product, and the sum of both."""
    graph = Graph()
    x, y = graph.placeholder(name), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = torch.empty(4, 4)

    def call(target: Any, *args: Any) -> Any:
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(4, 4)
        return node

    product = None if late else call(aten.mm.default, x, y)
    sent = call(c10d.all_reduce.default, x, "sum", group)
    product = call(aten.mm.default, x, y) if product is None else product
    scaled = call(aten.mul.Tensor, product, rate)
    total = call(aten.add.Tensor, call(c10d.wait_tensor.default, sent), product if other else scaled)
    graph.output((total, scaled))
    return GraphModule(torch.nn.Module(), graph)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Differences of a toy that was changed."""
    axis = type("Axis", (), {"size": 2, "index": 0})()
    monkeypatch.setattr("digests.axis_of_group", lambda group: axis)
    return lambda **changes: differences(summary(toy(), GROUPS), summary(toy(**changes), GROUPS))


def test_names_of_nodes_and_groups_make_no_difference(said: Any) -> None:
    assert said(name="z", group="8") == []


def test_what_is_different_is_said_in_words(said: Any) -> None:
    sent = "the model's all_reduce over shard:2, {} bytes, behind {}, to matmul 1"
    moved = [f"- {sent.format(64, 'matmul 1')}", f"+ {sent.format(64, 'the start')}"]
    assert said(late=True) == [*moved, "same nodes, other order"]
    assert said(rate=0.5000001) == ["other arguments, shapes or strides of aten.mul.Tensor"]
    assert said(other=True) == ["the same operations read other nodes"]
    one, two = graphs_with(["aten.mm 1"], ["one"]), graphs_with(["aten.mm 3"], ["two"])
    assert words("graphs", {"stage 3 | forward": one}, {"stage 3 | forward": two, "stage 3 | inference": two}) == [
        "stage 3, forward: +2 aten.mm", "stage 3, forward: - one", "stage 3, forward: + two",
        "stage 3, inference: is new",
    ]  # fmt: skip
    old, new = {"muon": {"a": "float32[2]", "c": 1}}, {"muon": {"b": "float32[2]", "c": 2}}
    assert words("checkpoints", old, new) == ["muon: c: 2, not 1", "muon: a is gone", "muon: b is new"]
    old, new = {"ConfigError": [3, "a"], "warning": [1, "a"]}, {"ConfigError": [4, "b"], "warning": [1, "b"]}
    assert words("messages", old, new) == [
        "ConfigError: +1 messages", "warning: the words of some of them (python docs/errors.py lists them)",
    ]  # fmt: skip


def graphs_with(ops: list[str], collectives: list[str]) -> dict[str, Any]:
    counts = {name: f"{count} 0" for name, count in map(str.split, ops)}
    unique = str((ops, collectives))
    return {"digest": unique, "unordered": unique, "ops": counts, "collectives": collectives}


def test_one_bit_is_a_difference() -> None:
    one = {"weight": torch.tensor([0.0, 1.0]), "count": torch.tensor(3)}
    assert differences_of_bits(one, {name: value.clone() for name, value in one.items()}) == []
    assert differences_of_bits(one, {**one, "weight": torch.tensor([-0.0, 1.0])}) == ["weight: at most 0.0e+00 apart"]
    off = torch.nextafter(one["weight"], torch.tensor(2.0))
    assert differences_of_bits(one, {"weight": off, "state": one["count"]}) == [
        "weight: at most 1.2e-07 apart", "count: only here", "state: only there",
    ]  # fmt: skip
    assert differences_of_bits("ConfigError: x", one) == ["fails here: ConfigError: x"]


@pytest.mark.full
def test_runs_of_two_trees_are_compared() -> None:
    """The command ends; this test does not ask whether they differ."""
    folder = Path(__file__).parent
    if not (folder.parents[1] / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git repository here")
    command = [sys.executable, str(folder), "--against", "HEAD", "--cells", "stage 1, uncompiled*"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    assert "2 cells, of which" in done.stdout and "fails" not in done.stdout, done.stdout
