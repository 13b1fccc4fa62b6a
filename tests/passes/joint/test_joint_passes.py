"""Deduplicate and recompute: what the joint graph and its halves look like afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from compile_muon import MuonZero
from compile_muon.passes import (
    JOINT_PASSES,
    LOWERING_PASSES,
    GraphKind,
    PassContext,
    Purpose,
    reduced_grads,
    run_passes,
)
from compile_muon.passes.collectives import collectives
from compile_muon.passes.errors import VerificationError
from compile_muon.passes.joint.recompute import is_view_or_cast
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import ParamSpec
from compile_muon.passes.markers import ORTHOGONALIZE, REDUCE_GRAD, UNSHARD, ReduceGrad, Unshard

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def count(gm, target):
    return len(gm.graph.find_nodes(op="call_function", target=target))


class Tied(nn.Module):
    """One matrix read by two modules, another read twice by one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.inner.weight
        self.twice = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.again(torch.tanh(self.inner(x)))
        return self.head(self.twice(torch.tanh(self.twice(x)))).square().mean()


def sharded(cls, **settings):
    torch.manual_seed(0)
    model = cls()
    return model, MuonZero(model, **{"ns_dtype": "float32", "ns_method": "standard", **settings})


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_one_unshard_and_one_reduction_per_parameter(size, world, trace):
    with world(0, size):
        model, _ = sharded(Tied, stage=3)
        graphs = trace(model, X)
    parameters = len(list(model.parameters()))
    assert count(graphs.joint, UNSHARD) > parameters, "the model must read weights repeatedly"
    assert count(graphs.joint, REDUCE_GRAD) > parameters
    assert count(graphs.rewritten, UNSHARD) == parameters
    assert count(graphs.rewritten, REDUCE_GRAD) == parameters
    states = {read.state for read in Unshard.all(graphs.rewritten)}
    assert len(states) == parameters


def test_the_merged_gradient_is_the_sum(reducing):
    model, _ = sharded(Tied, update="step")
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    torch.compile(model, backend=reducing, fullgraph=True)(X).backward()
    plain(X).backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-7, rtol=1e-6, msg=name)


def test_the_merged_gradient_is_the_sum_of_what_the_markers_give_in_eager(reducing):
    """The same graph without the pass: the markers themselves reduce each contribution and autograd adds them."""
    model, _ = sharded(Tied, update="step")
    model(X).backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend=reducing, fullgraph=True)(X).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, eager[name], atol=1e-7, rtol=1e-6)


def test_only_equal_reductions_merge():
    """Sums of two parameters' gradients, or of a gradient and something else, stay what they are."""
    text = ParamSpec(Layout((2, 2), 2), "float32", "float32", "float32", None).encode()
    graph = torch.fx.Graph()
    grad, state_a, state_b, hyper = (graph.placeholder(n) for n in ("grad", "state_a", "state_b", "hyper"))
    for node in (grad, state_a, state_b, hyper):
        node.meta["val"] = torch.zeros(2, 2)
    a = graph.call_function(REDUCE_GRAD, (grad, state_a, hyper, text))
    b = graph.call_function(REDUCE_GRAD, (grad, state_b, hyper, text))
    a.meta["val"] = b.meta["val"] = torch.zeros(2, 2)
    both = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
    plus = graph.call_function(torch.ops.aten.add.Tensor, (a, grad))
    graph.output((both, plus))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    gm = run_passes(gm, JOINT_PASSES[:1], PassContext(GraphKind.JOINT))
    assert count(gm, REDUCE_GRAD) == 2
    assert count(gm, torch.ops.aten.add.Tensor) == 2


# --- recompute --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3])
def test_every_unshard_and_what_only_reshapes_it_is_recomputed(stage, world, trace):
    with world(1, 2):
        model, _ = sharded(Tied, stage=stage, param_dtype=torch.bfloat16)
        graphs = trace(model, X.bfloat16())
    unshards = graphs.rewritten.graph.find_nodes(op="call_function", target=UNSHARD)
    stack = list(unshards)
    seen = 0
    while stack:
        node = stack.pop()
        seen += 1
        assert node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE, node
        assert "ac_graph_id" not in node.meta  # with one, other checkpointed regions would save it
        stack += [user for user in node.users if is_view_or_cast(user)]
    assert seen > len(unshards), "the model must have views of its weights"


def saved_weights(graphs):
    """Which parameters' weights, views or casts of them included, forward saves for backward."""
    saved = graphs.forward.graph.output_node().args[0][graphs.user_outputs :]
    found = []
    for node in saved:
        while node.op == "call_function" and is_view_or_cast(node):
            node = node.args[0]
        if node.target is UNSHARD:
            found.append(Unshard.of(node).state.name)
    return found


