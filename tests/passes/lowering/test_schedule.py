"""When collectives start and are waited for: what travels under backward, in which order, how much at a time."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_muon import MuonZero
from compile_muon.passes import LOWERING_PASSES, GraphKind, Purpose
from compile_muon.passes.collectives import is_collective, is_wait
from compile_muon.passes.errors import VerificationError
from compile_muon.passes.exchange.lift import LIFT
from compile_muon.passes.language.holder import FETCH
from compile_muon.passes.language.work import Category, work_of
from compile_muon.passes.lowering import buckets, schedule
from compile_muon.passes.pipeline import GraphPass, PassContext, PassOptions

LAYERS = 6
BUCKET = 2 * 4 * 48 * 48  # two matrices


class Deep(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(16, 48)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(2 * layers)))
        self.head = nn.Linear(48, 16)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x))).square().mean()


@pytest.fixture(scope="module")
def graphs():
    """`graphs(rank, world, trace, in_world, **settings)`, traced once per setting."""
    known = {}

    def made(rank, size, trace, world, **settings):
        key = (rank, size, *sorted(settings.items()))
        if key not in known:
            torch.manual_seed(0)
            with world(rank, size):
                model = Deep(settings.pop("layers", LAYERS))
                replicas = settings.pop("replicas", None)
                if replicas:
                    shape, names = (replicas, size // replicas), ("replicate", "shard")
                    settings["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
                MuonZero(model, ns_dtype="float32", **settings)
                known[key] = trace(model, torch.arange(8).reshape(2, 4))
        return known[key]

    return made


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Eight reductions and four exchanges of a model that would fit into one of each."""
    monkeypatch.setattr(buckets, "_SMALLEST", 2**12)


def events(gm):
    """`(what, category, bucket)` of each start and wait, and of each Newton-Schulz, in order."""
    found = []
    for node in gm.graph.nodes:
        work = work_of(node)
        if work is None:
            continue
        what = "start" if is_collective(node) else "wait" if is_wait(node) else None
        if node.target is torch.ops.muon_zero.newton_schulz.default:
            what = "newton_schulz"
        if what:
            found.append((what, work.category, work.bucket))
    return found


def meetings(gm):
    return [event for event in events(gm) if event[0] != "newton_schulz"]


def buckets_of(found, category):
    return sorted({bucket for _, of, bucket in found if of is category})


@pytest.mark.parametrize(
    ("stage", "size"),
    [
        (3, 2),
        pytest.param(3, 4, marks=pytest.mark.full),
        *(pytest.param(*given, marks=pytest.mark.campaign) for given in ((1, 2), (2, 2))),
    ],
)
def test_exchanges_start_under_backward(size, stage, graphs, trace, world):
    gm, _ = graphs(0, size, trace, world, stage=stage).lowered(
        GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=BUCKET
    )
    found = events(gm)
    reductions, exchanges = (buckets_of(found, c) for c in (Category.REDUCE, Category.EXCHANGE))
    assert len(reductions) > 6
    assert len(exchanges) == {2: 4, 4: 3}[size]  # at least a matrix for each rank
    needs = needed(gm)
    for bucket in exchanges:
        start = found.index(("start", Category.EXCHANGE, bucket))
        last = max(needs[bucket])
        # Behind its last reduction, which is waited for when the next has started: no later than that.
        assert found.index(("wait", Category.REDUCE, last)) < start
        for later in reductions[last + 2 :]:
            assert start < found.index(("start", Category.REDUCE, later))
    under_backward = [b for b in exchanges if max(needs[b]) < reductions[-1]]
    assert len(under_backward) == len(exchanges) - 1


def needed(gm):
    """Reductions that each exchange reads."""
    found = {}
    for node in gm.graph.nodes:
        work = work_of(node)
        for source in node.all_input_nodes:
            from_ = work_of(source)
            if work and from_ and work.category is Category.EXCHANGE and from_.category is Category.REDUCE:
                found.setdefault(work.bucket, set()).add(from_.bucket)
    return found


