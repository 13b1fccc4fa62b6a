"""Counting: bytes from the graphs, by hand, against the formulas, and alike on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.fx import Graph, GraphModule

from compile_muon.passes import GraphKind, Purpose, formulas, reduced_grads
from compile_muon.passes.collectives import Traffic, collectives, measure_traffic
from compile_muon.passes.costs import Costs
from compile_muon.passes.exchange.owner import assign_owners
from compile_muon.passes.language.layout import Axis

_c10d = torch.ops._c10d_functional


def over_all_axes(by_axis, name, rows, cols, *, world, replicas=1, itemsize):
    """The bytes of `world` ranks in all."""
    return sum(by_axis(name, rows, cols, shards=world // replicas, replicas=replicas, itemsize=itemsize).values())


bytes_sent = partial(over_all_axes, formulas.bytes_by_axis)
weight_bytes = partial(over_all_axes, formulas.bytes_by_axis)


def graph_of(*calls):
    """A graph of collectives, each on its own fresh `[12]` float32 input, each waited for."""
    graph = Graph()
    waits = []
    for number, (target, args) in enumerate(calls):
        x = graph.placeholder(f"x{number}")
        x.meta["val"] = torch.zeros(12)
        waits.append(graph.call_function(_c10d.wait_tensor.default, (graph.call_function(target, (x, *args)),)))
    graph.output(tuple(waits))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("target", "args", "sent", "kind"),
    [
        (_c10d.all_gather_into_tensor.default, (4, "g"), 48 * 3, "all_gather"),
        (_c10d.reduce_scatter_tensor.default, ("sum", 4, "g"), 48 * 3 / 4, "reduce_scatter"),
        (_c10d.all_reduce.default, ("sum", "g"), 2 * 48 * 3 / 4, "all_reduce"),
        (_c10d.all_to_all_single.default, ([2, 1, 0, 0], [5, 4, 2, 1], "g"), (5 + 2 + 1) * 4, "all_to_all"),
    ],
)
def test_bytes_by_hand(target, args, sent, kind):
    """Rank 1 of 4, 48 bytes in; what stays on the rank is not sent."""
    gm = graph_of((target, args))
    assert measure_traffic(gm, [Axis("shard", 4, 1, "g")]) == Traffic(
        int(sent), ((kind, 1),), 0, (("shard", int(sent)),)
    )
    assert [k for _, k in collectives(gm)] == [kind]


def test_sums():
    gm = graph_of(*[(_c10d.all_reduce.default, ("sum", "g"))] * 2, (_c10d.all_gather_into_tensor.default, (4, "g")))
    once = measure_traffic(gm, [Axis("shard", 4, 0, "g")])
    assert once == Traffic(2 * 72 + 144, (("all_gather", 1), ("all_reduce", 2)), 0, (("shard", 288),))
    assert once + once == Traffic(576, (("all_gather", 2), ("all_reduce", 4)), 0, (("shard", 576),))
    assert once + Traffic() == once


def test_matrices_count_batches():
    graph = Graph()
    one, stack = graph.placeholder("one"), graph.placeholder("stack")
    one.meta["val"], stack.meta["val"] = torch.zeros(4, 5), torch.zeros(3, 4, 5)
    op = torch.ops.muon_zero.newton_schulz.default
    graph.output(graph.call_function(op, ([one, stack], [1.0, 0.0, 0.0], "standard", "float32", 1e-7, 1.0, [])))
    assert measure_traffic(GraphModule(torch.nn.Module(), graph), ()).matrices == 4


def axes_of(graphs):
    return {axis for grad in reduced_grads(graphs.backward) for axis in grad.spec.layout.axes}


def padded(spec, itemsize=4):
    """Bytes of the full parameter as the wire carries it."""
    return spec.layout.chunk * spec.layout.shard.size * spec.layout.row_numel * itemsize


@pytest.mark.parametrize(
    ("world", "stage"),
    [(3, 3), (64, 2), *(pytest.param(*given, marks=pytest.mark.full) for given in ((3, 2), (64, 3)))],
)
def test_weights_and_gradients_cost_what_the_formulas_say(world, stage, uneven):
    graphs = uneven(world - 1, world, stage=stage)
    specs = [grad.spec for grad in reduced_grads(graphs.backward)]
    sharded = [spec for spec in specs if spec.layout.sharded]
    share = (world - 1) / world
    gathered = sum(padded(spec) for spec in sharded) * share
    scalar = 2 * 4 * share
    forward = measure_traffic(graphs.lowered(GraphKind.FORWARD)[0], axes_of(graphs))
    assert forward.bytes_sent == pytest.approx(gathered if stage == 3 else 0, abs=1)
    backward = measure_traffic(graphs.lowered(GraphKind.BACKWARD, Purpose.REDUCE)[0], axes_of(graphs))
    # Backward needs the weights that gradients pass through, not the embedding or biases.
    again = [s for s in sharded if s.layout.shape in ((13, 8), (9, 13), (2, 9), (17, 2))] if stage == 3 else []
    again_bytes = sum(map(padded, again)) * share
    assert backward.bytes_sent == pytest.approx(gathered + scalar + again_bytes, abs=2)
    for spec in sharded:
        formula = weight_bytes("reduce_scatter", spec.layout.shape[0], spec.layout.row_numel, world=world, itemsize=4)
        assert formula <= padded(spec) * share


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_exchange_costs_what_its_formula_says(world, uneven):
    """Averaged over the ranks, without padding (uneven splits travel as they are)."""
    sent = []
    for rank in range(world):
        graphs = uneven(rank, world, stage=1)
        update = measure_traffic(graphs.lowered(GraphKind.BACKWARD, Purpose.SPECULATE)[0], axes_of(graphs))
        reduce = measure_traffic(graphs.lowered(GraphKind.BACKWARD, Purpose.REDUCE)[0], axes_of(graphs))
        sent.append(update.bytes_sent - reduce.bytes_sent)
    specs = [grad.spec for grad in reduced_grads(graphs.backward) if grad.spec.muon]
    formula = sum(bytes_sent("owner", *spec.layout.shape, world=world, itemsize=4) for spec in specs)
    owners = assign_owners(specs, Costs())
    by_hand = [0] * world
    for spec, owner in zip(specs, owners, strict=True):
        for rank in range(world):
            if rank != owner:
                by_hand[rank] += spec.layout.piece_numel(rank) * 4  # rows there
                by_hand[owner] += spec.layout.piece_numel(rank) * 4  # directions back
    assert sent == [pytest.approx(b, abs=2) for b in by_hand]
    # The formula is for even shards; an owner of few small matrices with uneven rows may differ.
    assert sum(sent) / world == pytest.approx(formula, rel=0.35)


# --- every rank's graphs alike ----------------------------------------------------------------------------------------


def signature(gm):
    """Kind, input size (where all ranks must agree) and dtype of every collective in order."""
    found = []
    for node, kind in collectives(gm):
        value = node.args[0].meta["val"]
        size = None if kind == "all_to_all" else tuple(value.shape)
        found.append((kind, size, value.dtype))
    return found


@pytest.mark.parametrize("stage", [1, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2))])
def test_ranks_run_the_same_collectives_in_the_same_order(stage, uneven, node_targets):
    """Found in PyTorch's own bucketing: gathers reordered on the one rank whose shard is smaller, and a hang."""
    world = 3
    ranks = [uneven(rank, world, stage=stage) for rank in range(world)]
    assert len({tuple(node_targets(graphs.rewritten)) for graphs in ranks}) == 1
    variants = [(GraphKind.FORWARD, Purpose.REDUCE, False)]
    variants += [(GraphKind.BACKWARD, purpose, extra) for purpose in Purpose for extra in (False, True)]
    for kind, purpose, extra in variants:
        variant = (kind.value, purpose.value, extra)
        lowered = [graphs.lowered(kind, graphs.request(purpose, unreduced=extra, carried=extra))[0] for graphs in ranks]
        signatures = [signature(gm) for gm in lowered]
        assert all(found == signatures[0] for found in signatures), variant
        if purpose is not Purpose.SPECULATE:
            assert len({tuple(node_targets(gm)) for gm in lowered}) == 1, variant
            continue
        # Up to the exchange the nodes are the same; inside it each rank handles the matrices it owns.
        heads = [node_targets(gm)[: exchange_starts(gm)] for gm in lowered]
        assert len(set(map(tuple, heads))) == 1, variant
        assert any("wait_tensor" in name for name in heads[0]), "the reductions must be in the part that is compared"


def exchange_starts(gm):
    """Where the momentum coefficients are first read."""
    for index, node in enumerate(gm.graph.nodes):
        if node.target is torch.ops.aten.select.int and node.args[0].op == "placeholder":
            return index
    raise AssertionError("no exchange in this graph")


@pytest.mark.parametrize("stage", [1, 3])
def test_all_to_all_splits_fit_together(stage, uneven):
    """What rank a says it sends to b is what b says it receives from a, both ways."""
    world = 3
    per_rank = []
    for rank in range(world):
        gm, _ = uneven(rank, world, stage=stage).lowered(GraphKind.BACKWARD, Purpose.SPECULATE)
        per_rank.append([node.args[1:3] for node, kind in collectives(gm) if kind == "all_to_all"])
    for number in range(2):
        for a in range(world):
            for b in range(world):
                assert per_rank[a][number][1][b] == per_rank[b][number][0][a]
