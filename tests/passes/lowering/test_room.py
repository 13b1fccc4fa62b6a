"""What a Newton-Schulz call is given: the room that backward has left behind, and a gibibyte at least."""

import pytest
import torch
from torch import nn

import compile_muon
from compile_muon.engine import frame
from compile_muon.kernels.call_plan import MEMORY_LIMIT
from compile_muon.passes.lowering import room
from compile_muon.passes.pipeline import GraphKind, GraphPass, PassContext

WIDTH, ROWS, LAYERS = 8, 2**12, 3
SAVED = ROWS * WIDTH * 4 * LAYERS  # what each layer's ReLU leaves
WEIGHTS = WIDTH * WIDTH * 4 * LAYERS


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def limits(monkeypatch: pytest.MonkeyPatch, least: int = 0, **settings: object) -> dict[GraphKind, list[int]]:
    """Of the calls of a step, by graph."""
    found: dict[GraphKind, list[int]] = {}
    make_room = room.ROOM.rewrite

    def noting(gm: torch.fx.GraphModule, ctx: PassContext) -> torch.fx.GraphModule:
        gm = make_room(gm, ctx)
        calls = gm.graph.find_nodes(op="call_function", target=torch.ops.muon_zero.newton_schulz.default)
        found.setdefault(ctx.kind, []).extend(call.args[8] for call in calls)
        return gm

    passes = tuple(GraphPass(p.name, noting, kinds=p.kinds) if p is room.ROOM else p for p in frame.LOWERING_PASSES)
    monkeypatch.setattr(frame, "LOWERING_PASSES", passes)
    monkeypatch.setattr(room, "MEMORY_LIMIT", least)
    model = Deep()
    optimizer = compile_muon.MuonZero(model, stage=0, **settings)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    run(torch.zeros(ROWS, WIDTH)).backward()
    optimizer.step()
    return {kind: own for kind, own in found.items() if own}


@pytest.mark.parametrize(("kind", "settings"), [(GraphKind.BACKWARD, {}), (GraphKind.STEP, {"update": "step"})])
def test_a_call_has_what_forward_had_saved(kind, settings, monkeypatch):
    """Less what there is beside it: gradients, momenta's updates, directions; and a gibibyte at least."""

    def limit(least=0, **more):
        with monkeypatch.context() as patched:
            (found,) = limits(patched, least, **settings, **more)[kind]
            return found

    assert SAVED - 4 * WEIGHTS <= limit() <= SAVED
    if kind is GraphKind.BACKWARD:
        assert limit(MEMORY_LIMIT) == MEMORY_LIMIT and limit(ns_memory_limit=12345) == 12345


def node(graph, target, *args, shape=None):
    made = graph.call_function(target, args)
    if shape is not None:
        made.meta["val"] = torch.empty(shape, device="meta")
    return made


def test_saved_are_values_that_forward_made_for_backward_alone():
    """No input, which is the model's; nothing that is returned as well, which the loop may keep; views of one by it."""
    graph = torch.fx.Graph()
    weight = graph.placeholder("weight")
    weight.meta["val"] = torch.empty(4, 4, device="meta")
    hidden = node(graph, torch.ops.aten.relu.default, weight, shape=(4, 4))
    turned, flat = (node(graph, torch.ops.aten.t.default, x, shape=(4, 4)) for x in (hidden, weight))
    result = node(graph, torch.ops.aten.exp.default, hidden, shape=(4, 4))
    graph.output((result, result, hidden, turned, flat, weight))
    forward = torch.fx.GraphModule(nn.Module(), graph)
    assert room.saved_by(forward, 1, ()) == {hidden.name: hidden.name, turned.name: hidden.name}
    assert room.saved_by(forward, 1, (2,)) == {turned.name: hidden.name}
