"""Tensor slices and experts beside data parallelism: training equals training of the whole model."""

import math
import random
from typing import Any

import pytest
import torch
from support.harness import RanksOf, on_ranks
from support.odd import cases, loss
from support.reference import full
from support.sliced import Mixture, data, model_of, on_mesh, spread, train_on_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import compile_muon
from compile_muon import MuonZero


@cases(((3, "step", 2),), full=((0, "step", 1), (3, "backward", 2)))
@on_ranks(4)
def test_shards_of_tensor_slices(settings: dict[str, Any]) -> None:
    train_on_mesh("sliced", {"shard": 2, "tensor": 2}, **settings)


@cases(((3, "step", 1),), full=((1, "backward", 2),))
@on_ranks(4)
def test_shards_of_experts(settings: dict[str, Any]) -> None:
    train_on_mesh("mixture", {"shard": 2, "expert": 2}, **settings)


@pytest.mark.parametrize(
    ("kind", "sizes", "settings"),
    [
        ("mixture", {"expert": 2}, {"stage": 1, "update": "step", "count": 8, "marked": True}),
        pytest.param("mixture", {"expert": 2, "tensor": 2}, {"stage": 3, "update": "step"}, marks=pytest.mark.full),
        pytest.param("sliced", {"tensor": 2}, {"stage": 3, "codegen": "inductor"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_other_meshes(ranks: RanksOf, kind: str, sizes: dict[str, int], settings: dict[str, Any]) -> None:
    ranks(math.prod(sizes.values())).run(train_on_mesh, kind=kind, sizes=sizes, **settings)


#: axes beside "tensor", "expert" or both
MESHES = {
    "sliced": (["tensor"], ["shard", "tensor"], ["replicate", "tensor"], ["replicate", "shard", "tensor"]),
    "mixture": (
        ["expert"], ["shard", "expert"], ["replicate", "expert"], ["expert", "tensor"],
        ["replicate", "shard", "expert"], ["replicate", "expert", "tensor"],
    ),
    "both": (["shard", "expert", "tensor"], ["replicate", "expert", "tensor"]),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.campaign) for n in range(2, 30))])
@pytest.mark.parametrize("kind", MESHES)
def test_drawn_meshes(ranks: RanksOf, kind: str, seed: int) -> None:
    dice = random.Random(f"{kind} {seed}")
    axes = dice.choice(MESHES[kind])
    given: dict[str, Any] = {"stage": dice.randrange(4), "update": dice.choice(["step", "backward"])}
    given["gradient_accumulation_steps"] = dice.choice([1, 2])
    if seed > 3 and dice.random() < 0.2:
        given["codegen"] = "inductor"
    if "replicate" in axes and given["stage"]:
        given["shard_state_over"] = dice.choice(["shard", "all"])
    if kind == "sliced":
        given["tied"] = dice.random() < 0.3
    elif kind == "mixture":
        given |= {"count": dice.choice([4, 6, 8]), "marked": dice.random() < 0.3}
    ranks(2 ** len(axes)).run(train_on_mesh, kind=kind, sizes=dict.fromkeys(axes, 2), **given)


def clipped(kind: str, sizes: dict[str, int] | None, by: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after three clipped steps, and the norms that were clipped."""
    limit, model, mesh = 0.05, model_of(kind), on_mesh(sizes)
    spread(model, mesh)
    clipping = limit if by == "optimizer" else None
    optimizer = MuonZero(model, lr=0.02, ns_dtype="fp32", stage=2, mesh=mesh, gradient_clipping=clipping)
    norms = []
    for step in range(3):
        loss(model, data(step, 0, 0)).backward()
        if by == "ours":
            norms.append(float(compile_muon.clip_grad_norm_(model.parameters(), limit)))
        elif by == "torch":
            norms.append(float(full(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))))
        optimizer.step()
        if by == "optimizer":
            norms.append(optimizer.metrics()["grad_norm"])
        optimizer.zero_grad()
    return {name: full(param).detach().clone() for name, param in model.named_parameters()}, norms


@pytest.mark.parametrize(
    ("kind", "sizes", "by"),
    [
        ("mixture", {"expert": 2}, "ours"),
        pytest.param(
            "sliced", {"shard": 2, "tensor": 2}, "torch", marks=pytest.mark.full
        ),  # one mesh: torch's own does
        *(
            pytest.param(kind, {"shard": 2, axis: 2}, by, marks=pytest.mark.full)
            for kind, axis in (("sliced", "tensor"), ("mixture", "expert"))
            for by in ("ours", "optimizer")
        ),
    ],
    ids=str,
)
def test_clipping_counts_every_element_once(ranks: RanksOf, kind: str, sizes: dict[str, int], by: str) -> None:
    expected, norms = ranks(1).run(clipped, kind=kind, sizes=None, by="torch")[0]
    assert min(norms) > 0.05
    for found, theirs in ranks(math.prod(sizes.values())).run(clipped, kind=kind, sizes=sizes, by=by):
        assert theirs == pytest.approx(norms, rel=1e-5)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("indivisible", r"layers.1.up: .* on expert 4: 6 along dim 0 are not 4 equal parts of a stack .*; cut dim 0"),
        ("foreign", r"layers.1.up: .* on tensor 2, which is no axis of the mesh \(shard 2 x tensor 2\); "),
        ("two axes", r"layers.1.up: .* on shard 2 x tensor 2, on two axes at once \(shard and tensor\); give"),
        ("sharded", r"layers.1.up: .* on shard 2, the axis shard of which MuonZero cuts itself; cut it over mesh"),
        ("two roles", r"layers.1.up: is a DTensor on tensor 2 and marked with mesh = shard 2; "),
        ("mark", r"layers.1.up: is marked with mesh = tensor 2, which is not the axis of experts; "),
        ("partial", r"layers.1.up: .*P\(sum\) is neither Shard nor Replicate; cut it into contiguous parts"),
        ("no mesh", r"layers.1.up: .* on tensor 2, which is no axis of the mesh \(shard 4\); "),
        ("one matrix", r"layers.1.up: is cut over the axis expert, and shape \[8, 8\] is one matrix, not a stack"),
        ("names", r"mesh = .*: has the dimensions \('tensor', 'shard'\); name them as here and give them in"),
        ("unknown", r"mesh = .*: has the dimensions \('shard', 'tp'\); name them as here"),
    ],
)
@on_ranks(4)
def test_what_does_not_fit_is_refused_on_every_rank(case: str, said: str) -> None:
    sizes, names = ((4,), ("expert",)) if case == "indivisible" else ((2, 2), ("shard", "tensor"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model: Any = Mixture(6)
    own, weight = nn.Parameter(torch.randn(2, 8, 6)), torch.randn(8, 8)
    given: DeviceMesh | None = mesh
    match case:
        case "indivisible":
            param = nn.Parameter(distribute_tensor(torch.randn(6, 8, 6), mesh, [Shard(0)]))
        case "foreign":
            other = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("shard", "tensor"))
            param = nn.Parameter(distribute_tensor(weight, other["tensor"], [Shard(0)]))
        case "two axes":
            param = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0), Shard(1)]))
        case "sharded":
            param = nn.Parameter(distribute_tensor(weight, mesh["shard"], [Shard(0)]))
        case "two roles":
            param = nn.Parameter(distribute_tensor(weight, mesh["tensor"], [Shard(0)]))
            param.mesh = mesh["shard"]
        case "mark":
            param = own
            param.mesh = mesh["tensor"]
        case "partial":
            local = DTensor.from_local(weight, mesh["tensor"], [Partial()], run_check=False)
            param = nn.Parameter(local)
        case "no mesh":
            param, given = nn.Parameter(distribute_tensor(weight, mesh["tensor"], [Shard(0)])), None
        case "one matrix":
            mesh = given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
            param = nn.Parameter(distribute_tensor(weight, mesh["expert"], [Shard(0)]))
        case "names":
            given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))
            param = own
        case _:
            param = own
            given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model.layers[1].up = param
    before = dict(model.named_parameters())
    with pytest.raises(compile_muon.MuonZeroError, match=said):
        MuonZero(model, mesh=given)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
