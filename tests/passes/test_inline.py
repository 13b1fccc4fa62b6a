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
