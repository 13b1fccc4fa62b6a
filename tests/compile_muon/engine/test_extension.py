"""What extensions are asked, and when; what is refused; what they add to Dynamo's graph."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import compile_muon
from compile_muon import ConfigError, Extension, UnsupportedModelError
from compile_muon.engine.extension import hooks_of
from compile_muon.engine.hooks import Hooks
from compile_muon.passes import DYNAMO_PASSES, GraphKind, GraphPass, PassContext

EMPTY = {f.name for f in dataclasses.fields(Hooks) if getattr(Hooks(), f.name) == ()}


def doubled(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """What ReLUs return is doubled."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.relu):
        users = list(node.users)
        with gm.graph.inserting_after(node):
            twice = gm.graph.call_function(torch.mul, (node, 2))
        for user in users:
            user.replace_input_with(node, twice)
    return gm


class Twice(Extension):
    dynamo_passes = (GraphPass("twice", doubled, kinds=(GraphKind.DYNAMO,)),)


class Listening(Extension):
    """Notes each call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_forward(self, groups: frozenset[str], integers: Sequence[Tensor]) -> None:
        self.calls.append(f"before_forward {[list(x.shape) for x in integers]}")

    def dropped(self, sharded: Any) -> None:
        if sharded.name == "first.weight":
            self.calls.append("dropped")

    def before_step(self) -> None:
        self.calls.append("before_step")

    def check(self) -> None:
        self.calls.append("check")

    def facts(self, checks: Any) -> None:
        self.calls.append("facts")

    def after_commit(self, found_inf: Tensor | None) -> None:
        self.calls.append("after_commit")

    def state(self, sharded: Any) -> Mapping[str, Tensor]:
        return {"seen": torch.zeros(())}

    def loaded(self) -> None:
        self.calls.append("loaded")

    def metrics(self) -> Mapping[str, float]:
        return {"calls": float(len(self.calls)), "unknown": float("nan")}

    def totals(self) -> Mapping[str, int]:
        return {"all_calls": len(self.calls)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))[places]


X, PLACES = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 0])


def made(*extensions: Extension, **settings: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model()
    return model, compile_muon.MuonZero(model, muon_params=["first.weight"], extensions=extensions, **settings)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="muon_zero", options={"codegen": "eager", **options})


def test_hooks_are_called_in_their_order() -> None:
    listening = Listening()
    model, optimizer = made(listening)
    compiled(model)(X, PLACES).square().mean().backward()
    optimizer.step()
    step = ["before_step", "check", "facts", "after_commit", "dropped"]
    assert listening.calls == ["before_forward [[2]]", "dropped", *step]
    assert {name: optimizer.metrics().get(name) for name in ("calls", "unknown")} == {"calls": 7.0, "unknown": None}
    assert optimizer.totals()["all_calls"] == 7
    state = optimizer.state_dict()
    assert all(slots["seen"].item() == 0 for slots in state["state"].values())
    optimizer.load_state_dict(state)
    assert listening.calls[7:] == ["loaded"]
    assert optimizer.engine.extension(Listening) is listening and optimizer.engine.extension(Twice) is None


def test_what_is_not_overridden_is_not_called() -> None:
    hooks = hooks_of([Extension(), Twice()])
    assert [name for name in EMPTY if getattr(hooks, name)] == ["dynamo_passes"]
    assert hooks.state_provider.all_resident and hooks.peers is None and hooks.unrecorded is None
    assert hooks_of([Listening()]).unrecorded == "an extension may ask the host"
    listening = hooks_of([Listening()])
    assert {name for name in EMPTY if getattr(listening, name)} == EMPTY - {"dynamo_passes", "notify", "why_not_finite"}


def test_an_extension_that_refuses_a_step_leaves_all_as_it_was() -> None:
    class Refusing(Extension):
        def check(self) -> None:
            raise UnsupportedModelError("first.weight: is not to be trained")

    model, optimizer = made(Refusing())
    model(X, PLACES).square().mean().backward()
    before = model.first.bias.detach().clone()
    with pytest.raises(UnsupportedModelError, match="is not to be trained"):
        optimizer.step()
    assert torch.equal(model.first.bias, before)


def test_what_is_no_extension_of_this_optimizer_is_refused() -> None:
    class Clashing(Extension):
        def state(self, sharded: Any) -> Mapping[str, Tensor]:
            return {"exp_avg": torch.zeros(())}

    with pytest.raises(ConfigError, match=r"extensions = 'average': is no compile_muon\.Extension; give objects"):
        made("average")
    with pytest.raises(ConfigError, match=r"extensions = 'exp_avg': is another state of \w+\.\w+; use another name"):
        made(Clashing())
    used = Twice()
    made(used)
    with pytest.raises(ConfigError, match=r"extensions = 'Twice': belongs to another optimizer; make one for each"):
        made(used)


def test_dynamos_graph_goes_through_a_pipeline_that_is_printed(tmp_path: Path) -> None:
    assert [each.name for each in DYNAMO_PASSES] == ["inline_regions", "take_shards"]
    model, _ = made(Twice())
    plain = model(X, PLACES) - model.last.bias
    found = compiled(model, dump=str(tmp_path))(X, PLACES) - model.last.bias
    torch.testing.assert_close(found, 2 * plain)
    files = {path.name.partition(".dynamo.")[2]: path.read_text() for path in tmp_path.glob("*.dynamo.*")}
    assert list(sorted(files)) == ["00_before.py", "01_inline_regions.py", "02_twice.py", "03_take_shards.py"]
    assert "# made by twice" in files["02_twice.py"] and "# made by twice" not in files["00_before.py"]


def test_a_frame_of_two_optimizers_asks_each() -> None:
    class Both(nn.Module):
        def __init__(self, *models: nn.Module) -> None:
            super().__init__()
            self.models = nn.ModuleList(models)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            return sum(model(x, places) for model in self.models)

    (one, _), (two, _) = made(Twice()), made(second := Listening(), Twice())
    both = Both(one, two)
    found = compiled(both)(X, PLACES) - one.last.bias - two.last.bias
    torch.testing.assert_close(found, 2 * (both(X, PLACES) - one.last.bias - two.last.bias))
    assert second.calls == ["before_forward [[2]]"]
