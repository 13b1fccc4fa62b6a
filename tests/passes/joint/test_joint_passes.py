"""Deduplicate and recompute: what they leave apart, and what is saved for backward when asked to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_muon import MuonZero
from compile_muon.passes import JOINT_PASSES, GraphKind, PassContext, run_passes
from compile_muon.passes.joint.recompute import is_view_or_cast
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import ParamSpec
from compile_muon.passes.markers import REDUCE_GRAD, UNSHARD, Unshard

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def count(gm, target):
    return len(gm.graph.find_nodes(op="call_function", target=target))


class Tied(nn.Module):
    """One matrix read by two modules, another read twice by one."""

    def __init__(self):
        super().__init__()
        self.inner, self.again = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.again.weight = self.inner.weight
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.again(torch.tanh(self.inner(x)))
        return self.head(self.twice(torch.tanh(self.twice(x)))).square().mean()


def test_merged_gradients_are_the_sums_of_what_markers_give_in_eager_code(reducing):
    """Where the markers themselves reduce each contribution and autograd adds them."""
    torch.manual_seed(0)
    model = Tied()
    MuonZero(model, update="step")
    model(X).backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend=reducing, fullgraph=True)(X).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, eager[name], atol=1e-7, rtol=1e-6, msg=name)


def test_only_equal_reductions_merge():
    """Sums of two parameters' gradients, or of a gradient and something else, stay what they are."""
    text = ParamSpec(Layout((2, 2), 2), "float32", "float32", "float32", None).encode()
    graph = torch.fx.Graph()
    grad, state_a, state_b, hyper = (graph.placeholder(n) for n in ("grad", "state_a", "state_b", "hyper"))
    a, b, c = (graph.call_function(REDUCE_GRAD, (grad, state, hyper, text)) for state in (state_a, state_b, state_b))
    for node in (grad, state_a, state_b, hyper, a, b, c):
        node.meta["val"] = torch.zeros(2, 2)
    both, plus = (graph.call_function(torch.ops.aten.add.Tensor, pair) for pair in ((a, b), (c, grad)))
    graph.output((both, plus))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    gm = run_passes(gm, JOINT_PASSES[:1], PassContext(GraphKind.JOINT))
    assert (count(gm, REDUCE_GRAD), count(gm, torch.ops.aten.add.Tensor)) == (3, 2)


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 0), (2, 3)])
def test_only_gathered_weights_are_saved_when_asked_to_and_only_once(stage, size, world, trace):
    with world(0, size):
        model = Tied()
        MuonZero(model, stage=stage)
        default, kept = trace(model, X), trace(model, X, reshard_after_forward=False)
    needed, gathers = {read.state.name for read in Unshard.all(default.backward)}, stage == 3 and size == 2
    assert count(default.joint, UNSHARD) > count(default.rewritten, UNSHARD) == len(list(model.parameters()))
    assert len(needed) == 3, "backward reads three matrices and no bias"

    def saved(graphs):
        found = graphs.forward.graph.output_node().args[0][graphs.user_outputs :]
        for node in found:
            while node.op == "call_function" and is_view_or_cast(node):
                node = node.args[0]
            if node.target is UNSHARD:
                yield Unshard.of(node).state.name

    assert not list(saved(default)) and sorted(saved(kept)) == (sorted(needed) if gathers else [])
    assert count(kept.backward, UNSHARD) == (0 if gathers else len(needed))
