"""The order of collectives: exchanges travel under backward, and gathers as early as memory allows.

The golden gate stores every order. These rules hold of any.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_muon import MuonZero
from compile_muon.passes import GraphKind, Purpose
from compile_muon.passes.collectives import is_collective, is_wait
from compile_muon.passes.language.work import Category, work_of
from compile_muon.passes.lowering import buckets

REDUCE, EXCHANGE = Category.REDUCE, Category.EXCHANGE


@pytest.fixture(scope="module")
def known():
    """Graphs ahead of lowering, by rank, size and replicas."""
    return {}


@pytest.fixture
def captured(known, world, trace, monkeypatch):
    """Graphs of twelve matrices, in seven reductions or more and four exchanges."""
    monkeypatch.setattr(buckets, "_SMALLEST", 2**12)

    def trace_on(rank, size, replicas=1):
        if (rank, size, replicas) in known:
            return known[rank, size, replicas]
        layers = (nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(12))
        with world(rank, size):
            model, mesh = nn.Sequential(nn.Embedding(16, 48), *layers, nn.Linear(48, 16)), None
            if replicas > 1:
                mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
            MuonZero(model, ns_dtype="float32", stage=3, mesh=mesh)
            return known.setdefault((rank, size, replicas), trace(model, torch.arange(8).reshape(2, 4)))

    return trace_on


def events(gm):
    """`(what, category, bucket)` of each start, wait and call of Newton-Schulz, and `("product", None, 0)`."""
    order = []
    for node in gm.graph.nodes:
        work, what = work_of(node), "start" if is_collective(node) else "wait" if is_wait(node) else ""
        what = "newton_schulz" if node.target is torch.ops.muon_zero.newton_schulz.default else what
        if work is not None and what:
            order.append((what, work.category, work.bucket))
        elif node.target is torch.ops.aten.mm.default:
            order.append(("product", None, 0))
    return order


def places(order, what, category=None):
    return [(i, bucket) for i, (kind, of, bucket) in enumerate(order) if (kind, of) == (what, category)]


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.full), 2])
def test_exchanges_travel_under_backward_and_newton_schulz_behind_it(replicas, captured):
    gm, ctx = captured(0, 2 * replicas, replicas).lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=2**14)
    order = events(gm)
    reductions, exchanges = places(order, "start", REDUCE), places(order, "start", EXCHANGE)
    (end, _), last = places(order, "product")[-1], reductions[-1][0]
    needs = {work.bucket: max(work.needs) for node in gm.graph.nodes if (work := work_of(node)) and work.needs}
    assert len({bucket for _, bucket in reductions}) > 6 and len(needs) > 3
    there = {bucket: place for place, bucket in reversed(exchanges)}
    for bucket, need in needs.items():
        # Behind its last reduction, which is waited for when the next has started: no later than that.
        assert max(i for i, of in places(order, "wait", REDUCE) if of == need) < there[bucket]
        assert all(there[bucket] < place for place, of in reductions if of > need + 1 + replicas - 1)
    assert sum(place < end for place in there.values()) >= len(needs) - 1
    runs = [i for i, _ in places(order, "newton_schulz", EXCHANGE)]
    waits = [i for i, _ in places(order, "wait", EXCHANGE)]
    if replicas == 1:
        assert last < runs[0] < max(i for i, _ in places(order, "wait", REDUCE)), "it fills the last reduction"
        assert waits[0] > end and min(waits[len(waits) // 2 :]) > max(*runs, exchanges[-1][0])
    else:  # what is handed round travels under backward, and no owner is waited for at once
        assert sum(i < end for i in runs) >= 2
    assert ctx.exchange_bytes > 0


def test_exchanges_that_are_ready_at_once_start_in_the_same_order(captured, monkeypatch):
    """Of each exchange another rank owns something, and has more nodes for it: that must not decide."""
    monkeypatch.setattr(buckets, "bucket_bytes", lambda total, start: total)
    monkeypatch.setattr(buckets, "reduce_start", lambda layout, costs: 2**30)  # the first ones are no smaller
    monkeypatch.setattr(buckets, "_COLLECTIVES", 3)
    monkeypatch.setattr(buckets, "_EXCHANGES", 12)
    orders, nodes = [], []
    for rank in (0, 1):
        gm, _ = captured(rank, 4, 2).lowered(GraphKind.BACKWARD, Purpose.SPECULATE)
        orders.append([event for event in events(gm) if event[0] == "start"])
        works = [work for node in gm.graph.nodes if (work := work_of(node)) and work.category is EXCHANGE]
        nodes.append(Counter(work.bucket for work in works))
    pairs = [(one[2], other[2]) for one, other in itertools.pairwise(orders[0]) if one[1] is other[1] is EXCHANGE]
    assert [pair for pair in pairs if nodes[0][pair[0]] < nodes[0][pair[1]] and nodes[1][pair[0]] > nodes[1][pair[1]]]
    assert orders[0] == orders[1]


def test_a_limit_bounds_what_is_under_way(captured):
    """With two thirds of the bytes exchanges go on earlier, and are as many."""
    graphs = captured(0, 2)
    unbounded, free = graphs.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=2**14)
    limit = free.exchange_bytes * 2 // 3
    gm, ctx = graphs.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=2**14, exchange_bytes=limit)
    assert 0 < ctx.exchange_bytes <= limit and events(gm) != events(unbounded)
    assert Counter(events(gm)) == Counter(events(unbounded))


@pytest.mark.parametrize("cap", [2**14, 3 * 2**14])
def test_gathers_start_as_early_as_memory_allows(cap, captured):
    """Weights in use and those gathered ahead are two buckets of the largest size; the next one is always under way."""
    graphs = captured(0, 2)
    gm, _ = graphs.lowered(GraphKind.FORWARD, bucket_bytes=cap)
    sizes = {work.bucket: work.nbytes for node in gm.graph.nodes if (work := work_of(node))}
    limit, started, used = 2 * buckets.largest_bucket(sum(sizes.values()), cap), [], []
    for what, _, bucket in [event for event in events(gm) if event[0] in ("start", "wait")]:
        unused = [b for b in started if b not in used]
        if what == "start":
            assert not unused or sum(sizes[b] for b in [*unused, bucket]) <= limit or len(unused) == 1
            started.append(bucket)
            continue
        if (following := len(started)) < len(sizes):  # no room for another
            assert following > bucket + 1 and sum(sizes[b] for b in [*unused, following]) > limit
        used.append(bucket)
    assert started == used == sorted(sizes) and len(sizes) > 3
