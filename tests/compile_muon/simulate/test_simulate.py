"""A simulated step against what one computes by hand, on a machine of round numbers.

Negating n float32 takes n seconds there, gathering n from each of two ranks n seconds.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from compile_muon.passes import GraphKind
from compile_muon.passes.costs import Link
from compile_muon.passes.language.layout import Axis
from compile_muon.passes.language.work import Category, Work, note_work
from compile_muon.simulate import SimulatedGraph, simulate, simulate_together
from compile_muon.simulate.cost import kernel_seconds, operations
from compile_muon.simulate.engine import _Player, _Sent, _Wires
from compile_muon.simulate.fusion import fused_step, gpu_kernels, kernels, moved_bytes
from compile_muon.simulate.machine import Machine, load_machine
from compile_muon.simulate.newton_schulz import Call

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

#: pairs of neighbours have a link of their own
ROUND = Machine(
    name="round", device="cpu", memory_bytes=10**9, memory_bandwidth=8.0, kernel_seconds=0.0,
    rates={"float32": ((1.0, 2.0),)}, links=(Link(2, 4.0, 0.0), Link(None, 4.0, 0.0)),
)  # fmt: skip
INNER, OUTER = Axis("shard", 2, 0, "inner"), Axis("replicate", 2, 0, "outer")
GROUPS = {INNER: [0, 1], OUTER: [0, 2]}
BOTH = {0: GROUPS, 1: GROUPS}


class Drawing:
    """A graph, node by node."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(self, *shape):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.zeros(shape)
        return node

    def node(self, target, args, value, work=None):
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        if work is not None:
            note_work(node, work)
        return node

    def call(self, target, *args, work=None):
        return self.node(target, args, target(*map_arg(args, lambda node: node.meta["val"])), work)

    def neg(self, x):
        return self.call(_aten.neg.default, x)

    def gather(self, x, axis=INNER, work=None):
        target = _c10d.all_gather_into_tensor.default
        return self.node(target, (x, 2, axis.group), torch.zeros(2 * x.meta["val"].numel()), work)

    def wait(self, gathered, work=None):
        return self.node(_c10d.wait_tensor.default, (gathered,), gathered.meta["val"], work)

    def done(self, *outputs):
        self.graph.output(outputs)
        return GraphModule(torch.nn.Module(), self.graph)


def play(*graphs, machine=ROUND, groups=GROUPS, **options):
    played = [gm if isinstance(gm, SimulatedGraph) else SimulatedGraph(gm, GraphKind.INFERENCE) for gm in graphs]
    return simulate(played, machine, groups=groups, ranks=4, **({"codegen": "eager"} | options))


def gather_and_compute(computed: int, *, wait_first: bool = False):
    """Four seconds of a gather, and ``computed`` seconds beside it."""
    draw, work = Drawing(), Work(Category.GATHER, 0)
    x, y = draw.input(4), draw.input(computed)
    gathered = draw.gather(x, work=work)
    waited = draw.wait(gathered, work) if wait_first else None
    return draw.done(draw.neg(y), waited or draw.wait(gathered, work))


@pytest.mark.parametrize(
    ("computed", "wait_first", "seconds", "exposed"),
    [(6, False, 6, {}), (4, False, 4, {}), (2, False, 4, {"gather": 2}), (6, True, 10, {"gather": 4})],
)
def test_what_compute_does_not_hide_is_exposed(computed, wait_first, seconds, exposed) -> None:
    found = play(gather_and_compute(computed, wait_first=wait_first))
    assert (found.seconds, found.busy, found.exposed) == (seconds, computed, exposed)
    assert found.seconds == found.busy + sum(found.exposed.values())


GPU = replace(ROUND, device="cuda", host_seconds={"graph": 1.0, "kernel": 3.0, "collective": 2.0})


