"""Tensor slices and experts beside data parallelism: training equals training of the whole model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import Ranks
from support.odd import STEPS, cases, loss
from support.reference import DEVICE, Report, full, hidden_matrices, train
from support.reference import placed as on_device
from support.sliced import PLAN, Sliced, data, train_sliced
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import compile_muon
from compile_muon import MuonZero

# ------------------------------------------------------------------------------------------------- tensor parallel


def check(group: Ranks, **settings: Any) -> None:
    for rank, report in enumerate(group.run(train_sliced, **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


@cases(
    (
        (0, "step", 2),
        (3, "step", 1),
    ),
    campaign=(
        (1, "backward", 2),
        (0, "backward", 1),
        (2, "step", 1),
        (2, "backward", 1),
        (3, "backward", 2),
    ),
)
def test_shards_of_tensor_slices(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    check(ranks(4), sizes=(2, 2), names=("shard", "tensor"), **settings)


@pytest.mark.parametrize(
    ("sizes", "names", "settings"),
    [
        pytest.param((4,), ("tensor",), {"stage": 3, "update": "backward"}, marks=pytest.mark.campaign),
        pytest.param((4,), ("tensor",), {"stage": 0, "update": "step"}, marks=pytest.mark.campaign),
        pytest.param(
            (2, 2),
            ("replicate", "tensor"),
            {"stage": 2, "update": "backward", "tied": True},
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            (2, 2),
            ("shard", "tensor"),
            {"stage": 3, "update": "backward", "codegen": "inductor"},
            marks=pytest.mark.campaign,
        ),
        pytest.param((2,), ("tensor",), {"stage": 3, "codegen": "inductor"}, marks=pytest.mark.full),
        pytest.param((2, 2), ("replicate", "tensor"), {"stage": 2, "codegen": "inductor"}, marks=pytest.mark.campaign),
        pytest.param(
            (2, 2, 2),
            ("replicate", "shard", "tensor"),
            {"stage": 3, "update": "backward"},
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            (2, 2, 2),
            ("replicate", "shard", "tensor"),
            {"stage": 1, "shard_state_over": "all"},
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            (2, 2, 2),
            ("replicate", "shard", "tensor"),
            {"stage": 3, "shard_state_over": "all"},
            marks=pytest.mark.campaign,
        ),
    ],
    ids=str,
)
def test_tensor_slices_on_other_meshes(
    ranks: Callable[[int], Ranks], sizes: tuple[int, ...], names: tuple[str, ...], settings: dict[str, Any]
) -> None:
    check(ranks(torch.Size(sizes).numel()), sizes=sizes, names=names, **settings)


# ------------------------------------------------------------------------------------------------ expert parallel


class Experts(nn.Module):
    """Every token through every expert of a group of ranks, weighted: what dispatch does, without its sizes."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, count)
        self.up = nn.Parameter(torch.randn(count, 8, 6) / 3)
        self.bias = nn.Parameter(torch.randn(count, 6) / 3)
        self.down = nn.Parameter(torch.randn(count, 6, 8) / 3)
        self.mesh: DeviceMesh | None = None

    def spread(self, mesh: DeviceMesh, marked: bool) -> None:
        """Keep this rank's experts, as DTensors or as plain tensors with a mark."""
        self.mesh = mesh
        for name in ("up", "bias", "down"):
            own = getattr(self, name).detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            param = nn.Parameter(own if marked else DTensor.from_local(own, mesh, [Shard(0)]))
            if marked:
                param.mesh = mesh  # type: ignore[attr-defined]
            setattr(self, name, param)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        up, bias, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.bias, self.down))
        mesh = self.mesh
        if mesh is not None:
            x, weights = (collectives.all_gather_tensor_autograd(t, 0, mesh.get_group()) for t in (x, weights))
            weights = weights[..., mesh.get_local_rank() * up.shape[0] :][..., : up.shape[0]]
        hidden = torch.relu(torch.einsum("bth,ehi->beti", x, up) + bias[:, None])
        y = torch.einsum("beti,eih,bte->bth", hidden, down, weights)
        return y if mesh is None else collectives.reduce_scatter_tensor_autograd(y, "sum", 0, mesh.get_group())


def spread(model: nn.Module, mesh: DeviceMesh, *, marked: bool = False) -> None:
    """The parts of a :class:`Mixture` that this rank has."""
    names = mesh.mesh_dim_names or ()
    for layer in model.layers if "expert" in names else ():
        layer.spread(mesh["expert"], marked)
    if "tensor" in names:
        plan = {"dense": ColwiseParallel(use_local_output=False), "back": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)


