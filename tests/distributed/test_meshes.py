"""Hybrid sharding: training on a mesh of replicas of shards equals training of the unsharded model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import Ranks
from support.odd import NAMES, Odd, cases, data, loss, train_on
from support.reference import DEVICE, full, placed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world

import compile_muon


def check(group: Ranks, shape: tuple[int, int], **settings: Any) -> None:
    for rank, report in enumerate(group.run(train_on, shape=shape, **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


@cases(
    ((3, "step", 2),),
    full=((0, "backward", 1),),
    campaign=(
        (2, "backward", 2),
        (1, "backward", 2),
        (1, "step", 1),
        (2, "step", 1),
        (3, "backward", 1),
        (3, "backward", 2),
    ),
)
def test_replicas_of_shards(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    check(ranks(4), (2, 2), **settings)


@cases(
    ((3, "step", 1),),
    campaign=(
        (1, "backward", 2),
        (1, "step", 1),
        (2, "step", 1),
        (2, "backward", 2),
        (3, "backward", 2),
    ),
)
def test_state_over_all_ranks(ranks: Callable[[int], Ranks], settings: dict[str, Any]) -> None:
    check(ranks(4), (2, 2), shard_state_over="all", **settings)


def groups_of_two(shape: tuple[int, int]) -> list[int]:
    """How many process groups there are behind each of two optimizers on a mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    found = []
    for _ in range(2):
        optimizer = compile_muon.MuonZero(Odd(), mesh=mesh, communicators="separate")
        own = [group for group in _world.pg_map if group.group_desc.startswith("muon_zero")]
        assert len({(group.group_desc, *dist.get_process_group_ranks(group)) for group in own}) == len(own)
        # shard, replicate and both, each with one for gathers, reductions and Newton-Schulz
        assert optimizer.totals()["communicators"] == 9
        found.append(len(own))
    return found


@pytest.mark.full
def test_communicators_are_made_once_for_a_mesh(ranks: Callable[[int], Ranks]) -> None:
    for first, second in ranks(4).run(groups_of_two, shape=(2, 2)):
        assert first == second
    check(ranks(4), (2, 2), communicators="separate", stage=3, shard_state_over="all")


# ------------------------------------------------------------------------------------ in and out, and from mesh to mesh


def model_on(
    mesh: tuple[int, int] | None, stage: int, over: str = "shard", *, weights: str | None = None, **params: Any
) -> tuple[Odd, compile_muon.MuonZero]:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.01, "ns_dtype": "fp32", **params}},
        "zero_optimization": {"stage": stage, "shard_state_over": over},
    }
    if mesh is not None:
        config["mesh"] = dict(zip(NAMES, mesh, strict=True))
    with torch.device("cpu" if weights is None else "meta"):
        model = Odd()
    if weights is None:
        model.to(DEVICE)
    return compile_muon.initialize(model, config, weights=weights)


def advance(model: Odd, optimizer: compile_muon.MuonZero, steps: range) -> list[float]:
    losses = []
    for step in steps:
        found = loss(model, placed(data(step, 0, 0)))  # the same on every rank, so that worlds compare
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses


def everything(model: Odd, optimizer: compile_muon.MuonZero) -> dict[str, Tensor]:
    found = {name: full(param).detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name} {slot}": full(value).clone() for slot, value in optimizer.state[param].items()}
    return found


def save(folder: str, mesh: tuple[int, int] | None, stage: int, over: str) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = model_on(mesh, stage, over)
    advance(model, optimizer, range(2))
    compile_muon.Checkpointer(f"{folder}/checkpoints").save(2, model, optimizer)
    compile_muon.save_pretrained(model, f"{folder}/weights")
    return everything(model, optimizer), advance(model, optimizer, range(2, 4))


def load(folder: str, mesh: tuple[int, int] | None, stage: int, over: str) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = model_on(mesh, stage, over)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert compile_muon.Checkpointer(f"{folder}/checkpoints").load(model, optimizer) is not None
    found = everything(model, optimizer)
    named = dict(model.named_parameters())
    state = compile_muon.full_state_dict(model)
    compile_muon.load_full_state_dict(model, {name: value + 1 for name, value in state.items()})
    assert all(torch.equal(full(param), found[name] + 1) for name, param in named.items())
    with compile_muon.full_parameters(model, write=True):
        model.even.weight.data += 1
    assert torch.equal(full(named["even.weight"]), found["even.weight"] + 1 + 1)
    model.load_state_dict({name: found[name] + 3 for name in named}, strict=False)  # a tied one has a second name
    assert all(torch.equal(full(param), found[name] + 3) for name, param in named.items())
    assert torch.equal(model.even.weight.cpu(), found["even.weight"] + 3)
    compile_muon.load_pretrained(model, f"{folder}/weights")
    return found, advance(model, optimizer, range(2, 4))


#: sizes of the axes, ranks, and what state is cut over
MESHES = (
    ((2, 2), 4, "shard"),
    ((2, 2), 4, "all"),
    ((2, 1), 2, "all"),
    ((1, 3), 3, "shard"),
    (None, 2, "all"),
    (None, 1, "shard"),
)


