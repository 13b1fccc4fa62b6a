"""Deduplicate merges a parameter's reductions and no others; what is saved for backward the golden gate stores."""

import torch
from torch import nn

from compile_muon import MuonZero
from compile_muon.passes import JOINT_PASSES, GraphKind, PassContext, run_passes
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import ParamSpec
from compile_muon.passes.markers import REDUCE_GRAD

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


def test_merged_gradients_are_the_sums_of_what_markers_give_in_eager_code():
    """There the markers reduce each contribution and autograd adds them."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = MuonZero(model, update="step")
    model(X).backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    options = {"codegen": "eager"}
    torch.compile(model, backend="muon_zero", options=options, fullgraph=True)(X).backward()
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
