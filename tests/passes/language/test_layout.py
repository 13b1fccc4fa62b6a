"""Meshes of several axes: what crosses which of them, counted in graphs of worlds that are not there."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from statistics import mean

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from compile_muon import MuonZero
from compile_muon.engine.resident import start_refresh
from compile_muon.kernels import resolve_coefficients
from compile_muon.mesh import DENSE, Mesh, Role
from compile_muon.passes import GraphKind, Purpose, formulas, reduced_grads
from compile_muon.passes.collectives import collectives, measure_traffic
from compile_muon.passes.costs import Costs, owned_work
from compile_muon.passes.exchange.orthogonalize import orthogonalize_group
from compile_muon.passes.exchange.owner import assign_owners
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec

JORDAN = tuple(value for triple in resolve_coefficients("jordan", 5).steps for value in triple)
NAMES = ("replicate", "shard")


def matrix(layout: Layout) -> ParamSpec:
    muon = MuonSpec(1, *layout.joined_shape, True, "standard", JORDAN, 1.0, (), "float32", 1e-7, "owner")
    return ParamSpec(layout, "float32", "float32", "float32", muon)


def traced(specs, owners):
    """The directions of all of them, as one rank's graph."""

    def directions(*tensors):
        count = len(specs)
        hyper = tensors[-1]
        return orthogonalize_group(tensors[:count], tensors[count:-1], [hyper] * count, specs, owners)

    with FakeTensorMode() as fake:
        shards = [torch.empty(spec.layout.local_shape) for spec in specs]
        return make_fx(directions, tracing_mode="real")(*shards, *shards, torch.empty(2)), fake


@pytest.mark.full
@pytest.mark.parametrize(
    ("replicas", "shards", "over_all"),
    [(64, 8, True), *(pytest.param(*given, marks=pytest.mark.campaign) for given in ((64, 8, False), (2, 256, False)))],
)
def test_every_matrix_once_in_a_world_of_512(replicas, shards, over_all, world):
    """As many matrices as ranks, so that all ranks send the same."""
    for rank in (0, 511):
        with world(rank, 512):
            mesh = Mesh.of(init_device_mesh("cpu", (replicas, shards), mesh_dim_names=NAMES), state_over_all=over_all)
            specs = [matrix(mesh.layout((512, 256), 3))] * 512
            owners = assign_owners(specs, Costs())
            assert sorted(owners) == list(range(512))
            gm, _ = traced(specs, owners)
        traffic = measure_traffic(gm, specs[0].layout.axes)
        assert traffic.matrices == 1
        strategy = "owner_over_all" if over_all else "owner"
        formula = formulas.bytes_by_axis(strategy, 512, 256, shards=shards, replicas=replicas, itemsize=4)
        assert dict(traffic.by_axis) == {axis: pytest.approx(512 * sent, rel=1e-6) for axis, sent in formula.items()}


