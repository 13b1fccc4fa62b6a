"""One property of every lowered graph: over drawn meshes, layouts and requests it verifies and equals eager.

Graphs are of markers, with a chain of operations between them. Each is lowered for every rank, and all ranks run theirs
side by side. The results are those of the markers in eager code, and those of one process with whole tensors.
Ranks meet in the same order, and put every matrix through Newton-Schulz once.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, GraphModule, Node

from compile_muon.kernels import newton_schulz
from compile_muon.mesh import DENSE, Mesh, Role
from compile_muon.passes import (
    LOWERING_PASSES,
    BackwardRequest,
    GraphKind,
    PassContext,
    PassOptions,
    Purpose,
    reduced_grads,
    run_passes,
)
from compile_muon.passes.collectives import collectives, measure_traffic
from compile_muon.passes.fingerprint import fingerprint
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec, decode_dtype, exchange_of
from compile_muon.passes.language.views import View
from compile_muon.passes.language.work import work_of
from compile_muon.passes.lowering import buckets
from compile_muon.passes.lowering.refresh import AWAIT_REFRESH_OP
from compile_muon.passes.markers import ORTHOGONALIZE, REDUCE_GRAD, UNSHARD, ReduceGrad

JORDAN = (3.4445, -4.7750, 2.0315) * 5
HYPER = torch.tensor([0.05, 0.95])
MESHES: list[dict[str, int]] = [
    {"shard": 1}, {"shard": 2}, {"shard": 3}, {"shard": 4}, {"replicate": 3}, {"replicate": 2, "shard": 2},
    {"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}, {"shard": 2, "expert": 2},
]  # fmt: skip


@dataclass(frozen=True)
class Param:
    """The whole of a parameter; ``view`` says what of a Muon matrix is one by itself."""

    shape: tuple[int, ...]
    muon: bool
    role: Role = DENSE
    view: View | None = None


@dataclass(frozen=True)
class Case:
    """A frame on the ranks of a mesh, and what its backward is asked for, if that is allowed, of each parameter."""

    axes: dict[str, int]
    stage: int
    params: list[Param]
    wanted: list[tuple[Purpose, bool, bool]]
    over_all: bool
    pairwise: bool
    on_host: bool
    compute: str
    reduce: str
    direction: str
    smallest: int
    exchange_bytes: int


@st.composite
def cases(draw: Any) -> Case:
    axes, halves = draw(st.sampled_from(MESHES)), st.sampled_from(["float32", "bfloat16"])
    params = draw(st.lists(params_of(axes), min_size=1, max_size=5))
    wanted = st.tuples(st.sampled_from(Purpose), st.booleans(), st.booleans())
    return Case(
        axes, draw(st.integers(0, 3)), params, [draw(wanted) for _ in params],
        *(draw(st.booleans()) for _ in range(3)), draw(halves), draw(halves),
        draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"])),
        draw(st.sampled_from([64, 512, 2**20])), draw(st.sampled_from([1, 2**30])),
    )  # fmt: skip


@st.composite
def params_of(draw: Any, axes: dict[str, int]) -> Param:
    rows, cols, number = draw(st.integers(1, 9)), draw(st.integers(1, 7)), draw(st.integers(2, 5))
    kind = draw(st.sampled_from(["matrix", "part", "heads", "columns", "stack", "vector", "scalar"]))
    if kind == "part" and "tensor" in axes:
        return Param((rows + 1, cols + 1), True, Role(tensor_dim=draw(st.integers(0, 1))))
    if kind == "part" and "expert" in axes:
        return Param((number, rows, cols), True, Role(expert=True))
    if kind == "heads":
        return Param((rows * number, cols), True, view=View.of(rows * number, heads=number))
    if kind == "columns":
        return Param((rows, cols * number), True, view=View.of(cols * number, heads=number, dim=1))
    shapes = {"stack": (number, rows, cols), "vector": (rows,), "scalar": ()}
    return Param(shapes.get(kind, (rows, cols)), kind not in ("vector", "scalar"))


def whole(name: str, number: int, param: Param, at: int = 0) -> Tensor:
    """Random numbers that every rank knows; ``at``: of one with other data."""
    seed = sum(place * ord(letter) for place, letter in enumerate(name, 1)) + 10_000 * number + 1_000_000 * at
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))


class Rank:
    """Specs, inputs and lowered graphs of one rank."""

    def __init__(self, case: Case, rank: int, layouts: Sequence[Layout]) -> None:
        self.case, self.rank = case, rank
        self.specs = [self._spec(param, layout) for param, layout in zip(case.params, layouts, strict=True)]
        pairs = list(enumerate(zip(case.params, self.specs, strict=True)))
        compute = decode_dtype(case.compute)
        self.shards = [self.piece("weight", i) for i, _ in pairs]
        self.states = [self.piece("momentum", i) if spec.muon else torch.empty(0) for i, (_, spec) in pairs]
        self.carried = [self.piece(".grad", i) for i, _ in pairs]
        index = [spec.layout.everyone.index for spec in self.specs]
        self.grads, self.earlier = (
            [whole(name, i, param, index[i])[spec.layout.part].clone() for i, (param, spec) in pairs]
            for name in ("gradient", "earlier")
        )
        self.grads = [grad.to(compute) for grad in self.grads]
        self.weights = [whole("weight", i, param)[spec.layout.part].to(compute) for i, (param, spec) in pairs]
        self.residents = [self._resident(*each) for each in zip(self.weights, self.specs, strict=True)]

    def _spec(self, param: Param, layout: Layout) -> ParamSpec:
        case, muon = self.case, None
        layout = dataclasses.replace(layout, pairwise=case.pairwise)
        if param.muon:
            batch = layout.shape[0] if len(param.shape) == 3 else 1
            how = (True, "standard", JORDAN, 1.0, (), case.direction, 1e-7, exchange_of(layout, batch, param.view))
            muon = MuonSpec(batch, *param.shape[-2:], *how, view=param.view)
        host = case.on_host and case.stage == 3 and not case.over_all
        return ParamSpec(layout, "float32", case.compute, case.reduce, muon, on_host=host)

    def piece(self, name: str, number: int) -> Tensor:
        """This rank's piece of a parameter, or of a tensor like it."""
        region = self.specs[number].layout.region(self.rank)
        return whole(name, number, self.case.params[number])[region].clone()

    @staticmethod
    def _resident(weight: Tensor, spec: ParamSpec) -> Tensor | None:
        layout = spec.layout
        if not layout.resident:
            return None
        return (weight if layout.replicated_weight else weight[slice(*layout.shard_rows(layout.shard.index))]).clone()

    @functools.cached_property
    def request(self) -> BackwardRequest:
        """The case's request, as far as gradients allow it."""
        rows = []
        for grad, (purpose, unreduced, carried) in zip(reduced_grads(self.graph(True)), self.case.wanted, strict=True):
            accumulates = grad.spec.layout.accumulates
            allowed = {Purpose.ACCUMULATE: accumulates, Purpose.SPECULATE: grad.speculates}.get(purpose, True)
            chosen = purpose if allowed else Purpose.REDUCE
            both = unreduced and accumulates and chosen is not Purpose.ACCUMULATE
            rows.append((chosen, both, carried and chosen is Purpose.SPECULATE))
        return BackwardRequest(*zip(*rows, strict=True))

    def graph(self, backward: bool) -> GraphModule:
        """Weights are read one behind the other; backward reduces a gradient behind each."""
        graph, fake = Graph(), FakeTensorMode()

        def placeholder(name: str, like: Tensor | None) -> Node | None:
            return None if like is None else note(graph.placeholder(name), like)

        def note(node: Node, like: Tensor) -> Node:
            node.meta["val"] = fake.from_tensor(torch.empty_like(like), static_shapes=True)
            return node

        def call(target: Any, like: Tensor, *args: Any) -> Node:
            return note(graph.call_function(target, args), like)

        aten, scalar = torch.ops.aten, torch.empty(())
        hidden, hyper = placeholder("hidden", scalar), placeholder("hyper", HYPER)
        inputs = [
            [placeholder(f"{name}_{i}", values[i]) for i in range(len(self.specs))]
            for name, values in (("shard", self.shards), ("state", self.states), ("resident", self.residents))
        ]
        grads = [placeholder(f"grad_{i}", grad) for i, grad in enumerate(self.grads)] if backward else []
        outputs = []
        for i, (shard, state, resident) in enumerate(zip(*inputs, strict=True)):
            spec, weight = self.specs[i], self.weights[i]
            read = call(UNSHARD, weight, shard, state, hyper, resident, spec.encode())
            mean = call(aten.mean.default, scalar.to(weight.dtype), read)
            hidden = call(aten.tanh.default, scalar, call(aten.add.Tensor, scalar, hidden, mean))
            if not backward:
                # One weight is returned as it is, products of the others.
                outputs.append(read if i == 0 else call(aten.mul.Tensor, weight, read, 1))
                continue
            late = call(aten.add.Tensor, self.grads[i].float(), grads[i], call(aten.mul.Tensor, scalar, hidden, 0.0))
            late = call(torch.ops.prims.convert_element_type.default, self.grads[i], late, self.grads[i].dtype)
            outputs.append(ReduceGrad.insert(graph, late, state, hyper, spec).node)
        graph.output((*outputs, hidden))
        return GraphModule(torch.nn.Module(), graph)

    def lower(self) -> None:
        """Forward and backward, as all that runs them needs them."""
        self.lowered = {}
        for kind in (GraphKind.FORWARD, GraphKind.BACKWARD):
            backward, options = kind is GraphKind.BACKWARD, PassOptions(exchange_bytes=self.case.exchange_bytes)
            request, outputs = self.request if backward else None, len(self.specs) + 1
            ctx = PassContext(kind, options=options, request=request, user_outputs=outputs)
            self.lowered[kind] = run_passes(self.graph(backward), LOWERING_PASSES, ctx)

    def run(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Gradients, and directions by number; all compared with eager markers."""
        texts = [spec.encode() for spec in self.specs]
        inputs = [x for x in (*self.shards, *self.states, *self.residents) if x is not None]
        before = [x.clone() for x in (*inputs, *self.grads, *self.carried)]
        weights = self.lowered[GraphKind.FORWARD](torch.zeros(()), HYPER, *inputs)[:-1]
        memory = {x.untyped_storage()._cdata for x in inputs}
        assert weights[0].untyped_storage()._cdata not in memory, "a weight that goes out is a copy"
        for i, weight in enumerate(weights):
            assert torch.equal(weight, self.weights[i]) and weight.dtype is self.weights[i].dtype
            assert torch.equal(weight, UNSHARD(self.shards[i], self.states[i], HYPER, self.residents[i], texts[i]))

        request = self.request
        added = [self.earlier[i] for i in request.unreduced_inputs] + [self.carried[i] for i in request.carried_inputs]
        results = list(self.lowered[GraphKind.BACKWARD](torch.zeros(()), HYPER, *inputs, *self.grads, *added))
        count = len(self.specs)
        gradients, extras = results[:count], request.split(results[count + 1 :])
        for i, grad in enumerate(gradients):
            if request.purposes[i] is Purpose.ACCUMULATE:
                assert torch.equal(grad, torch.zeros_like(self.shards[i]))
                assert torch.equal(extras.unreduced[i], self.grads[i].float())
                continue
            summed = self.grads[i] + self.earlier[i] if request.unreduced[i] else self.grads[i]
            assert torch.equal(grad, REDUCE_GRAD(summed, self.states[i], HYPER, texts[i])), "the reduction of a bucket"
            if request.purposes[i] is Purpose.SPECULATE:
                total = self.carried[i] + grad if request.carried[i] else grad
                self.close(extras.directions[i], ORTHOGONALIZE(total, self.states[i], HYPER, [], texts[i])[0])
                assert torch.equal(extras.fingerprints[request.speculated.index(i)], fingerprint([total])[0])
        dtype = decode_dtype(self.case.direction)
        assert {direction.dtype for direction in extras.directions.values()} <= {dtype}
        assert all(map(torch.equal, before, (*inputs, *self.grads, *self.carried))), "inputs are written"
        return gradients, extras.directions

    def close(self, direction: Tensor, expected: Tensor) -> None:
        """Products of lists of matrices add in another order than those of one."""
        assert direction.shape == expected.shape
        tolerance = 1e-3 if self.case.direction == "float32" else 0.3
        torch.testing.assert_close(direction.float(), expected.float(), atol=tolerance, rtol=0)


def joined(ranks: Sequence[Rank], number: int, pieces: Sequence[Tensor]) -> Tensor:
    """A whole tensor of the ranks' pieces; copies must be alike."""
    tensor = torch.zeros(ranks[0].case.params[number].shape)
    regions = [(rank.specs[number].layout.region(rank.rank), piece) for rank, piece in zip(ranks, pieces, strict=True)]
    for region, piece in regions:
        tensor[region] = piece.float()
    assert all(torch.equal(tensor[region], piece.float()) for region, piece in regions)
    return tensor


def directions_of(param: Param, number: int, gradient: Tensor, dtype: str) -> Tensor:
    """The directions of a whole parameter, matrix by matrix."""
    momentum = whole("momentum", number, param).lerp(gradient, 0.05)
    update = gradient.lerp(momentum, 0.95).to(torch.bfloat16 if dtype == "float16" else decode_dtype(dtype))
    direction = functools.partial(newton_schulz, dtype=dtype, method="standard")
    if param.view is None:
        return direction(update)
    return param.view.join([direction(part) for part in param.view.cut(update)])


def check(case: Case, threads: Callable[..., list[Any]]) -> None:
    """Lower for all ranks, run them side by side, and compare with whole tensors."""

    def layouts(rank: int = 0, group: str = "") -> list[Layout]:
        if size == 1:
            return [Layout(param.shape, case.stage) for param in case.params]
        mesh = Mesh.of(
            init_device_mesh("cpu", tuple(case.axes.values()), mesh_dim_names=tuple(case.axes)),
            state_over_all=case.over_all and case.stage > 0,
        )
        return [mesh.layout(param.shape, case.stage, param.role) for param in case.params]

    size = torch.Size(case.axes.values()).numel()
    by_rank = threads(size, layouts) if size > 1 else [layouts()]
    ranks = [Rank(case, rank, each) for rank, each in enumerate(by_rank)]
    with patch.object(buckets, "_SMALLEST", case.smallest):
        for rank in ranks:  # tracing is not for threads
            rank.lower()
    check_meetings(ranks)

    def body(rank: int, group: str = "") -> Any:
        layouts()  # the same process groups
        return ranks[rank].run()

    results = threads(size, body) if size > 1 else [body(0)]
    for i, param in enumerate(case.params):
        purpose, layout = ranks[0].request.purposes[i], ranks[0].specs[i].layout
        if purpose is not Purpose.ACCUMULATE:
            parts = [
                whole("gradient", i, param, at).to(decode_dtype(case.compute)) for at in range(layout.everyone.size)
            ]
            if ranks[0].request.unreduced[i]:
                parts = [part + whole("earlier", i, param, at) for at, part in enumerate(parts)]
            mean = sum(part.float() for part in parts) / layout.divisor
            gradient = joined(ranks, i, [result[0][i] for result in results])
            exact = case.compute == case.reduce == "float32"
            torch.testing.assert_close(gradient, mean, atol=1e-6 if exact else 0.05, rtol=1e-6 if exact else 0.05)
        if purpose is Purpose.SPECULATE:
            total = gradient + whole(".grad", i, param) if ranks[0].request.carried[i] else gradient
            expected = directions_of(param, i, total, case.direction)
            ranks[0].close(joined(ranks, i, [result[1][i] for result in results]), expected)


def check_meetings(ranks: Sequence[Rank]) -> None:
    """Ranks of a group start the same collectives in the same order, and each matrix is at one rank."""
    for kind in ranks[0].lowered:
        starts: dict[str, list[list[object]]] = defaultdict(list)
        matrices = 0
        for rank in ranks:
            gm, orders = rank.lowered[kind], defaultdict(list)
            for node, name in collectives(gm):
                work = work_of(node)
                orders[node.args[-1]].append((name, work.category, work.bucket))
            place = {node: number for number, node in enumerate(gm.graph.nodes)}
            for wait in gm.graph.find_nodes(op="call_function", target=AWAIT_REFRESH_OP):
                assert min(wait.args[0].users, key=place.__getitem__) is wait, "read ahead of its wait"
            for group, order in orders.items():
                starts[group].append(order)
            axes = {axis for spec in rank.specs for axis in spec.layout.axes}
            matrices += measure_traffic(gm, axes).matrices
        assert all(order == same[0] for same in starts.values() for order in same), (kind, starts)
        asked = ranks[0].request.speculated if kind is GraphKind.BACKWARD else ()
        assert matrices == sum(ranks[0].specs[i].matrix_count for i in asked), kind


#: some owner has two matrices of other sizes, and directions go round among replicas
SEVERAL = Case(
    {"replicate": 2, "shard": 2}, 3, [Param(shape, True) for shape in ((7, 4), (2, 5), (6, 6), (5, 3), (3, 7), (4, 4))],
    [(Purpose.SPECULATE, False, False)] * 6, False, False, False, "float32", "float32", "float32", 2**20, 2**30,
)  # fmt: skip


@settings(
    max_examples=20, derandomize=True, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(cases())
@example(SEVERAL)
def test_every_lowered_graph_verifies_and_equals_eager(threads: Callable[..., list[Any]], case: Case) -> None:
    check(case, threads)


@pytest.mark.campaign
@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
@given(cases())
def test_so_do_many_more(threads: Callable[..., list[Any]], case: Case) -> None:
    check(case, threads)