@pytest.mark.parametrize(
    ("computed", "replayed", "seconds", "host"),
    [
        ((5, 5), False, 4 + 10, 4),  # the second is queued while the first runs
        ((1, 1), False, 7 + 1, 4 + 2),
        ((1, 1), True, 1 + 2, 1),
    ],
)
def test_a_gpu_runs_behind_its_host(computed, replayed, seconds, host) -> None:
    draw = Drawing()
    played = SimulatedGraph(
        draw.done(*(draw.neg(draw.input(n)) for n in computed)), GraphKind.STEP, parameters=0, replayed=replayed
    )
    found = play(played, machine=GPU)
    assert (found.seconds, found.exposed) == (seconds, {"host": host})
    assert found.busy == sum(computed)


def test_a_host_that_waits_has_nothing_queued_behind() -> None:
    draw = Drawing()
    checks = draw.done(draw.neg(draw.input(5)))
    draw = Drawing()
    commit = draw.done(draw.neg(draw.input(5)))
    for waits, exposed in ((False, 3), (True, 3 + 3)):
        found = play(
            SimulatedGraph(checks, GraphKind.STEP, waits=waits), SimulatedGraph(commit, GraphKind.STEP), machine=GPU
        )
        assert found.exposed == {"host": exposed} and found.seconds == 10 + exposed


def test_the_host_takes_its_time_ahead_of_kernels_and_beside_what_is_sent() -> None:
    machine = replace(ROUND, host_seconds={"graph": 1.0, "parameter": 2.0, "collective": 0.5, "byte": 1 / 16})
    called = SimulatedGraph(gather_and_compute(6), GraphKind.FORWARD, parameters=3)
    found = play(called, machine=machine)
    assert found.seconds == found.busy == (1 + 3 * 2) + (0.5 + 16 / 16) + 6
    assert [(e.category, e.start, e.end) for e in found.events if e.category in ("host", "gather")] == [
        ("host", 0, 7), ("host", 7, 8.5), ("gather", 7, 11),
    ]  # fmt: skip
    part = play(replace(called, parameters=None), machine=machine)
    assert part.seconds == found.seconds - 7


