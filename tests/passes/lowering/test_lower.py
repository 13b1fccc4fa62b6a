"""Lowering: what each backward variant takes, returns and sends, stage by stage."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from compile_muon import MuonZero
from compile_muon.passes import GraphKind, Purpose, reduced_grads
from compile_muon.passes.collectives import collectives
from compile_muon.passes.markers import MARKERS

WORLD = 3
#: 2 is 1 but for what accumulates
STAGES = (0, 1, pytest.param(2, marks=pytest.mark.full), 3)


@pytest.fixture
def traced(uneven):
    """Of the same settings in all of these tests, so that each stage is traced once."""
    return functools.partial(uneven, ns_dtype="bfloat16")


def kinds(gm):
    return [kind for _, kind in collectives(gm)]


def newton_schulz(gm):
    return gm.graph.find_nodes(op="call_function", target=torch.ops.muon_zero.newton_schulz.default)


def outputs(gm):
    return len(gm.graph.output_node().args[0])


def inputs(gm):
    return len(gm.graph.find_nodes(op="placeholder"))


def values(gm):
    """The fake tensors of all outputs; None for what is not a tensor (a DeviceMesh may be one, torch 2.13)."""
    found = [None if node is None else node.meta.get("val") for node in gm.graph.output_node().args[0]]
    return [value if isinstance(value, torch.Tensor) else None for value in found]


def facts(value):
    return tuple(value.shape), value.dtype


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("extra", [False, True])
def test_the_request_describes_what_was_appended(stage, purpose, extra, traced):
    graphs = traced(1, WORLD, stage=stage)
    request = graphs.request(purpose, unreduced=extra, carried=extra)
    gm, _ = graphs.lowered(GraphKind.BACKWARD, request)
    grads = reduced_grads(graphs.backward)
    every = tuple(range(len(grads)))
    matrices = tuple(i for i in every if grads[i].spec.muon)
    # 13 rows go over 3 ranks unevenly, and the scalar is replicated even at stage 1: it accumulates all the same.
    assert len(matrices) == 3
    assert request.accumulated == (every if stage == 1 and purpose is Purpose.ACCUMULATE else ())
    assert request.speculated == (matrices if purpose is Purpose.SPECULATE else ())
    assert request.unreduced_inputs == (every if extra and stage == 1 and purpose is not Purpose.ACCUMULATE else ())
    assert request.carried_inputs == (matrices if extra and purpose is Purpose.SPECULATE else ())

    placeholders = gm.graph.find_nodes(op="placeholder")
    given = [facts(node.meta["val"]) for node in placeholders[inputs(graphs.backward) :]]
    assert given == [
        *((grads[i].spec.layout.shape, torch.float32) for i in request.unreduced_inputs),
        *((grads[i].spec.layout.local_shape, torch.float32) for i in request.carried_inputs),
    ]
    returned = [facts(value) for value in values(gm)[outputs(graphs.backward) :]]
    assert returned == [
        *((grads[i].spec.layout.shape, torch.float32) for i in request.accumulated),
        *((grads[i].spec.layout.local_shape, torch.bfloat16) for i in request.speculated),
        *([((3,), torch.int64)] if request.speculated else []),
    ]
    assert len(returned) == request.extra_outputs
    assert not [node for node in gm.graph.nodes if node.target in MARKERS]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_keep_their_places_and_shapes(stage, traced):
    """Whatever the variant, autograd gets one tensor of the shard's shape where it expects one."""
    graphs = traced(1, WORLD, stage=stage)

    def shapes(gm):
        found = values(gm)[: outputs(graphs.backward)]
        return [None if value is None else tuple(value.shape) for value in found]

    wanted = shapes(graphs.backward)
    specs = [grad.spec for grad in reduced_grads(graphs.backward)]
    assert sorted(s for s in wanted if s is not None) == sorted(spec.layout.local_shape for spec in specs)
    for purpose in Purpose:
        assert shapes(graphs.lowered(GraphKind.BACKWARD, purpose)[0]) == wanted