@pytest.mark.parametrize(
    ("sizes", "names", "role"),
    [
        *(
            pytest.param(*given, marks=pytest.mark.full if "expert" in given[1] else pytest.mark.campaign)
            for given in (
                ((64, 8), ("shard", "tensor"), Role(tensor_dim=0)),
                ((64, 8), ("shard", "tensor"), Role(tensor_dim=1)),
                ((64, 8), ("shard", "tensor"), DENSE),
                ((8, 8, 8), ("replicate", "shard", "tensor"), Role(tensor_dim=1)),
                ((8, 8, 8), ("replicate", "expert", "tensor"), DENSE),
            )
        ),
        ((2, 2, 4, 2), ("replicate", "shard", "expert", "tensor"), Role(tensor_dim=0)),
    ],
    ids=str,
)
def test_matrices_of_parts_of_a_model_once_in_a_world_of_several_axes(sizes, names, role, world):
    """Pieces meet over shard and tensor ranks, and directions go to whoever holds a copy; bytes as the formulas say."""
    ranks = math.prod(sizes)
    with world(ranks * 300 // 512, ranks):
        mesh = Mesh.of(init_device_mesh("cpu", sizes, mesh_dim_names=names))
        specs = [matrix(mesh.layout((512, 256), 3, role))] * ranks
        owners = assign_owners(specs, Costs())
        gm, _ = traced(specs, owners)
    layout = specs[0].layout
    assert len(set(owners)) == ranks
    assert layout.owner_group.size * layout.replica_group.size == ranks
    traffic = measure_traffic(gm, layout.axes)
    assert traffic.matrices == 1
    size = {"shards": layout.owner_group.size, "replicas": layout.replica_group.size, "itemsize": 4}
    formula = formulas.bytes_by_axis("owner", 512, 256, **size)
    name_of = {"shard": layout.owner_group.name, "replicate": layout.replica_group.name}
    expected = {name_of[axis]: pytest.approx(ranks * sent, rel=1e-6) for axis, sent in formula.items()}
    assert dict(traffic.by_axis) == expected


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((8, 8, 8), ("replicate", "shard", "expert")),
        ((8, 8, 8), ("shard", "expert", "tensor")),
        ((64, 8), ("shard", "expert")),
        ((64, 8), ("replicate", "expert")),
    ],
    ids=str,
)
def test_experts_once_in_a_world_of_512(sizes, names, world):
    """They are whole where they live; ranks that hold the same ones share them."""
    with world(300, 512):
        mesh = Mesh.of(init_device_mesh("cpu", sizes, mesh_dim_names=names))
        experts = mesh.axis("shard").size if "shard" in names else 64  # at a place along expert
        layout = mesh.layout((experts * 8, 16, 24), 3, Role(expert=True))
        muon = MuonSpec(experts, 16, 24, True, "standard", JORDAN, 1.0, (), "float32", 1e-7, "local")
        copies = layout.replica_group.size
        stacks = copies if layout.sharded else 1  # as many matrices as ranks hold each
        specs = [ParamSpec(layout, "float32", "float32", "float32", muon)] * stacks
        gm, _ = traced(specs, assign_owners(specs, Costs()))
    assert layout.shape == (experts, 16, 24)
    assert layout.local_shape == (1 if layout.sharded else experts, 16, 24)
    assert layout.divisor == 512 // mesh.axis("tensor").size
    traffic = measure_traffic(gm, layout.axes)
    assert traffic.matrices == 1
    size = {"shards": layout.owner_group.size, "replicas": copies, "itemsize": 4}
    sent = formulas.bytes_by_axis("local", 16, 24, **size).get("replicate", 0)
    assert dict(traffic.by_axis) == ({layout.replica_group.name: stacks * experts * sent} if sent else {})


@pytest.mark.parametrize("role", [DENSE, Role(expert=True)], ids=["one matrix", "one expert a rank"])
def test_what_few_ranks_hold_is_not_padded_for_all_others(role, world):
    """An exchange may be of a single matrix: its owner's rows go to each replica, and nothing comes back."""
    names, sizes = ("replicate", "shard", "expert"), (4, 2, 2)
    sent: Counter[str] = Counter()
    matrices = []
    for rank in range(16):
        with world(rank, 16):
            mesh = Mesh.of(init_device_mesh("cpu", sizes, mesh_dim_names=names))
            shape = (4, 16, 8) if role.expert else (16, 8)
            layout = mesh.layout(shape, 3, role)
            muon = MuonSpec(2 if role.expert else 1, 16, 8, True, "standard", JORDAN, 1.0, (), "float32", 1e-7,
                            "local" if role.expert else "owner")  # fmt: skip
            specs = [ParamSpec(layout, "float32", "float32", "float32", muon)]
            gm, _ = traced(specs, owners=[layout.owner_group.size])  # of the second replica
        traffic = measure_traffic(gm, layout.axes)
        sent.update(dict(traffic.by_axis))
        matrices.append(traffic.matrices)
    # In the second replica alone: each of its four ranks has an expert, or the first of them the matrix.
    assert matrices == [0] * 4 + ([1] * 4 if role.expert else [1, 0, 0, 0]) + [0] * 8
    strategy, rows, shards = ("local", 2 * 16, 2) if role.expert else ("owner", 16, 4)
    formula = formulas.bytes_by_axis(strategy, rows, 8, shards=shards, replicas=4, itemsize=4)
    assert sent["replicate"] == 16 * formula["replicate"]