@pytest.mark.parametrize(
    ("size", "stage"),
    [
        (1, 3),
        (2, 0),
        (2, 3),
        *(pytest.param(2, stage, marks=pytest.mark.full) for stage in (1, 2)),
        *(pytest.param(1, stage, marks=pytest.mark.campaign) for stage in (0, 1, 2)),
    ],
)
def test_only_gathered_weights_are_saved_when_asked_to_and_only_once(stage, size, world, trace):
    with world(0, size):
        model, _ = sharded(Tied, stage=stage)
        default, kept = trace(model, X), trace(model, X, reshard_after_forward=False)
    needed = {read.state.name for read in Unshard.all(default.backward)}
    assert len(needed) == 3, "backward reads three matrices and no bias"
    gathers = stage == 3 and size == 2
    assert saved_weights(default) == []
    assert sorted(saved_weights(kept)) == (sorted(needed) if gathers else [])
    assert count(kept.backward, UNSHARD) == (0 if gathers else len(needed))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_master_weight_is_cast_in_forward_alone_when_asked_to(size, world, trace):
    casts = {}
    for again in (True, False):
        with world(0, size):
            model, _ = sharded(Tied, stage=0, param_dtype="bfloat16")
            graphs = trace(model, X.bfloat16(), reshard_after_forward=again)
        assert len(saved_weights(graphs)) == (0 if again else 3)
        forward, backward = (
            graphs.lowered(kind, reshard_after_forward=again)[0] for kind in (GraphKind.FORWARD, GraphKind.BACKWARD)
        )
        kinds = (torch.ops.prims.convert_element_type.default, torch.ops.aten.clone.default)
        casts[again] = [count(gm, kind) for gm in (forward, backward) for kind in kinds]
    cast, cloned, cast_again, cloned_again = casts[True]
    assert casts[False] == [cast, cloned, cast_again - 3, cloned_again] and cast_again >= 3


def test_a_saved_weight_is_gathered_in_forward_only(world, trace):
    with world(0, 2):
        model, _ = sharded(Tied, stage=3)
        kept = trace(model, X, reshard_after_forward=False)
    forward, _ = kept.lowered(GraphKind.FORWARD, reshard_after_forward=False)
    backward, _ = kept.lowered(GraphKind.BACKWARD, reshard_after_forward=False)
    assert "all_gather" in [kind for _, kind in collectives(forward)]
    assert [kind for _, kind in collectives(backward)] == ["reduce_scatter"]
    with pytest.raises(VerificationError, match="saved for backward"):
        kept.lowered(GraphKind.FORWARD)


# --- what the partitioner makes of it ---------------------------------------------------------------------------------


def test_momentum_reaches_backward_though_directions_are_inserted_there(trace):
    """`reduce_grad` carries state and hyper, so both are saved for the graph that may speculate."""
    model, optimizer = sharded(Tied)
    graphs = trace(model, X)
    muon = [row.name for row in optimizer.summary().rows if row.algorithm == "muon"]
    assert muon == ["inner.weight", "twice.weight"]
    grads = reduced_grads(graphs.backward)
    assert [grad.spec.layout.shape for grad in grads if grad.speculates] == [(6, 6), (6, 6)]
    for grad, reduction in zip(grads, ReduceGrad.all(graphs.backward), strict=True):
        state = graphs.backward.graph.find_nodes(op="placeholder")[grad.state_index]
        assert reduction.state is state
        assert state.meta["val"].shape == (grad.spec.layout.local_shape if grad.spec.muon else (0,))
        assert reduction.hyper.op == "placeholder"
    assert count(graphs.forward, REDUCE_GRAD) == 0
    assert [count(gm, ORTHOGONALIZE) for gm in (graphs.joint, graphs.rewritten, graphs.backward)] == [0, 0, 0]
    asked, _ = graphs.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, LOWERING_PASSES[:2])
    assert count(asked, ORTHOGONALIZE) == len(muon)


def test_frozen_parameters_get_no_reduction(trace):
    torch.manual_seed(0)
    model = Tied()
    model.twice.weight.requires_grad_(False)
    MuonZero(model)
    graphs = trace(model, X)
    assert count(graphs.rewritten, UNSHARD) == len(list(model.parameters()))
    assert count(graphs.rewritten, REDUCE_GRAD) == len(list(model.parameters())) - 1
    assert len(graphs.request(Purpose.SPECULATE).speculated) == 1
