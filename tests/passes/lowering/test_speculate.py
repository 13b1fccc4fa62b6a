"""SPECULATE: the gradient as ever, and beside it a direction with the fingerprint of what it was made from."""

from __future__ import annotations

import copy

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
from compile_muon.passes.fingerprint import fingerprint
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.markers import ORTHOGONALIZE, REDUCE_GRAD, Orthogonalize, ReduceGrad

ACCUMULATE, REDUCE, SPECULATE = Purpose
JORDAN = (3.4445, -4.7750, 2.0315) * 5
HYPER = torch.tensor([0.05, 0.95])
# the last one is not a Muon matrix
SHAPES = [(7, 4), (2, 5), (6, 6), (5,)]


def specs_of(rank, world, group, stage, dtype="float32"):
    specs = []
    for shape in SHAPES:
        exchange = "owner" if world > 1 else "local"
        muon = (
            MuonSpec(1, *shape, True, "standard", JORDAN, 1.0, (), dtype, 1e-7, exchange) if len(shape) == 2 else None
        )
        specs.append(
            ParamSpec(Layout(shape, stage, Axis("shard", world, rank, group)), "float32", "float32", "float32", muon)
        )
    return specs


def backward_graph(specs):
    """Placeholders (whole gradients, states, hyper), one reduction each, averaged gradients as outputs."""
    graph = Graph()
    fake = FakeTensorMode()

    def placeholder(name, *shape):
        node = graph.placeholder(name)
        node.meta["val"] = fake.from_tensor(torch.empty(shape), static_shapes=True)
        return node

    grads = [placeholder(f"grad_{i}", *spec.layout.shape) for i, spec in enumerate(specs)]
    states = [placeholder(f"state_{i}", *(s.layout.local_shape if s.muon else (0,))) for i, s in enumerate(specs)]
    hyper = placeholder("hyper", 2)
    reduced = [
        ReduceGrad.insert(graph, grad, state, hyper, spec)
        for grad, state, spec in zip(grads, states, specs, strict=True)
    ]
    graph.output(tuple(each.node for each in reduced))
    return GraphModule(torch.nn.Module(), graph)


def lower(gm, request, passes=LOWERING_PASSES):
    return run_passes(copy.deepcopy(gm), passes, PassContext(GraphKind.BACKWARD, request=request))


def request(*rows):
    return BackwardRequest(*zip(*rows, strict=True))


def values_of(specs, rank):
    """What a rank brings: its own whole gradients and sums of earlier ones, its rows of the momenta and of `.grad`."""
    own, common = torch.Generator().manual_seed(1 + rank), torch.Generator().manual_seed(0)
    grads, earlier = ([torch.randn(spec.layout.shape, generator=own) for spec in specs] for _ in range(2))

    def shard(spec):
        whole = torch.randn(spec.layout.shape, generator=common)
        return whole[slice(*spec.layout.shard_rows(rank))].clone() if spec.layout.sharded else whole

    states = [shard(spec) if spec.muon else torch.empty(0) for spec in specs]
    carried = [shard(spec) for spec in specs]
    return grads, earlier, states, carried


def run_on_ranks(threads, size, stage, wanted, dtype="float32"):
    """Lower `wanted` for each rank, run the graphs side by side; see :func:`compare`."""
    # Tracing is not for threads, so the graphs are made ahead.
    (group,) = set(threads(size, lambda rank, group: group))
    specs = [specs_of(rank, size, group, stage, dtype) for rank in range(size)]
    # Without any direction: what is in `.grad` must not depend on it.
    plain = BackwardRequest(
        tuple(REDUCE if purpose is SPECULATE else purpose for purpose in wanted.purposes),
        wanted.unreduced,
        (False,) * len(SHAPES),
    )
    graphs = [(lower(backward_graph(each), wanted), lower(backward_graph(each), plain)) for each in specs]
    done = threads(size, lambda rank, group: compare(rank, specs[rank], wanted, *graphs[rank]))
    assert done == [True] * size