@pytest.mark.parametrize(
    ("stage", "meshes"),
    [
        pytest.param(1, MESHES, marks=pytest.mark.campaign),
        pytest.param(3, MESHES, marks=pytest.mark.campaign),
        pytest.param(3, MESHES[1::2], marks=pytest.mark.full),
    ],
)
def test_checkpoints_and_weights_go_from_mesh_to_mesh(
    ranks: Callable[[int], Ranks], tmp_path: Path, stage: int, meshes: tuple[tuple[Any, int, str], ...]
) -> None:
    for number, (mesh, world, over) in enumerate(meshes):
        folder = str(tmp_path / str(number))
        saved, later = ranks(world).run(save, folder=folder, mesh=mesh, stage=stage, over=over)[0]
        other, size, other_over = meshes[number - 1]
        for found, after in ranks(size).run(load, folder=folder, mesh=other, stage=4 - stage, over=other_over):
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], saved[name]) for name in saved)
            assert after == pytest.approx(later, rel=1e-5)


# ------------------------------------------------------------------------------------------ one mesh, state cut or not


def kept(folder: str, stage: int, over: str) -> tuple[dict[str, Tensor], list[float], int, int]:
    """What training in bfloat16 ends with, its losses, and elements of state this rank keeps, and the model has."""
    model, optimizer = model_on((2, 2), stage, over, param_dtype="bf16")
    compile_muon.save_pretrained(model, folder)
    again, _ = model_on((2, 2), stage, over, weights=folder)
    before = dict(model.named_parameters())
    assert all(torch.equal(full(param), full(before[name])) for name, param in again.named_parameters())
    losses = []
    for step in range(3):
        for micro in range(2):
            found = loss(model, data(step, micro, torch.distributed.get_rank()))
            found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    held = [param for param in model.parameters() if param.ndim]
    numels = [param.to_local().numel() for param in held]
    slots = [slot for param in held for slot in optimizer.state[param].values() if slot.ndim]
    assert {slot.to_local().numel() for slot in slots} == set(numels)
    return everything(model, optimizer), losses, sum(numels), sum(param.numel() for param in held)


@pytest.mark.campaign
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_state_over_all_ranks_is_the_same_state_once(ranks: Callable[[int], Ranks], tmp_path: Path, stage: int) -> None:
    """Resident weights in another dtype than the masters; models that were never whole on a rank."""
    folder = {over: str(tmp_path / over) for over in ("shard", "all")}
    twice = ranks(4).run(kept, folder=folder["shard"], stage=stage, over="shard")
    once = ranks(4).run(kept, folder=folder["all"], stage=stage, over="all")
    assert sum(numel for *_, numel, _ in twice) == 2 * twice[0][-1]
    assert sum(numel for *_, numel, _ in once) == once[0][-1]
    for (state, losses, *_), (expected, others, *_) in zip(once, twice, strict=True):
        assert losses == pytest.approx(others, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- what users read


def told(over: str) -> tuple[str, dict[str, float]]:
    model, optimizer = model_on((2, -1), 3, over)
    advance(model, optimizer, range(1))
    return str(optimizer.summary()), optimizer.totals()


@pytest.mark.parametrize("over", [pytest.param("shard", marks=pytest.mark.full), "all"])
def test_summary_and_metrics_speak_of_axes(ranks: Callable[[int], Ranks], over: str) -> None:
    for summary, metrics in ranks(4).run(told, over=over):
        assert "world 4 (replicate 2 x shard 2)" in summary
        assert "replicate" in summary and "shard" in summary
        by_axis = {name: sent for name, sent in metrics.items() if name.startswith("bytes_sent_")}
        assert sum(by_axis.values()) == metrics["bytes_sent"]
        # gathers and reductions of an eager step; over all ranks what is not cut, or exchanged where state is cut so
        assert by_axis.keys() == {f"bytes_sent_{axis}" for axis in ("shard", "replicate", "all")}
        assert all(sent > 0 for sent in by_axis.values())


def refused(dims: dict[str, int] | None, sizes: dict[str, int] | None) -> tuple[str, bool]:
    """What building it on such a mesh says, and whether the model is as it was."""
    model = Odd()
    mesh = dims and init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    config = {"zero_optimization": {"stage": 2}, **({"mesh": sizes} if sizes else {})}
    try:
        compile_muon.initialize(model, config, mesh=mesh)
    except compile_muon.ConfigError as error:
        return str(error), all(type(param) is torch.nn.Parameter for param in model.parameters())
    return "", False


@pytest.mark.parametrize(
    ("dims", "sizes", "said"),
    [
        (
            None,
            {"replicate": 3},
            "mesh = 'replicate 3 x shard -1': does not make up 4 ranks; set one",
        ),
        (None, {"replicate": 2, "shard": 4}, r"mesh = 'replicate 2 x shard 4': does not make up 4 ranks"),
        ({"replicate": 2, "shard": 2}, {"replicate": 2}, r"mesh = .*: is given, and the config has sizes of one"),
        ({"shard": 2, "replicate": 2}, None, r"has the dimensions \('shard', 'replicate'\); name them .*in this order"),
        ({"dp": 2, "tensor": 2}, None, r"has the dimensions \('dp', 'tensor'\); name them as here"),
        (None, {"tensor": 3}, r"mesh = 'replicate 1 x shard -1 x tensor 3': does not make up 4 ranks"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_on_every_rank(
    ranks: Callable[[int], Ranks], dims: dict[str, int] | None, sizes: dict[str, int] | None, said: str
) -> None:
    for found, untouched in ranks(4).run(refused, dims=dims, sizes=sizes):
        assert re.search(said, found), found
        assert untouched
