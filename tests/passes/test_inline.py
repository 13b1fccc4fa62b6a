"""Splicing traced functions into a graph."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from compile_muon.passes.edit import inline


@pytest.fixture
def pair():
    """A graph of two inputs whose fake values are one object, as `like.meta["val"]` handed on makes them."""
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"] = b.meta["val"] = FakeTensorMode().from_tensor(torch.empty(3))
    graph.output((a,))
    return GraphModule(torch.nn.Module(), graph), a, b


def test_inputs_with_one_fake_value_stay_two_inputs(pair):
    gm, a, b = pair
    output = gm.graph.output_node()
    output.args = (tuple(inline(gm, output, lambda x, y: [x - y, y], [a, b])),)
    gm.recompile()
    x, y = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([1.0, 2.0, 3.0])
    assert [found.tolist() for found in gm(x, y)] == [[4.0, 4.0, 4.0], [1.0, 2.0, 3.0]]


def test_one_input_may_be_given_twice(pair):
    gm, a, _ = pair
    output = gm.graph.output_node()
    output.args = (tuple(inline(gm, output, lambda x, y: [x + y], [a, a])),)
    gm.recompile()
    assert gm(torch.ones(3), torch.zeros(3))[0].tolist() == [2.0, 2.0, 2.0]


def test_constants_must_be_inputs(pair):
    gm, a, _ = pair
    table = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(Exception, match="constant|fake|Fake"):
        inline(gm, gm.graph.output_node(), lambda x: [x + table], [a])


def test_what_many_compute_alike_is_computed_once(pair):
    """Rates and numbers of a dimension, whatever the types of numbers; no large tensor, and nothing that is random."""
    gm, a, b = pair

    def many(x, y):
        scaled = [(x * (1 - y[0])).view(3) for _ in range(4)]
        numbers = [torch.arange(8) ^ 3 for _ in range(3)] + [torch.zeros(2) + 1, torch.zeros(2) + True]
        random = [torch.rand(3) for _ in range(2)]
        large = [x.expand(2, 3) * 2.0 for _ in range(2)]
        return [*scaled, *numbers, *random, *large]

    output = gm.graph.output_node()
    made = inline(gm, output, many, [a, b])
    output.args = (tuple(made),)
    gm.recompile()
    names = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    counts = {name: sum(name in each for each in names) for name in ("mul", "xor", "rand", "view")}
    assert counts == {"mul": 1 + 2, "xor": 1, "rand": 2, "view": 0}
    x, y = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([0.25, 2.0, 3.0])
    torch.manual_seed(0)
    found = gm(x, y)
    torch.manual_seed(0)
    for one, other in zip(found, many(x, y), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_a_graph_that_writes_shares_nothing(pair):
    gm, a, b = pair

    def written(x, y):
        before = y[0] + 0
        y.add_(1)
        return [before, y[0] + 0]

    output = gm.graph.output_node()
    output.args = (tuple(inline(gm, output, written, [a, b])),)
    gm.recompile()
    assert [value.item() for value in gm(torch.zeros(3), torch.ones(3))] == [1.0, 2.0]