class Mixture(nn.Module):
    """A dense part and two layers of experts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Experts(count) for _ in range(2))
        self.dense = nn.Linear(8, 5)
        self.back = nn.Linear(5, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h + self.back(self.dense(h).tanh()))


def train_mixture(
    sizes: tuple[int, ...], names: tuple[str, ...], count: int = 4, marked: bool = False, **settings: Any
) -> Report:
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)
    model = Mixture(count)
    whole = copy.deepcopy(model)
    spread(model, mesh, marked=marked)
    sharing = mesh.size(names.index("tensor")) if "tensor" in names else 1
    matrices = hidden_matrices(whole, exclude=("embedding", "head", "bias"), stacks=("up", "down"))
    return train(model, matrices, loss, data, steps=STEPS, unsharded=whole, sharing=sharing, mesh=mesh, **settings)


@cases(
    ((3, "step", 1),),
    campaign=((1, "backward", 2), (0, "backward", 1), (2, "step", 1), (3, "backward", 2)),
)
def test_shards_of_experts(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    for rank, report in enumerate(ranks(4).run(train_mixture, sizes=(2, 2), names=("shard", "expert"), **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


@pytest.mark.parametrize(
    ("sizes", "names", "settings"),
    [
        pytest.param((4,), ("expert",), {"stage": 3, "update": "backward"}, marks=pytest.mark.campaign),
        ((4,), ("expert",), {"stage": 1, "update": "step", "count": 8, "marked": True}),
        pytest.param(
            (2, 2),
            ("replicate", "expert"),
            {"stage": 2, "update": "backward"},
            marks=pytest.mark.campaign,
        ),
        pytest.param((2, 2), ("expert", "tensor"), {"stage": 3, "update": "backward"}, marks=pytest.mark.campaign),
        ((2, 2), ("expert", "tensor"), {"stage": 3, "update": "step"}),
        pytest.param(
            (2, 2),
            ("shard", "expert"),
            {"stage": 3, "update": "backward", "codegen": "inductor", "marked": True},
            marks=pytest.mark.campaign,
        ),
        pytest.param((2, 2), ("replicate", "expert"), {"stage": 1, "codegen": "inductor"}, marks=pytest.mark.campaign),
        pytest.param((2, 2), ("expert", "tensor"), {"stage": 2, "codegen": "inductor"}, marks=pytest.mark.campaign),
        pytest.param(
            (2, 2, 2),
            ("replicate", "shard", "expert"),
            {"stage": 3, "update": "backward", "count": 6},
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            (2, 2, 2),
            ("replicate", "shard", "expert"),
            {"stage": 2, "shard_state_over": "all", "count": 6},
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            (2, 2, 2),
            ("replicate", "expert", "tensor"),
            {"stage": 1, "gradient_accumulation_steps": 2},
            marks=pytest.mark.campaign,
        ),
    ],
    ids=str,
)
def test_experts_on_other_meshes(
    ranks: Callable[[int], Ranks], sizes: tuple[int, ...], names: tuple[str, ...], settings: dict[str, Any]
) -> None:
    reports = ranks(torch.Size(sizes).numel()).run(train_mixture, sizes=sizes, names=names, **settings)
    for rank, report in enumerate(reports):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


# ---------------------------------------------------------------------------------------------------------- all at once


class Both(Sliced):
    """Tensor slices, then experts on the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 8, bias=False)
        self.experts = Experts(4)
        self.out = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits + self.out(self.experts(self.into(logits)))