def compare(rank, specs, wanted, lowered, plain):
    """Run the lowered graph of `wanted` on this rank and compare every output with the markers run by themselves."""
    grads, earlier, states, carried = values_of(specs, rank)
    own = [*grads, *states, HYPER]
    added = [earlier[i] for i in wanted.unreduced_inputs]
    results = lowered(*own, *added, *(carried[i] for i in wanted.carried_inputs))
    returned, extra = results[: len(specs)], wanted.split(results[len(specs) :])
    raw = plain(*own, *added)[: len(specs)]
    assert all(torch.equal(a, b) for a, b in zip(returned, raw, strict=True))

    for i, (spec, purpose) in enumerate(zip(specs, wanted.purposes, strict=True)):
        if purpose is ACCUMULATE:
            assert torch.equal(returned[i], torch.zeros(spec.layout.local_shape))
            assert torch.equal(extra.unreduced[i], grads[i])
            continue
        whole = grads[i] + earlier[i] if wanted.unreduced[i] else grads[i]
        assert torch.equal(returned[i], REDUCE_GRAD(whole, states[i], HYPER, spec.encode()))
        if purpose is not SPECULATE:
            continue
        total = carried[i] + returned[i] if wanted.carried[i] else returned[i]
        direction = ORTHOGONALIZE(total, states[i], HYPER, spec.encode())
        assert (extra.directions[i].dtype, extra.directions[i].shape) == (direction.dtype, spec.layout.local_shape)
        if returned[i].numel():
            assert not torch.equal(extra.directions[i].float(), returned[i])
        # `lerp` by a tensor, in the graph, and by a number differ in the last bit in torch 2.11.
        tolerance = max(1e-5, torch.finfo(direction.dtype).eps)
        torch.testing.assert_close(extra.directions[i], direction, atol=tolerance, rtol=1e-6)
        row = wanted.speculated.index(i)
        assert torch.equal(extra.fingerprints[row], fingerprint([total])[0])
    return True