def model_nodes(gm):
    return [node for node in gm.graph.nodes if node.op == "call_function" and work_of(node) is None]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_nothing_waits_ahead_of_work_that_is_ready(stage, graphs, trace, world):
    gm, _ = graphs(0, 2, trace, world, stage=stage).lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=BUCKET)
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    waits = [node for node in gm.graph.nodes if is_wait(node) and work_of(node).category is Category.EXCHANGE]
    products = [node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default]
    newton_schulz = [n for n in gm.graph.nodes if n.target is torch.ops.muon_zero.newton_schulz.default]
    assert min(order[wait] for wait in waits) > max(order[node] for node in products)
    # The way back of each is waited for when all that this rank orthogonalizes is done, and all has been sent.
    back = waits[len(waits) // 2 :]
    starts = [node for node in gm.graph.nodes if is_collective(node)]
    assert [work_of(wait).bucket for wait in back] == sorted(work_of(wait).bucket for wait in back)
    assert min(order[wait] for wait in back) > max(order[node] for node in (*newton_schulz, *starts))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_newton_schulz_fills_the_last_reduction(stage, graphs, trace, world):
    gm, _ = graphs(0, 2, trace, world, stage=stage).lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=BUCKET)
    found = events(gm)
    last = max(buckets_of(found, Category.REDUCE))
    first = [event[0] for event in found].index("newton_schulz")
    assert found.index(("start", Category.REDUCE, last)) < first < found.index(("wait", Category.REDUCE, last))


@pytest.mark.parametrize(
    ("size", "limit", "stage", "layers"),
    [
        (5, 2**30, 3, 2),
        pytest.param(4, 2**30, 0, LAYERS, marks=pytest.mark.campaign),
        *(pytest.param(64, 1, stage, LAYERS, marks=pytest.mark.campaign) for stage in (0, 3)),
    ],
)
def test_ranks_meet_in_the_same_order(stage, limit, size, layers, graphs, trace, world):
    """Also those that own nothing: of 4 matrices one of 5 ranks, of 12 most of 64."""
    orders = []
    for rank in (0, 1, size - 1):
        captured = graphs(rank, size, trace, world, stage=stage, layers=layers)
        gm, _ = captured.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=BUCKET, exchange_bytes=limit)
        orders.append(meetings(gm))
    assert orders[0] == orders[1] == orders[2]
    assert {category for _, category, _ in orders[0]} >= {Category.REDUCE, Category.EXCHANGE}


def by_group(gm):
    """The collectives of each group, which all of its ranks name alike."""
    found = {}
    for node in gm.graph.nodes:
        if is_collective(node):
            found.setdefault(node.args[-1], []).append((work_of(node).category, work_of(node).bucket))
    return found


def assert_alike(orders):
    for one, other in itertools.combinations(orders, 2):
        for group in one.keys() & other.keys():
            assert one[group] == other[group]