def train_both(sizes: tuple[int, ...], names: tuple[str, ...], **settings: Any) -> Report:
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)
    model = Both()
    whole = copy.deepcopy(model)
    parallelize_module(model, mesh["tensor"], PLAN)
    model.experts.spread(mesh["expert"], marked=False)
    matrices = hidden_matrices(whole, exclude=("embedding", "head", "bias"), stacks=("experts.up", "experts.down"))
    matrices = {name: view for name, view in matrices.items() if name != "out.weight"}  # the last one is the head
    sharing = sizes[-1]
    return train(model, matrices, loss, data, steps=STEPS, unsharded=whole, sharing=sharing, mesh=mesh, **settings)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        pytest.param(
            ("shard", "expert", "tensor"),
            {"stage": 3, "update": "backward", "gradient_accumulation_steps": 2},
            marks=pytest.mark.campaign,
        ),
        pytest.param(("replicate", "expert", "tensor"), {"stage": 2, "update": "step"}, marks=pytest.mark.full),
        pytest.param(
            ("replicate", "expert", "tensor"),
            {"stage": 1, "shard_state_over": "all", "update": "backward"},
            marks=pytest.mark.campaign,
        ),
    ],
    ids=str,
)
def test_shards_experts_and_tensor_slices(
    ranks: Callable[[int], Ranks], names: tuple[str, ...], settings: dict[str, Any]
) -> None:
    for rank, report in enumerate(ranks(8).run(train_both, sizes=(2, 2, 2), names=names, **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


# ------------------------------------------------------------------------------------ in and out, and from mesh to mesh

Placed = tuple[tuple[int, ...], tuple[str, ...]] | None


def model_on(
    kind: str, placed: Placed, stage: int, weights: str | None = None, limit: float | None = None
) -> tuple[nn.Module, MuonZero]:
    torch.manual_seed(0)
    with torch.device("cpu" if weights is None else "meta"):
        model = Sliced() if kind == "sliced" else Mixture(4)
    mesh = None
    if placed is not None:
        sizes, names = placed
        mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)
        if kind == "sliced":
            parallelize_module(model, mesh["tensor"], PLAN)
        else:
            spread(model, mesh)
    if weights is None:
        model.to(DEVICE)
    optimizer = MuonZero(
        model, lr=0.02, adamw_lr=0.01, ns_dtype="fp32", stage=stage, mesh=mesh, weights=weights, gradient_clipping=limit
    )
    return model, optimizer


def advance(model: nn.Module, optimizer: MuonZero, steps: range) -> list[float]:
    losses = []
    for step in steps:
        found = loss(model, on_device(data(step, 0, 0)))  # the same on every rank, so that worlds compare
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses


def everything(model: nn.Module, optimizer: MuonZero) -> dict[str, Tensor]:
    found = {name: full(param).detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name} {slot}": full(value).clone() for slot, value in optimizer.state[param].items()}
    return found


def save(folder: str, kind: str, placed: Placed, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = model_on(kind, placed, stage)
    advance(model, optimizer, range(2))
    compile_muon.Checkpointer(f"{folder}/checkpoints").save(2, model, optimizer)
    compile_muon.save_pretrained(model, f"{folder}/weights")
    return everything(model, optimizer), advance(model, optimizer, range(2, 4))


def load(folder: str, kind: str, placed: Placed, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = model_on(kind, placed, stage)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert compile_muon.Checkpointer(f"{folder}/checkpoints").load(model, optimizer) is not None
    found = everything(model, optimizer)
    named = dict(model.named_parameters())
    state = compile_muon.full_state_dict(model)
    assert all(torch.equal(value, found[name]) for name, value in state.items())
    compile_muon.load_full_state_dict(model, {name: value + 1 for name, value in state.items()})
    assert all(torch.equal(full(param), found[name] + 1) for name, param in named.items())
    name = "up.weight" if kind == "sliced" else "layers.1.up"
    with compile_muon.full_parameters(model, write=True):
        model.get_parameter(name).data += 1
    assert torch.equal(full(named[name]), found[name] + 1 + 1)
    model.load_state_dict({name: found[name] + 3 for name in named})
    assert all(torch.equal(full(param), found[name] + 3) for name, param in named.items())
    compile_muon.load_pretrained(model, f"{folder}/weights")
    again, _ = model_on(kind, placed, stage, weights=f"{folder}/weights")
    assert all(torch.equal(full(param), found[name]) for name, param in again.named_parameters())
    return found, advance(model, optimizer, range(2, 4))


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        pytest.param(
            "sliced",
            (
                (((2, 2), ("shard", "tensor")), 4, 3),
                (((2,), ("tensor",)), 2, 0),
                (None, 2, 1),
                (((2, 2), ("replicate", "tensor")), 4, 1),
                (None, 1, 2),
            ),
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            "mixture",
            (
                (((2, 2), ("shard", "expert")), 4, 3),
                (((2,), ("expert",)), 2, 0),
                (None, 2, 3),
                (((2, 2), ("expert", "tensor")), 4, 1),
                (None, 1, 2),
            ),
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["tensor", "expert"],
)
def test_checkpoints_and_weights_go_from_mesh_to_mesh(
    ranks: Callable[[int], Ranks], tmp_path: Path, kind: str, places: tuple[tuple[Placed, int, int], ...]
) -> None:
    for number, (placed, world, stage) in enumerate(places):
        folder = str(tmp_path / str(number))
        saved, later = ranks(world).run(save, folder=folder, kind=kind, placed=placed, stage=stage)[0]
        other, size, other_stage = places[number - 1]
        for found, after in ranks(size).run(load, folder=folder, kind=kind, placed=other, stage=other_stage):
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], saved[name]) for name in saved)
            assert after == pytest.approx(later, rel=1e-5)


# -------------------------------------------------------------------------------------------------------- what users do


