"""Requests of a backward that its gradients do not allow are refused by index, shape and remedy."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from compile_muon.passes import (
    LOWERING_PASSES,
    BackwardRequest,
    GraphKind,
    PassContext,
    Purpose,
    reduced_grads,
    run_passes,
)
from compile_muon.passes.collectives import collectives
from compile_muon.passes.errors import PassContractError, RequestError
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.markers import ReduceGrad

ACCUMULATE, REDUCE, SPECULATE = Purpose
FREE, ADDED, CARRIED = (False, False), (True, False), (False, True)


def backward_graph(stage):
    """Reductions on one of two ranks, of three matrices and a vector."""
    graph, fake = Graph(), FakeTensorMode()

    def placeholder(name, *shape):
        node = graph.placeholder(name)
        node.meta["val"] = fake.from_tensor(torch.empty(shape), static_shapes=True)
        return node

    reduced, hyper = [], placeholder("hyper", 2)
    for i, shape in enumerate([(7, 4), (2, 5), (6, 6), (5,)]):
        how = (True, "standard", (3.4, -4.8, 2.0), 1.0, (), "float32", 1e-7, "owner")
        muon = MuonSpec(1, *shape, *how) if len(shape) == 2 else None
        spec = ParamSpec(Layout(shape, stage, Axis("shard", 2, 0, "g")), "float32", "float32", "float32", muon)
        state = placeholder(f"state_{i}", *spec.layout.local_shape)
        reduced.append(ReduceGrad.insert(graph, placeholder(f"grad_{i}", *shape), state, hyper, spec).node)
    graph.output(tuple(reduced))
    return GraphModule(torch.nn.Module(), graph)


def lower(gm, rows, passes=LOWERING_PASSES):
    request = BackwardRequest(*zip(*rows, strict=True)) if rows else None
    return run_passes(gm, passes, PassContext(GraphKind.BACKWARD, request=request))


def test_lower_alone_refuses_what_is_missing():
    with pytest.raises(RequestError, match="without a request"):
        lower(backward_graph(1), [], LOWERING_PASSES[2:])
    without = tuple(p for p in LOWERING_PASSES if p.name != "insert_orthogonalize")
    with pytest.raises(PassContractError, match="3 directions asked for, 0 inserted"):
        lower(backward_graph(1), [(SPECULATE, *FREE)] * 3 + [(REDUCE, *FREE)], without)


def test_a_gradient_that_something_else_reads_is_not_speculated_on():
    """Reduced it may be, and the collective is waited for ahead of its reader."""
    gm = backward_graph(2)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        norm = gm.graph.call_function(torch.ops.aten.sum.default, (ReduceGrad.all(gm)[0].node,))
        norm.meta["val"] = torch.zeros(())
    output.args = ((*output.args[0], norm),)
    grads = reduced_grads(gm)
    assert BackwardRequest.of(grads, SPECULATE).purposes == (REDUCE, SPECULATE, SPECULATE, REDUCE)
    refused = r"gradient 0 of shape \(7, 4\): .*does not return untouched"
    with pytest.raises(RequestError, match=refused):
        lower(gm, [(SPECULATE, *FREE)] * 3 + [(REDUCE, *FREE)])
    lowered = lower(gm, [(purpose, *FREE) for purpose in BackwardRequest.of(grads, SPECULATE).purposes])
    assert [kind for _, kind in collectives(lowered)] == ["reduce_scatter", "all_to_all", "all_to_all"]