@pytest.mark.parametrize(
    ("stage", "over"),
    [
        pytest.param(2, "shard", marks=pytest.mark.full),
        (3, "all"),
        pytest.param(1, "shard", marks=pytest.mark.campaign),
        *(pytest.param(*given, marks=pytest.mark.campaign) for given in ((3, "shard"), (2, "all"))),
    ],
)
def test_only_gradients_cross_replicas_in_forward_and_backward(stage, over, uneven):
    """Weights are gathered inside a replica; of a gradient the shards are summed over the others."""
    graphs = [uneven(rank, 6, stage=stage, mesh=(2, 3), shard_state_over=over) for rank in (0, 5)]
    layouts = [grad.spec.layout for grad in reduced_grads(graphs[0].backward)]
    axis_of = {axis.group: axis.name for layout in layouts for axis in layout.axes}
    forward = Counter(axis_of[node.args[-1]] for node, _ in collectives(graphs[0].lowered(GraphKind.FORWARD)[0]))
    assert set(forward) == ({"shard"} if stage == 3 else set())
    backward = graphs[0].lowered(GraphKind.BACKWARD, Purpose.REDUCE)[0]
    crossing = [kind for node, kind in collectives(backward) if axis_of[node.args[-1]] == "replicate"]
    assert crossing == ["all_reduce" if over == "shard" else "reduce_scatter"]
    traffic = [
        dict(measure_traffic(g.lowered(GraphKind.BACKWARD, Purpose.REDUCE)[0], layouts_of(g)).by_axis) for g in graphs
    ]
    if over == "shard":
        sizes = [sum(layout.chunk * layout.row_numel for layout in layouts if layout.sharded)] * 2
        # 2 (M - 1) / M of a shard, padded to the largest as the reduce-scatter leaves it
        assert [found["replicate"] for found in traffic] == [4 * size for size in sizes]
        return
    for found, g in zip(traffic, graphs, strict=True):
        cut = [grad.spec.layout for grad in reduced_grads(g.backward) if grad.spec.layout.cut_twice]
        # (M - 1) / M of the rank's own slice, rounded up to pieces of the same size
        rows = [-(-layout.slice_shape[0] // 2) for layout in cut]
        assert found["replicate"] == 4 * sum(r * layout.row_numel for r, layout in zip(rows, cut, strict=True))


def layouts_of(graphs):
    return {axis for grad in reduced_grads(graphs.backward) for axis in grad.spec.layout.axes}


@pytest.mark.parametrize("over", [pytest.param("shard", marks=pytest.mark.full), "all"])
def test_directions_cost_what_the_formulas_say_by_axis(over, uneven):
    settings = {"stage": 2, "mesh": (2, 2), "shard_state_over": over}
    graphs = [uneven(rank, 4, **settings) for rank in range(4)]
    specs = [grad.spec for grad in reduced_grads(graphs[0].backward) if grad.spec.muon]
    sent: list[Counter[str]] = []
    matrices = 0
    for g in graphs:
        axes = layouts_of(g)
        made = measure_traffic(g.lowered(GraphKind.BACKWARD, Purpose.SPECULATE)[0], axes)
        reduced = measure_traffic(g.lowered(GraphKind.BACKWARD, Purpose.REDUCE)[0], axes)
        sent.append(Counter(dict(made.by_axis)) - Counter(dict(reduced.by_axis)))
        matrices += made.matrices
    strategy = "owner" + (formulas.OVER_ALL if over == "all" else "")
    sizes = [formulas.bytes_by_axis(strategy, *spec.layout.shape, shards=2, replicas=2, itemsize=4) for spec in specs]
    assert matrices == len(specs)
    for axis in ("shard", "replicate", "all"):
        formula = sum(found.get(axis, 0.0) for found in sizes)
        # few matrices of different sizes: rows are padded, shards uneven, and replicas own more or less of them
        assert formula / 2 <= mean(found[axis] for found in sent) <= 2 * formula


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resident_weights_cost_what_the_formulas_say_by_axis(stage, world):
    """After a step: pieces to slices over the replicas, and below stage 3 slices to weights inside each."""
    with world(4, 6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=NAMES)
        model = torch.nn.Sequential(torch.nn.Linear(36, 24, bias=False), torch.nn.Linear(24, 12, bias=False))
        optimizer = MuonZero(model, mesh=mesh, stage=stage, shard_state_over="all", param_dtype="bf16")
        sent = start_refresh(optimizer.engine.params)
    assert {tuple(a.resident.shape) for a in optimizer.engine.params} == (
        {(24, 36), (12, 24)} if stage < 3 else {(8, 36), (4, 24)}
    )
    formula: Counter[str] = Counter()
    for shape in ((24, 36), (12, 24)):
        for collective in ("slice_gather", "all_gather") if stage < 3 else ("slice_gather",):
            formula.update(formulas.bytes_by_axis(collective, *shape, shards=3, replicas=2, itemsize=2))
    assert dict(sent.by_axis) == formula
    assert sent.bytes_sent == sum(formula.values())


MESHES = [
    ((2, 2), ("shard", "tensor")),
    ((2, 3), ("replicate", "tensor")),
    ((2, 2, 2), ("replicate", "shard", "tensor")),
    ((2, 2), ("shard", "expert")),
    ((2, 2, 2), ("replicate", "shard", "expert")),
    ((2, 2, 2, 2), ("replicate", "shard", "expert", "tensor")),
]


@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=str)
@pytest.mark.parametrize("over_all", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_pieces_are_those_of_dtensor(sizes, names, over_all, stage, world):
    """Regions of the whole, what a rank's model has, and how the pieces of a matrix join and are cut again."""
    count = math.prod(sizes)
    roles = {(5, 3): DENSE, (): DENSE}
    if "tensor" in names:
        roles |= {(13, 4): Role(tensor_dim=0), (6, 7): Role(tensor_dim=1), (3, 2, 5): Role(tensor_dim=2)}
        roles |= {(1, 9): Role(tensor_dim=1), (9, 1): Role(tensor_dim=0), (7,): Role(tensor_dim=0)}
    if "expert" in names:
        roles |= {(6, 2, 3): Role(expert=True), (2, 4, 1): Role(expert=True), (8, 3): Role(expert=True)}
    found: dict[tuple[int, ...], list[tuple[Layout, torch.Tensor]]] = {shape: [] for shape in roles}
    for rank in range(count):
        with world(rank, count):
            mesh = Mesh.of(init_device_mesh("cpu", sizes, mesh_dim_names=names), state_over_all=over_all)
            for shape, role in roles.items():
                layout = mesh.layout(shape, stage, role)
                numbers = torch.arange(math.prod(shape)).view(shape)
                placements = mesh.placements(layout, role)
                local = distribute_tensor(numbers, mesh.device_mesh(role), placements, src_data_rank=None).to_local()
                assert torch.equal(local, numbers[layout.region(rank)]), (shape, rank)
                part = numbers[layout.part]
                assert torch.equal(local, part[layout.local_rows] if layout.sharded else part)
                assert (tuple(local.shape), tuple(part.shape)) == (layout.local_shape, layout.shape)
                assert tuple(local.shape) == layout.owner_group_shape(layout.owner_group.index)
                found[shape].append((layout, local))
    for shape, ranks in found.items():
        whole = torch.arange(math.prod(shape)).view(shape)
        layout = ranks[0][0]
        assert layout.ranks == count
        once = [n for holder in layout.holders for n in ranks[holder][1].flatten().tolist()]
        assert sorted(once) == list(range(whole.numel()))
        assert not layout.cut_in_rows or once == sorted(once)
        assert sum(local.numel() for _, local in ranks) == whole.numel() * layout.copies
        for number, (layout, _) in enumerate(ranks):
            # who meets: the ranks of the owners of this rank's company, at this rank's place along expert
            width = layout.owner_group.size
            company = [layout.owner_ranks(layout.replica_group.index * width + place) for place in range(width)]
            place = number // layout.tensor.size % layout.expert.size
            pieces = [ranks[members[place]][1].flatten() for members in company]
            assert company[layout.owner_group.index][place] == number
            matrices = layout.join(pieces)
            experts = whole.chunk(layout.expert.size)[place] if not layout.expert.alone else whole
            assert torch.equal(matrices, experts)
            for at, piece in enumerate(pieces):
                assert torch.equal(layout.cut(matrices.flatten(), at).flatten(), piece)


SHAPES = [(8,), (5, 3), (1, 4), (2, 3, 5), (13, 2), (6, 1), (7, 2), (25, 1), ()]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 3)])
@pytest.mark.parametrize("over_all", [False, True])
def test_rows_are_those_of_dtensor(sizes, over_all, world):
    ranks = sizes[0] * sizes[1]
    found: dict[tuple[int, ...], dict[int, list[int]]] = {shape: {} for shape in SHAPES}
    for rank in range(ranks):
        with world(rank, ranks):
            mesh = Mesh.of(init_device_mesh("cpu", sizes, mesh_dim_names=NAMES), state_over_all=over_all)
            for shape in SHAPES:
                layout = mesh.layout(shape, 2)
                numbers = torch.arange(layout.numel).view(shape)
                placed = distribute_tensor(numbers, mesh.device_mesh(), mesh.placements(layout), src_data_rank=None)
                local = placed.to_local()
                ours = numbers[layout.local_rows] if layout.sharded else numbers
                assert torch.equal(local, ours), (shape, rank)
                assert tuple(local.shape) == layout.local_shape
                assert local.numel() == layout.local_numel
                assert not layout.sharded or local.numel() <= layout.widest_piece
                found[shape][rank] = local.flatten().tolist()
    for shape, pieces in found.items():
        # held once, in the order of the holders; by as many ranks as the layout says
        assert [n for rank in mesh.layout(shape, 2).holders for n in pieces[rank]] == list(range(math.prod(shape)))
        assert sum(map(len, pieces.values())) == math.prod(shape) * mesh.layout(shape, 2).copies