FREE, ADDED, BOTH = (False, False), (True, False), (True, True)
CARRIED = (False, True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradient_and_direction_beside_it(stage, size, threads):
    """With and without a carried gradient; a request may mix both."""

    wanted = request((SPECULATE, *CARRIED), (SPECULATE, *FREE), (REDUCE, *FREE), (REDUCE, *FREE))
    run_on_ranks(threads, size, stage, wanted)


@pytest.mark.parametrize("rows", [0, 1])
def test_every_purpose_in_one_graph(rows, threads):
    """Stage 1: one parameter accumulates, one is reduced, one speculated on, with what earlier micro-batches left."""
    wanted = [
        request((SPECULATE, *BOTH), (ACCUMULATE, *FREE), (REDUCE, *ADDED), (REDUCE, *FREE)),
        request((ACCUMULATE, *FREE), (REDUCE, *FREE), (SPECULATE, *CARRIED), (ACCUMULATE, *FREE)),
    ][rows]
    run_on_ranks(threads, 2, 1, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_directions_come_in_the_dtype_of_newton_schulz(dtype, threads):
    wanted = request(*[(SPECULATE, *FREE)] * 3, (REDUCE, *FREE))
    assert ORTHOGONALIZE(torch.ones(7, 4), torch.ones(7, 4), HYPER, specs_of(0, 1, "", 2, dtype)[0].encode()).dtype is (
        getattr(torch, dtype)
    )
    run_on_ranks(threads, 2, 2, wanted, dtype)


def test_directions_are_exchanged_behind_every_reduction():
    specs = specs_of(0, 2, "g", 2)
    wanted = request((SPECULATE, *CARRIED), (SPECULATE, *FREE), (SPECULATE, *FREE), (REDUCE, *FREE))
    gm = backward_graph(specs)
    lowered = run_passes(gm, LOWERING_PASSES, PassContext(GraphKind.BACKWARD, request=wanted))
    assert [kind for _, kind in collectives(lowered)] == ["reduce_scatter", "all_to_all", "all_to_all"]


def test_markers_go_in_where_they_are_asked_for():
    specs = specs_of(0, 1, "", 2)
    wanted = request((REDUCE, *FREE), (SPECULATE, *FREE), (SPECULATE, *CARRIED), (REDUCE, *FREE))
    gm = backward_graph(specs)
    reductions = ReduceGrad.all(gm)
    gm = run_passes(gm, LOWERING_PASSES[:2], PassContext(GraphKind.BACKWARD, request=wanted))
    first, second = Orthogonalize.all(gm)
    assert (first.spec, second.spec) == (specs[1], specs[2])
    assert first.grad is reductions[1].node
    assert [argument.name for argument in second.grad.args] == ["carried_2", reductions[2].node.name]
    returned = gm.graph.output_node().args[0]
    assert list(returned[:4]) == [each.node for each in reductions]
    assert list(returned[4:6]) == [first.node, second.node]


def test_a_gradient_that_something_else_reads_is_not_speculated_on():
    specs = specs_of(0, 2, "g", 2)
    gm = backward_graph(specs)
    (output,) = gm.graph.find_nodes(op="output")
    reduced = ReduceGrad.all(gm)[0].node
    with gm.graph.inserting_before(output):
        norm = gm.graph.call_function(torch.ops.aten.sum.default, (reduced,))
        norm.meta["val"] = torch.zeros(())
    output.args = ((*output.args[0], norm),)
    grads = reduced_grads(gm)
    assert [grad.speculates for grad in grads] == [False, True, True, False]
    assert BackwardRequest.of(grads, SPECULATE).purposes == (REDUCE, SPECULATE, SPECULATE, REDUCE)
    with pytest.raises(RequestError, match=r"gradient 0 of shape \(7, 4\): .*does not return untouched"):
        lower(gm, request(*[(SPECULATE, *FREE)] * 3, (REDUCE, *FREE)))
    # Reduced it may be, and the collective is waited for before its reader.
    lowered = lower(gm, BackwardRequest.of(grads, SPECULATE))
    assert [kind for _, kind in collectives(lowered)] == ["reduce_scatter", "all_to_all", "all_to_all"]


@pytest.mark.parametrize(
    ("stage", "rows", "message"),
    [
        (2, [(ACCUMULATE, *FREE)] * 4, "gradient 0 .*ACCUMULATE at stage 2"),
        (1, [(SPECULATE, *FREE)] * 4, r"gradient 3 of shape \(5,\): SPECULATE for a parameter that is not"),
        (2, [(REDUCE, *ADDED)] * 4, "unreduced at stage 2"),
        (1, [(REDUCE, *CARRIED)] * 4, "carried with REDUCE"),
        (1, [(REDUCE, *FREE)] * 3, r"a request of \[3\] entries for 4 gradients"),
    ],
)
def test_refused(stage, rows, message):
    with pytest.raises(RequestError, match=message):
        lower(backward_graph(specs_of(0, 2, "g", stage)), request(*rows))


def test_a_backward_graph_needs_a_request():
    gm = backward_graph(specs_of(0, 2, "g", 1))
    for passes in (LOWERING_PASSES, LOWERING_PASSES[2:]):
        with pytest.raises(RequestError, match="without a request"):
            lower(gm, None, passes)


def test_directions_that_nobody_inserted():
    without = tuple(p for p in LOWERING_PASSES if p.name != "insert_orthogonalize")
    with pytest.raises(PassContractError, match="3 directions asked for, 0 inserted"):
        lower(backward_graph(specs_of(0, 2, "g", 1)), request(*[(SPECULATE, *FREE)] * 3, (REDUCE, *FREE)), without)