def clipped(kind: str, placed: Placed, by: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after three clipped steps, and the norms that were clipped."""
    limit = 0.05
    model, optimizer = model_on(kind, placed, 2, limit=limit if by == "optimizer" else None)
    norms = []
    for step in range(3):
        loss(model, data(step, 0, 0)).backward()
        if by == "ours":
            norms.append(float(compile_muon.clip_grad_norm_(model.parameters(), limit)))
        elif by == "torch":
            found = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            norms.append(float(full(found)))
        optimizer.step()
        if by == "optimizer":
            norms.append(optimizer.metrics()["grad_norm"])
        optimizer.zero_grad()
    return {name: full(param).detach().clone() for name, param in model.named_parameters()}, norms


@pytest.mark.parametrize(
    ("kind", "names", "ways"),
    [
        # one mesh: torch's own does
        pytest.param("sliced", ("shard", "tensor"), ("optimizer", "torch"), marks=pytest.mark.full),
        pytest.param("mixture", ("shard", "expert"), ("ours",), marks=pytest.mark.full),
        pytest.param("sliced", ("shard", "tensor"), ("ours",), marks=pytest.mark.campaign),
        pytest.param("mixture", ("shard", "expert"), ("optimizer",), marks=pytest.mark.campaign),
    ],
)
def test_clipping_counts_every_element_once(
    ranks: Callable[[int], Ranks], kind: str, names: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    expected, norms = ranks(1).run(clipped, kind=kind, placed=None, by="torch")[0]
    assert min(norms) > 0.05
    for by in ways:
        for found, theirs in ranks(4).run(clipped, kind=kind, placed=((2, 2), names), by=by):
            assert theirs == pytest.approx(norms, rel=1e-5), (kind, by)
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)


def told() -> tuple[str, dict[str, float]]:
    model, optimizer = model_on("sliced", ((2, 2), ("shard", "tensor")), 3)
    advance(model, optimizer, range(1))
    return str(optimizer.summary()), optimizer.totals()


def test_summary_and_metrics_speak_of_axes(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(4).run(told)
    # Gathers, and directions; a rank that owns nothing of a kind may send nothing of it.
    assert {name for _, metrics in found for name in metrics if name.startswith("bytes_sent_")} == {
        "bytes_sent_shard", "bytes_sent_tensor", "bytes_sent_shard_tensor",
    }  # fmt: skip
    for summary, metrics in found:
        assert "world 4 (shard 2 x tensor 2)" in summary
        assert "shard_tensor" in summary  # where the pieces of a matrix meet
        sent = {name for name in metrics if name.startswith("bytes_sent_")}
        assert sum(metrics[name] for name in sent) == metrics["bytes_sent"]


# ------------------------------------------------------------------------------------------------------------ bad input


def refused(case: str) -> tuple[str, bool]:
    """What is said, and whether the model is as it was."""
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
            param.mesh = mesh["shard"]  # type: ignore[attr-defined]
        case "mark":
            param = own
            param.mesh = mesh["tensor"]  # type: ignore[attr-defined]
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
        case "idle":
            param = own
        case _:
            param = own
            given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model.layers[1].up = param
    before = {name: (param, type(param)) for name, param in model.named_parameters()}
    try:
        MuonZero(model, mesh=given)
    except compile_muon.MuonZeroError as error:
        after = {name: (param, type(param)) for name, param in model.named_parameters()}
        same = before.keys() == after.keys() and all(before[name][0] is after[name][0] for name in before)
        return str(error), same
    return "", False


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "indivisible",
            r"layers.1.up: .* on expert 4: 6 along dim 0 are not 4 equal parts of a stack .*; cut dim 0",
        ),
        (
            "foreign",
            r"layers.1.up: .* on tensor 2, which is no axis of the mesh \(shard 2 x tensor 2\); ",
        ),
        (
            "two axes",
            r"layers.1.up: .* on shard 2 x tensor 2, on two axes at once \(shard and tensor\); give",
        ),
        ("sharded", r"layers.1.up: .* on shard 2, the axis shard of which MuonZero cuts itself; cut it over mesh"),
        ("two roles", r"layers.1.up: is a DTensor on tensor 2 and marked with mesh = shard 2; "),
        ("mark", r"layers.1.up: is marked with mesh = tensor 2, which is not the axis of experts; "),
        ("partial", r"layers.1.up: .*P\(sum\) is neither Shard nor Replicate; cut it into contiguous parts"),
        ("no mesh", r"layers.1.up: .* on tensor 2, which is no axis of the mesh \(shard 4\); "),
        (
            "one matrix",
            r"layers.1.up: is cut over the axis expert, and shape \[8, 8\] is one matrix, not a stack",
        ),
        (
            "names",
            r"mesh = .*: has the dimensions \('tensor', 'shard'\); name them as here and give them in",
        ),
        ("unknown", r"mesh = .*: has the dimensions \('shard', 'tp'\); name them as here"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(ranks: Callable[[int], Ranks], case: str, said: str) -> None:
    found = ranks(4).run(refused, case=case)
    assert all(re.search(said, message) and same for message, same in found), found