@pytest.mark.parametrize(
    ("size", "replicas", "stage", "layers", "limit"),
    [
        (4, 2, 3, 2, 1),
        *(pytest.param(8, 4, stage, LAYERS, 2**30, marks=pytest.mark.campaign) for stage in (0, 3)),
    ],
)
def test_replicas_meet_in_the_same_order(size, replicas, stage, layers, limit, graphs, trace, world):
    """A replica that owns nothing of a bucket only takes what the others hand round."""
    orders = []
    for rank in sorted({0, 2, size // 2 + 1, size - 1}):
        captured = graphs(rank, size, trace, world, stage=stage, replicas=replicas, layers=layers)
        gm, _ = captured.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=BUCKET, exchange_bytes=limit)
        orders.append(by_group(gm))
    assert_alike(orders)
    if stage and size == 8:  # 12 matrices for 8 owners in one bucket or two
        assert len({sum(map(len, order.values())) for order in orders}) > 1 or len(orders[0]) > 1


@pytest.mark.parametrize(
    ("stage", "replicas"),
    [(3, 2), pytest.param(1, 4, marks=pytest.mark.full), pytest.param(0, None, marks=pytest.mark.full)],
)
def test_directions_for_replicas_travel_under_backward(stage, replicas, graphs, trace, world):
    """But for those of the last buckets, which hide what else is under way at the end."""
    with_replicas = graphs(0, 4, trace, world, stage=stage, replicas=replicas)
    gm, _ = with_replicas.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=BUCKET // 4)
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    end = max(order[node] for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default)
    rounds = {}  # the last collective of each exchange hands directions round
    for node in gm.graph.nodes:
        if is_collective(node) and work_of(node).category is Category.EXCHANGE:
            rounds[work_of(node).bucket] = order[node]
    assert len(rounds) == (6 if stage == 3 else 3)
    under_backward = [bucket for bucket, position in sorted(rounds.items()) if position < end]
    assert under_backward == sorted(rounds)[: len(under_backward)]
    assert len(under_backward) == (3 if stage == 3 else 1)


@pytest.fixture
def several_at_once(monkeypatch):
    """Reductions of four matrices each, and exchanges of two: several of these may start at once."""
    monkeypatch.setattr(buckets, "bucket_bytes", lambda total, start: total)
    monkeypatch.setattr(buckets, "_COLLECTIVES", 6)
    monkeypatch.setattr(buckets, "_EXCHANGES", 2 * LAYERS)


def test_exchanges_that_are_ready_at_once_start_in_the_same_order(several_at_once, graphs, trace, world, monkeypatch):
    """Of each exchange another rank owns something, and has more nodes for it: that must not decide."""
    monkeypatch.setattr(buckets, "reduce_start", lambda layout, costs: 2**30)  # the first ones are no smaller
    monkeypatch.setattr(buckets, "_COLLECTIVES", 3)
    orders, nodes = [], []
    for rank in range(4):
        captured = graphs(rank, 4, trace, world, stage=3, replicas=2)
        gm, _ = captured.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, passes=list(LOWERING_PASSES))
        orders.append(by_group(gm))
        works = [work for node in gm.graph.nodes if (work := work_of(node)) and work.category is Category.EXCHANGE]
        nodes.append(Counter(work.bucket for work in works))
    starts = [event for event in events(gm) if event[0] == "start" and event[1] is not Category.GATHER]
    pairs = [(one[2], other[2]) for one, other in itertools.pairwise(starts) if one[1] is other[1] is Category.EXCHANGE]
    assert [pair for pair in pairs if nodes[0][pair[0]] < nodes[0][pair[1]] and nodes[1][pair[0]] > nodes[1][pair[1]]]
    assert_alike(orders)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_ranks_that_are_late_have_a_part_of_backward_to_arrive(stage, several_at_once, graphs, trace, world):
    """None waits at once for what the exchange ahead of it has just begun: an owner comes to that later than the
    others, by its Newton-Schulz."""
    with_replicas = graphs(0, 4, trace, world, stage=stage, replicas=2)
    gm, _ = with_replicas.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, passes=list(LOWERING_PASSES))
    products = [place for place, node in enumerate(gm.graph.nodes) if node.target is torch.ops.aten.mm.default]
    started, between = {}, []
    for place, node in enumerate(gm.graph.nodes):
        work = work_of(node)
        if work is not None and work.category is Category.EXCHANGE:
            if is_collective(node):
                started[node] = place
            elif is_wait(node) and place < products[-1]:
                between.append(sum(started[node.args[0]] < product < place for product in products))
    assert between and min(between) > 0


@pytest.mark.parametrize(("size", "carried"), [(1, False), (1, True), pytest.param(2, True, marks=pytest.mark.full)])
def test_momenta_are_fetched_all_along_backward(size, carried, graphs, trace, world):
    """Also where there are gradients of other micro-batches to add."""
    captured = graphs(0, size, trace, world, stage=2, offload="cpu")
    request = captured.request(Purpose.SPECULATE, carried=carried)
    gm, _ = captured.lowered(GraphKind.BACKWARD, request, bucket_bytes=BUCKET)
    nodes = [node.target for node in gm.graph.nodes]
    products = [place for place, target in enumerate(nodes) if target is torch.ops.aten.mm.default]
    fetches = [place for place, target in enumerate(nodes) if target is FETCH]
    behind = [sum(product > fetch for product in products) for fetch in fetches]
    assert len(fetches) == 2 * LAYERS
    assert behind[0] > len(products) / 2 and len(set(behind)) > LAYERS / size


def test_a_limit_bounds_what_is_under_way(graphs, trace, world):
    captured = graphs(0, 2, trace, world, stage=3)
    unbounded, free = captured.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=BUCKET)
    assert free.exchange_bytes > 0
    limit = free.exchange_bytes // 3
    gm, ctx = captured.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, bucket_bytes=BUCKET, exchange_bytes=limit)
    assert ctx.exchange_bytes <= limit
    assert meetings(gm) != meetings(unbounded)
    assert sorted(meetings(gm)) == sorted(meetings(unbounded))


def test_a_schedule_that_goes_over_the_limit_is_refused(graphs, trace, world):
    def greedy(gm, ctx):
        wide = PassContext(ctx.kind, options=PassOptions(), request=ctx.request)
        return schedule.SCHEDULE.rewrite(gm, wide)

    passes = [GraphPass("schedule", greedy) if p is schedule.SCHEDULE else p for p in LOWERING_PASSES]
    captured = graphs(0, 2, trace, world, stage=3)
    with pytest.raises(VerificationError, match="exchanges under way hold .* more than exchange_bytes = 1000"):
        captured.lowered(GraphKind.BACKWARD, Purpose.SPECULATE, passes=passes, bucket_bytes=BUCKET, exchange_bytes=1000)