def test_owners_of_an_8b_model_on_64_ranks_are_balanced():
    block = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
    for replicas, shards in ((1, 64), (8, 8)):
        axes = Axis("shard", shards, 0, "s"), Axis("replicate", replicas, 0, "r")
        both = None if replicas == 1 else Axis("all", 64, 0, "a")
        specs = [matrix(Layout(shape, 3, *axes, both)) for shape in block * 32]
        load = [0.0] * 64
        for spec, owner in zip(specs, assign_owners(specs, Costs()), strict=True):
            load[owner] += owned_work(spec.muon_settings, Costs(), spec.muon_settings.matrices)
        print(f"{replicas} x {shards}: owner balance {max(load) / mean(load):.3f}")
        assert max(load) / mean(load) <= 1.1


def test_few_matrices_are_spread_over_the_replicas():
    axes = Axis("shard", 4, 0, "s"), Axis("replicate", 3, 0, "r")
    specs = [matrix(Layout((8, 8), 2, *axes, Axis("all", 12, 0, "a")))] * 6
    assert Counter(owner // 4 for owner in assign_owners(specs, Costs())) == {0: 2, 1: 2, 2: 2}


def test_one_axis_is_any_of_them():
    for shard, replicate in itertools.product((1, 3), repeat=2):
        layout = Layout((6, 2), 2, Axis("shard", shard, 0, "s"), Axis("replicate", replicate, 0, "r"))
        if (shard, replicate) != (3, 3):
            assert layout.everyone.size == max(shard, replicate)
        assert layout.sharded == (shard == 3)
        assert layout.copies == (replicate if shard == 3 else max(shard, replicate))
