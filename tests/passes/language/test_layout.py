"""Meshes of several axes: what crosses which of them, counted in graphs of worlds that are not there."""

import math
from collections import Counter

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
from compile_muon.passes import formulas
from compile_muon.passes.collectives import measure_traffic
from compile_muon.passes.costs import Costs
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


@pytest.mark.parametrize(
    ("sizes", "names", "role", "over_all"),
    [
        ((2, 2, 4, 2), ("replicate", "shard", "expert", "tensor"), Role(tensor_dim=0), False),
        pytest.param((64, 8), NAMES, DENSE, True, marks=pytest.mark.full),
        pytest.param((8, 8, 8), ("replicate", "expert", "tensor"), DENSE, False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_matrices_of_parts_of_a_model_once_in_a_world_of_several_axes(sizes, names, role, over_all, world):
    """Pieces meet over shard and tensor ranks, and directions go to whoever holds a copy; bytes as the formulas say."""
    ranks = math.prod(sizes)
    with world(ranks * 300 // 512, ranks):
        mesh = Mesh.of(init_device_mesh("cpu", sizes, mesh_dim_names=names), state_over_all=over_all)
        specs = [matrix(mesh.layout((512, 256), 3, role))] * ranks
        owners = assign_owners(specs, Costs())
        gm, _ = traced(specs, owners)
    layout = specs[0].layout
    assert len(set(owners)) == ranks
    traffic = measure_traffic(gm, layout.axes)
    assert traffic.matrices == 1
    if over_all:
        formula = formulas.bytes_by_axis("owner_over_all", 512, 256, shards=sizes[1], replicas=sizes[0], itemsize=4)
        name_of = {axis: axis for axis in formula}
    else:
        assert layout.owner_group.size * layout.replica_group.size == ranks
        size = {"shards": layout.owner_group.size, "replicas": layout.replica_group.size, "itemsize": 4}
        formula = formulas.bytes_by_axis("owner", 512, 256, **size)
        name_of = {"shard": layout.owner_group.name, "replicate": layout.replica_group.name}
    expected = {name_of[axis]: pytest.approx(ranks * sent, rel=1e-6) for axis, sent in formula.items()}
    assert dict(traffic.by_axis) == expected


@pytest.mark.parametrize(
    ("sizes", "names"), [((8, 8, 8), ("shard", "expert", "tensor")), ((64, 8), ("replicate", "expert"))], ids=str
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
    ((4, 3), NAMES),
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
    roles = dict.fromkeys([(5, 3), (8,), (1, 4), (2, 3, 5), (25, 1), ()], DENSE)
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


def test_few_matrices_are_spread_over_the_replicas():
    axes = Axis("shard", 4, 0, "s"), Axis("replicate", 3, 0, "r")
    specs = [matrix(Layout((8, 8), 2, *axes, Axis("all", 12, 0, "a")))] * 6
    assert Counter(owner // 4 for owner in assign_owners(specs, Costs())) == {0: 2, 1: 2, 2: 2}