@pytest.mark.parametrize("kind", [GraphKind.FORWARD, GraphKind.BACKWARD])
def test_a_graph_computes_what_it_did(kind, graphs, trace, world):
    """Nodes are the same ones with the same arguments; each stands behind what it reads."""
    captured = graphs(0, 2, trace, world, stage=3)
    unscheduled = [p for p in LOWERING_PASSES if p is not schedule.SCHEDULE]

    def wiring(passes):
        gm, _ = captured.lowered(kind, Purpose.SPECULATE, passes=passes, bucket_bytes=BUCKET)
        gm.graph.lint()
        return {node.name: (str(node.target), [s.name for s in node.all_input_nodes]) for node in gm.graph.nodes}

    assert wiring(tuple(LOWERING_PASSES)) == wiring(unscheduled)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("cap", [BUCKET, 3 * BUCKET])
def test_gathers_start_as_early_as_memory_allows(stage, cap, graphs, trace, world):
    """What is gathered and not yet used, and what is in use, are two buckets of the largest size; the next one always
    is under way."""
    gm, _ = graphs(0, 2, trace, world, stage=stage).lowered(GraphKind.FORWARD, bucket_bytes=cap)
    sizes = {work.bucket: work.nbytes for node in gm.graph.nodes if (work := work_of(node))}
    assert (len(sizes) > 3) == (stage == 3)
    limit = 2 * buckets.largest_bucket(sum(sizes.values()), cap)
    started, used = [], []
    for what, _, bucket in meetings(gm):
        # In use is the last that was waited for; what starts next does so ahead of the wait for one more.
        unused = [b for b in started if b not in used]
        if what == "start":
            assert not unused or sum(sizes[b] for b in [*unused, bucket]) <= limit or len(unused) == 1
            started.append(bucket)
        else:
            following = len(started)
            if following < len(sizes):
                assert following > bucket + 1
                assert sum(sizes[b] for b in [*unused, following]) > limit  # no room for another
            used.append(bucket)
    assert started == used == sorted(sizes)


@pytest.mark.parametrize("kind", [GraphKind.FORWARD, GraphKind.BACKWARD])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_shards_are_lifted_while_the_weights_ahead_of_them_are_in_use(size, kind, graphs, trace, world):
    """Each once, a bucket at a time: by the one rank that reads them all, too."""
    gm, _ = graphs(0, size, trace, world, stage=3, offload_param="cpu").lowered(kind, bucket_bytes=BUCKET)
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    lifts, packed = {}, {}
    for node in nodes:
        work = work_of(node)
        if node.target is LIFT:
            assert work.bucket not in lifts
            lifts[work.bucket] = node
        elif node.target is torch.ops.muon_zero.pack.default and work.category is Category.GATHER:
            packed[work.bucket] = node
    sources = [shard for lift in lifts.values() for shard in lift.args[0]]
    assert len(sources) == len(set(sources)) == sum(read.op == "placeholder" for read in sources)
    assert len(lifts) == len(packed) > 3
    multiplying = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    products = [place[node] for node in nodes if node.target in multiplying]
    beside = 0
    for bucket, pack in packed.items():
        assert {lifts[bucket]} == {lifted.args[0] for lifted in pack.all_input_nodes}
        lift = place[lifts[bucket]]
        if bucket and size > 1:
            assert place[packed[bucket - 1]] < lift
        beside += any(lift < product < place[pack] for product in products)
    assert beside > len(packed) / 2


@pytest.mark.parametrize("communicators", ["separate", "shared"])
def test_each_category_has_a_communicator_of_its_own(communicators, graphs, trace, world):
    captured = graphs(0, 8, trace, world, stage=3, replicas=2, communicators=communicators, layers=1)
    groups = {}
    for kind in (GraphKind.FORWARD, GraphKind.BACKWARD):
        gm, _ = captured.lowered(kind, Purpose.SPECULATE, bucket_bytes=BUCKET)
        for node in gm.graph.nodes:
            if is_collective(node):
                groups.setdefault(work_of(node).category, set()).add(node.args[-1])
    gather, reduce, exchange = (groups[c] for c in (Category.GATHER, Category.REDUCE, Category.EXCHANGE))
    assert len(gather) == 1  # over shard
    assert len(reduce) == len(exchange) == 2  # over shard, then over replicate
    if communicators == "separate":
        assert not gather & reduce and not gather & exchange and not reduce & exchange
    else:
        assert gather < reduce == exchange