FORWARD = {0: [], 1: [], 2: [], 3: ["all_gather"]}
REDUCTION = {
    0: ["all_reduce"],
    # the scalar parameter cannot be sharded: one all-reduce beside the one reduce-scatter
    1: ["all_reduce", "reduce_scatter"],
    2: ["all_reduce", "reduce_scatter"],
    3: ["all_reduce", "reduce_scatter"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_forward_gathers_at_stage_three_only(stage, traced):
    assert kinds(traced(1, WORLD, stage=stage).lowered(GraphKind.FORWARD)[0]) == FORWARD[stage]


@pytest.mark.parametrize("stage", STAGES)
def test_reduce(stage, traced):
    gm, _ = traced(1, WORLD, stage=stage).lowered(GraphKind.BACKWARD, Purpose.REDUCE)
    assert kinds(gm) == FORWARD[stage] + REDUCTION[stage]
    assert not newton_schulz(gm)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulate_sends_nothing_at_stage_one(stage, traced):
    gm, _ = traced(1, WORLD, stage=stage).lowered(GraphKind.BACKWARD, Purpose.ACCUMULATE)
    assert kinds(gm) == (FORWARD[stage] + REDUCTION[stage] if stage != 1 else [])
    assert not newton_schulz(gm)


@pytest.mark.parametrize("stage", STAGES)
def test_speculate(stage, traced):
    gm, _ = traced(1, WORLD, stage=stage).lowered(GraphKind.BACKWARD, Purpose.SPECULATE)
    exchanged = ["all_to_all", "all_to_all"] if stage else ["all_gather"]
    assert kinds(gm) == FORWARD[stage] + REDUCTION[stage] + exchanged
    assert newton_schulz(gm)


def test_matrices_are_orthogonalized_once_over_all_ranks(traced):
    def on(rank):
        gm, _ = traced(rank, WORLD, stage=1).lowered(GraphKind.BACKWARD, Purpose.SPECULATE)
        return sum(len(node.args[0]) for node in newton_schulz(gm))

    assert sum(map(on, range(WORLD))) == 3


def test_world_one_has_no_collectives(traced):
    graphs = traced(0, 1, stage=3)
    for purpose in Purpose:
        assert kinds(graphs.lowered(GraphKind.BACKWARD, purpose)[0]) == []
    assert kinds(graphs.lowered(GraphKind.FORWARD)[0]) == []


class Returns(nn.Module):
    """Hands its weight out of the graph, as weight tying by hand and some losses do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x)), self.body.weight


def test_a_weight_that_leaves_the_graph_is_a_copy(world, trace):
    with world(0, 2):
        model = Returns()
        MuonZero(model, stage=2)
        graphs = trace(model, torch.randn(3, 6))
    gm, _ = graphs.lowered(GraphKind.FORWARD)
    returned = gm.graph.output_node().args[0][1]
    assert returned.target is torch.ops.aten.clone.default


def test_buckets_keep_to_their_size(traced):
    """Smaller buckets give more collectives; each stays below the cap unless one tensor alone exceeds it."""
    graphs = traced(1, WORLD, stage=3)
    cap = 600
    gm, _ = graphs.lowered(GraphKind.BACKWARD, Purpose.REDUCE, bucket_bytes=cap)
    found = {}
    for node, kind in collectives(gm):
        found.setdefault(kind, []).append(node.args[0].meta["val"].numel() * 4)
    assert len(found["all_gather"]) > 1
    assert len(found["reduce_scatter"]) > 1
    specs = [grad.spec for grad in reduced_grads(graphs.backward) if grad.spec.layout.sharded]
    padded = [spec.layout.chunk * WORLD * spec.layout.row_numel * 4 for spec in specs]
    padding = sum(padded) - sum(spec.layout.numel * 4 for spec in specs)
    assert max(found["reduce_scatter"]) <= max(cap + padding, *padded)
    assert sum(found["reduce_scatter"]) == sum(padded)