@pytest.mark.parametrize(
    ("late", "computed", "wait_first", "seconds", "exposed"),
    [
        (3, 2, True, 6, {"gather": 4}), (9, 2, True, 11, {"gather": 9}), (9, 2, False, 9, {"gather": 7}),
        (9, 9, False, 9, {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("issuing", [0.0, 1.0])
def test_a_wait_lasts_until_late_ranks_are_there(late, computed, wait_first, seconds, exposed, issuing) -> None:
    """They have to issue it too: its seconds of the host are beside what it sends, and ahead of who is late."""
    gm = gather_and_compute(computed, wait_first=wait_first)
    found = play(gm, machine=replace(ROUND, late_seconds=late, host_seconds={"collective": issuing}))
    hidden = issuing if late < 4 else 0.0  # else the link is not what is waited for
    assert found.seconds == seconds + issuing - hidden
    assert found.exposed == {cause: waited - hidden for cause, waited in exposed.items()}
    assert found.busy == computed + issuing
    assert [event.end for event in found.events if event.category == "gather"] == [4], "the link is as free as it was"


def turns(*computed: int, buckets=()):
    """As many seconds of a kernel, and a second's gather behind each that is waited for at once."""
    draw, waited = Drawing(), []
    for each, bucket in itertools.zip_longest(computed, buckets):
        draw.neg(draw.input(each))
        work = None if bucket is None else Work(Category.EXCHANGE, bucket)
        waited.append(draw.wait(draw.gather(draw.input(1), work=work)))
    return draw.done(*waited)


def together(graphs, groups=BOTH, **options):
    """The timeline of each graph, by the rank that its groups are given for."""
    plays = {
        rank: lambda others, gm=gm, own=own: play(gm, groups=own, others=others)
        for gm, (rank, own) in zip(graphs, groups.items(), strict=True)
    }
    return simulate_together(plays, **options)


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        ([(6,), (2,)], 7),
        ([(4, 1), (1, 4)], 10),  # each computes 5 seconds and gathers for 2: by turns they wait for each other
        ([(1, 4, 1), (4, 1, 4)], 15),
        ([(3, 3), (3, 3)], 8),
    ],
)
def test_a_collective_begins_when_the_last_of_its_ranks_is_there(ranks, seconds) -> None:
    found = together([turns(*computed) for computed in ranks])
    for rank, computed in enumerate(ranks):
        alone = play(turns(*computed))
        assert alone.seconds == sum(computed) + len(computed)
        assert found[rank].seconds == seconds
        assert found[rank].busy == alone.busy == sum(computed)
        assert found[rank].exposed == {"model": seconds - sum(computed)}
    (issued,) = found[0].issued.values()
    assert list(issued.values()) == [event.end for event in found[0].events if event.stream == "compute"]


def test_ranks_may_stand_for_others_of_their_groups() -> None:
    """One of ranks 0 to 3 and one of 4 to 7, of which the second owns nothing of a first bucket."""
    graphs = [turns(1, 6, buckets=(0, 1)), turns(2, buckets=(1,))]
    groups = {0: {INNER: [0, 1, 2, 3]}, 4: {INNER: [4, 5, 6, 7]}}
    assert [each.seconds for each in together(graphs, groups).values()] == [9, 3]
    assert [each.seconds for each in together(graphs, groups, kind=len).values()] == [9, 9]


def test_ranks_that_issue_different_collectives_are_not_played_together() -> None:
    with pytest.raises(ValueError, match=r"ranks 0 and 1 issue other collectives to the group \(0, 1\)"):
        together([turns(1, 1), turns(1)])


def two_gathers(second: Axis, more: int = 4, beside: int = 0):
    """Of 4 seconds alone, and of ``more``, issued behind so many seconds of a kernel."""
    draw = Drawing()
    one = draw.gather(draw.input(4))
    computed = [draw.neg(draw.input(beside))] if beside else []
    other = draw.gather(draw.input(more), second)
    return draw.done(draw.wait(one), draw.wait(other), *computed)


def ends(timeline):
    return [event.end for event in timeline.events if event.stream != "compute"]


SHARED = {"groups": {INNER: [0, 2], OUTER: [1, 3]}}
HOPS = {"machine": replace(ROUND, links=(Link(None, 4.0, 3.0),))}


@pytest.mark.parametrize(
    ("second", "more", "beside", "options", "expected"),
    [
        (INNER, 4, 0, {}, [4, 8]),  # a stream serves one after the other
        (OUTER, 4, 0, {}, [4, 4]),  # over links of their own groups do not wait for each other
        (OUTER, 4, 0, SHARED, [8, 8]),  # over one link both get half of it
        (OUTER, 4, 0, HOPS, [11, 11]),  # hops do not share anything
        # The first ends at 8, having had half; the second has 4 s of bytes left then.
        (OUTER, 8, 0, SHARED, [8, 12]),
        (OUTER, 4, 2, SHARED, [6, 8]),  # 2 s alone, then 2 s of bytes are left that take 4
        (OUTER, 4, 2, HOPS, [9, 11]),  # the first sends alone while the second makes its hops until 5; then both share
    ],
)
def test_collectives_share_links_and_streams(second, more, beside, options, expected) -> None:
    assert ends(play(two_gathers(second, more, beside), **options)) == expected


def only_kernel(gm, codegen="eager"):
    (kernel,) = kernels(gm, fuses=codegen == "inductor").values()
    return kernel.nodes


def test_products_cost_what_the_machine_says() -> None:
    draw = Drawing()
    gm = draw.done(draw.call(_aten.mm.default, draw.input(4, 6), draw.input(6, 5)))
    assert kernel_seconds(only_kernel(gm), ROUND) == ROUND.product_seconds(4, 5, 6, dtype="float32") == 120
    draw = Drawing()
    gm = draw.done(draw.call(_aten.baddbmm.default, draw.input(3, 4, 5), draw.input(3, 4, 6), draw.input(3, 6, 5)))
    assert kernel_seconds(only_kernel(gm), ROUND) == 360


def attention(width: int, causal: bool = False):
    draw = Drawing()
    q, k, v = (draw.input(1, 2, 8, width) for _ in range(3))
    node = draw.call(_aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, causal)
    return node, only_kernel(draw.done(node))


def test_attention_goes_by_its_heads_and_where_it_is_known_by_its_sequence() -> None:
    """On CPUs as on GPUs. The logarithms that backward takes are [batch, heads, sequence]; a rate is that of causal
    attention: without a causal mask there is twice as much to do."""
    node, kernel = attention(4)
    assert operations(node) == 2 * (2 * 2 * 8 * 8 * 4)
    assert kernel_seconds(kernel, ROUND) == operations(node) / 2
    draw = Drawing()
    q, k, v, out, grad = (draw.input(1, 2, 8, 4) for _ in range(5))
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    node = draw.call(backward, grad, q, k, v, out, draw.input(1, 2, 8), 0.0, False)
    machine = replace(ROUND, rates={"float32": ((2, 1.0), (4, 2.0))})  # products have no dimension of 2
    assert kernel_seconds(only_kernel(draw.done(node)), machine) == operations(node) / 2 > 0
    machine = replace(ROUND, attention_rates={"float32": ((4, 1.0), (16, 4.0))})
    for causal in (True, False):
        node, kernel = attention(32, causal)
        assert kernel_seconds(kernel, machine) == pytest.approx(operations(node) / (2 if causal else 1))


def newton_schulz(draw, shapes, method, dtype, backend, restarts):
    values = [draw.input(*shape) for shape in shapes]
    arguments = (values, [2.0, -1.5, 0.5] * 3, method, dtype, 1e-7, 1.0, restarts, backend, 2**30, [])
    return draw.node(torch.ops.muon_zero.newton_schulz.default, arguments, [value.meta["val"] for value in values])


def call_of(shape, method, dtype="float32", backend="auto") -> list:
    draw = Drawing()
    node = newton_schulz(draw, [shape], method, dtype, backend, [1])
    draw.done(node)
    return [node]


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_newton_schulz_costs_its_products(method) -> None:
    """Operations at 2 a second, and five passes over the matrix, two of which also write."""
    (node,) = call_of((4, 6), method)
    assert kernel_seconds([node], ROUND) == operations(node) / 2 + 7 * 4 * 6 * 4 / 8
    assert Call(node, ROUND).workspace_bytes() == (4 * 6 + 2 * 16) * 4
    assert kernel_seconds(call_of((6, 4), method), ROUND) == kernel_seconds([node], ROUND) + 2 * 4 * 6 * 4 / 8


def test_gpus_compute_one_triangle_and_all_of_a_shape_at_once() -> None:
    gpu = replace(ROUND, device="cuda", rates={"bfloat16": ((1.0, 2.0),)}, kernel_seconds=1.0)
    auto, aten = (
        kernel_seconds(call_of((3, 4, 4), "standard", "bfloat16", backend), gpu) for backend in ("auto", "aten")
    )
    matrices = 3 * 16 * 2 / 8
    assert aten == 5 + 7 * matrices + 3 * (3 * (1 + 3 * 2 * 64 / 2))
    assert auto == 4 + 6 * matrices + 3 * (2 * (1 + 3 * 64 / 2) + (1 + 3 * 2 * 64 / 2))


def chain():
    """-(-x) + y, then its sum."""
    draw = Drawing()
    x, y = draw.input(4, 2), draw.input(4, 2)
    added = draw.call(_aten.add.Tensor, draw.neg(draw.neg(x)), y)
    return draw.done(draw.call(_aten.sum.dim_IntList, added, [1]))


def test_what_one_kernel_reads_is_not_written() -> None:
    members = only_kernel(chain(), "inductor")
    assert len(members) == 4 and moved_bytes(members) == 32 + 32 + 16
    assert play(chain(), codegen="inductor").seconds == 10
    assert play(chain(), codegen="eager").seconds == (64 + 64 + 96 + 48) / 8
    assert [play(chain(), codegen=codegen).peak.total for codegen in ("inductor", "eager")] == [16, 64]


def read_by_two(draw):
    x = draw.neg(draw.input(8))
    return draw.neg(x), draw.call(_aten.abs.default, x)


def into_a_product(draw):
    x = draw.neg(draw.input(2, 2))
    return (draw.call(_aten.mm.default, x, x),)


def sent(draw):
    return (draw.neg(draw.wait(draw.gather(draw.neg(draw.input(4))))),)


def behind_a_sum(draw):
    return (draw.neg(draw.call(_aten.sum.dim_IntList, draw.neg(draw.input(4, 2)), [1])),)


def read_by_half(draw):
    """The sum of five is written, and read where it is not made: the second result is of half the size."""
    total = draw.input(8)
    for _ in range(4):
        total = draw.call(_aten.add.Tensor, total, draw.input(8))
    half = draw.call(_aten.sum.dim_IntList, draw.call(_aten.view.default, total, [2, 4]), [0])
    return draw.neg(total), half


def behind_a_sum_of_rows(draw):
    """Softmax without its exponential: x is read once, and sums are in no memory."""
    x = draw.input(4, 2)
    return (draw.call(_aten.div.Tensor, x, draw.call(_aten.sum.dim_IntList, x, [1], True)),)


def inputs_that_come_later(draw):
    x = draw.input(2, 2)
    first = draw.neg(x)
    return (draw.call(_aten.add.Tensor, x, draw.call(_aten.mm.default, first, first)),)


@pytest.mark.parametrize(
    ("drawn", "number"),
    # written once and read by each; read; sent, and read as it came; ended
    [(read_by_two, 3), (into_a_product, 2), (sent, 2), (behind_a_sum, 2)],
)
def test_kernels_of_inductor_end_where_something_is_written(drawn, number) -> None:
    draw = Drawing()
    assert len(kernels(draw.done(*drawn(draw)), fuses=True)) == number


@pytest.mark.parametrize(
    ("drawn", "moved"),
    [
        (read_by_two, [32 + 2 * 32]),  # computed by each, of one size, which share a kernel
        (read_by_half, [5 * 32 + 2 * 32, 32 + 16]),  # what reads more than four tensors is written for two
        (behind_a_sum_of_rows, [32 + 32]),
        (inputs_that_come_later, [32, 16 * 2, 48]),
    ],
)
def test_kernels_of_gpus_compute_again_what_they_would_read(drawn, moved) -> None:
    draw = Drawing()
    assert [kernel.moved for kernel in gpu_kernels(draw.done(*drawn(draw))).values()] == moved


def test_on_gpus_a_step_s_writes_are_one_kernel() -> None:
    """A weight and a momentum, read and written, and a gradient; what is computed between them is in registers."""
    draw = Drawing()
    weight, momentum, grad = (draw.input(4) for _ in range(3))
    draw.call(_aten.mul_.Tensor, momentum, 0.9)
    draw.call(_aten.add_.Tensor, momentum, grad)
    draw.call(_aten.add_.Tensor, weight, draw.neg(momentum))
    gm = draw.done(weight)
    (kernel,) = fused_step(gm, set()).values()
    assert kernel.moved == 3 * 16 + 2 * 16
    assert (
        play(SimulatedGraph(gm, GraphKind.STEP, eager=True, fused=True), machine=replace(ROUND, device="cuda")).seconds
        == 10
    )


def test_products_take_longer_beside_a_collective_that_holds_multiprocessors() -> None:
    """Of 4 multiprocessors 2 are held for 10 s: 5 s of work are done then, and the rest at full rate."""
    machine = replace(ROUND, device="cuda", processors=4, collective_processors=2)
    wires = _Wires()
    player = _Player(machine, {}, {}, None)
    player._wires = wires
    wires.issue(_Sent(None, "", "a", 0, 0.0, 10.0, 0.0, 0.0))
    player._compute("product", "product", 8.0, slower=2.0)
    assert (player.now, player.busy) == (13.0, 13.0)


def test_newton_schulz_on_a_known_gpu_goes_by_the_launches_of_its_lists() -> None:
    """As many as the kernels launch: three a step, the last of them once a tensor; beside NCCL they take longer."""
    h100 = load_machine("h100")
    draw = Drawing()
    shapes = ((256, 512), (512, 1024))
    node = newton_schulz(draw, shapes, "standard", "bfloat16", "triton", [])
    listed = Call(node, h100).listed
    assert [launch.part for launch in listed] == ["XXᵀ", "bR + cR², and aI", "FX, or QX"] * 2 + [
        "XXᵀ", "bR + cR², and aI", "the last X", "the last X",
    ]  # fmt: skip
    assert Call(node, h100).launched() == len(listed) + 4
    seconds = kernel_seconds([node], h100)
    assert seconds > sum(each.seconds(h100.tiles, h100.processors) for each in listed)
    node.args = (*node.args[:-1], [draw.input(256), draw.input(512)])
    assert Call(node, h100).launched() == len(listed) + 4
    read = sum(h100.move_seconds(4 * rows * cols) - h100.move_seconds(4 * rows) for rows, cols in shapes)
    assert kernel_seconds([node], h100) == pytest.approx(seconds - read)
    assert Call(node, h100).slower() > 1.05


def test_what_is_sent_is_kept_until_the_wait() -> None:
    """16 bytes sent, 32 received, 16 + 16 beside them; the wait before all that leaves 32 and 32."""

    def drawn(*, early: bool):
        draw, work = Drawing(), Work(Category.EXCHANGE, 0)
        x = draw.input(4)
        gathered = draw.gather(draw.call(_aten.neg.default, x, work=work), work=work)
        waited = draw.wait(gathered, work) if early else None
        b = draw.neg(draw.neg(x))
        return draw.done(b, waited or draw.wait(gathered, work))

    assert play(drawn(early=False)).peak.by_category == {"exchange": 48, "intermediates": 32}
    assert play(drawn(early=True)).peak.by_category == {"exchange": 32, "intermediates": 32}


def test_activations_live_from_forward_to_their_last_reader_in_backward() -> None:
    draw = Drawing()
    a = draw.neg(draw.input(4))
    forward = draw.done(draw.neg(a), a)
    draw = Drawing()
    saved, tangent = draw.input(4), draw.input(4)
    b = draw.call(_aten.mul.Tensor, saved, tangent)
    for _ in range(3):
        b = draw.neg(b)
    backward = draw.done(b)
    found = play(
        SimulatedGraph(forward, GraphKind.FORWARD, user_outputs=1), SimulatedGraph(backward, GraphKind.BACKWARD)
    )
    # the output, what is saved, and what is computed of it; from then on two at a time and the output
    assert found.peak.by_category == {"intermediates": 32, "activations": 16}
    longer = play(SimulatedGraph(forward, GraphKind.FORWARD, "a", 1), SimulatedGraph(backward, GraphKind.BACKWARD, "b"))
    assert longer.peak.by_category == {"intermediates": 48, "activations": 16}


def test_pools_of_cuda_graphs_keep_the_most_that_they_held() -> None:
    """One graph holds 64 bytes and leaves 32, the next 48 and leaves 24: 80 in their pool. The step holds 32."""

    def chain(width: int) -> GraphModule:
        draw = Drawing()
        return draw.done(draw.neg(draw.neg(draw.input(width))))

    def peak(*, model: bool, step: bool) -> tuple[int, int]:
        of_model = [
            SimulatedGraph(chain(8), GraphKind.FORWARD, "a", 1),
            SimulatedGraph(chain(6), GraphKind.FORWARD, "b", 1),
        ]
        graphs = [replace(graph, replayed=model) for graph in of_model]
        found = play(
            *graphs, SimulatedGraph(chain(4), GraphKind.STEP, replayed=step), resident={"parameters": 100}
        ).peak
        return found.total, found.by_category.get("pools", 0)

    assert peak(model=False, step=False) == (100 + 32 + 24 + 32, 0)
    for step in (False, True):
        assert peak(model=True, step=step) == (100 + 80 + 32, 80 - 32 - 24)
