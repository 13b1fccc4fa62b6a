"""Replicas of shards, and what goes in and out on every mesh."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import RanksOf, on_ranks
from support.odd import AXES, NAMES, Odd, cases, loss, train_odd
from support.reference import DEVICE, full, placed, state_of, train_step
from support.sliced import data, model_of, on_mesh, spread
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world

import compile_muon
from compile_muon import MuonZero

EVERY = [given for given in itertools.product(*AXES.values()) if given != (3, "step", 2)]


@cases(((3, "step", 2),), full=((0, "backward", 1),), campaign=EVERY)
@on_ranks(4)
def test_replicas_of_shards(settings: dict[str, Any]) -> None:
    train_odd((2, 2), **settings).check()


@cases((), full=((3, "step", 1),), campaign=[given for given in EVERY if given[0]])
@on_ranks(4)
def test_state_over_all_ranks(settings: dict[str, Any]) -> None:
    train_odd((2, 2), shard_state_over="all", **settings).check()


@pytest.mark.full
@on_ranks(4)
def test_communicators_are_made_once_for_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    found = []
    for _ in range(2):
        optimizer = compile_muon.MuonZero(Odd(), mesh=mesh, communicators="separate")
        own = [group for group in _world.pg_map if group.group_desc.startswith("muon_zero")]
        assert len({(group.group_desc, *dist.get_process_group_ranks(group)) for group in own}) == len(own)
        # shard, replicate and both, each with one for gathers, reductions and Newton-Schulz
        assert optimizer.totals()["communicators"] == 9
        found.append(len(own))
    assert found[0] == found[1]  # process groups behind each of two optimizers
    train_odd((2, 2), communicators="separate", stage=3, shard_state_over="all").check()


Sizes = dict[str, int] | None
#: of each kind: a mesh, its stage, and what state is cut over. None is a mesh of shards alone, of so many ranks
PLACES: dict[str, list[tuple[Sizes, int, int, str]]] = {
    "odd": [
        ({"replicate": 2, "shard": 2}, 4, 3, "shard"),
        ({"replicate": 2, "shard": 2}, 4, 1, "all"),
        ({"replicate": 2, "shard": 1}, 2, 3, "all"),
        ({"replicate": 1, "shard": 3}, 3, 1, "shard"),
        (None, 2, 3, "all"),
        (None, 1, 1, "shard"),
    ],
    "sliced": [
        ({"shard": 2, "tensor": 2}, 4, 3, "shard"),
        ({"tensor": 2}, 2, 0, "shard"),
        (None, 2, 1, "shard"),
        ({"replicate": 2, "tensor": 2}, 4, 1, "shard"),
        (None, 1, 2, "shard"),
    ],
    "mixture": [
        ({"shard": 2, "expert": 2}, 4, 3, "shard"),
        ({"expert": 2}, 2, 0, "shard"),
        (None, 2, 3, "shard"),
        ({"expert": 2, "tensor": 2}, 4, 1, "shard"),
        (None, 1, 2, "shard"),
    ],
}
#: of which the full tier has some
SHORT = (("odd", 1), ("odd", 4), ("sliced", 1), ("mixture", 0))


def model_on(
    kind: str, sizes: Sizes, stage: int, over: str = "shard", weights: str | None = None, **settings: Any
) -> tuple[nn.Module, MuonZero]:
    mesh = on_mesh(sizes)
    with torch.device("cpu" if weights is None else "meta"):
        model = model_of(kind)
    spread(model, mesh)
    if weights is None:
        model.to(DEVICE)
    given = {"lr": 0.02, "adamw_lr": 0.01, "ns_dtype": "fp32", "mesh": mesh, "shard_state_over": over, **settings}
    return model, MuonZero(model, stage=stage, weights=weights, **given)


def advance(model: nn.Module, optimizer: MuonZero, steps: range) -> list[float]:
    losses = []
    for step in steps:
        found = loss(model, placed(data(step, 0, 0)))  # the same on every rank, so that worlds compare
        train_step(optimizer, found)
        losses.append(found.item())
    return losses


def save(folder: str, **place: Any) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = model_on(**place)
    advance(model, optimizer, range(2))
    compile_muon.Checkpointer(f"{folder}/checkpoints").save(2, model, optimizer)
    compile_muon.save_pretrained(model, f"{folder}/weights")
    return state_of(model, optimizer), advance(model, optimizer, range(2, 4))


def load(folder: str, **place: Any) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = model_on(**place)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert compile_muon.Checkpointer(f"{folder}/checkpoints").load(model, optimizer) is not None
    found = state_of(model, optimizer)
    named = dict(model.named_parameters())
    state = compile_muon.full_state_dict(model)
    assert all(torch.equal(value, found[name]) for name, value in state.items() if name in named)
    compile_muon.load_full_state_dict(model, {name: value + 1 for name, value in state.items()})
    assert all(torch.equal(full(param), found[name] + 1) for name, param in named.items())
    name = {"odd": "even.weight", "sliced": "up.weight", "mixture": "layers.1.up"}[place["kind"]]
    with compile_muon.full_parameters(model, write=True):
        model.get_parameter(name).data += 1
    assert torch.equal(full(named[name]), found[name] + 1 + 1)
    model.load_state_dict({name: found[name] + 3 for name in named}, strict=False)  # a tied one has a second name
    assert all(torch.equal(full(param), found[name] + 3) for name, param in named.items())
    compile_muon.load_pretrained(model, f"{folder}/weights")
    again, _ = model_on(**place, weights=f"{folder}/weights")
    assert all(torch.equal(full(param), found[name]) for name, param in again.named_parameters())
    return found, advance(model, optimizer, range(2, 4))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(kind, number, marks=() if (kind, number) in SHORT else pytest.mark.campaign)
        for kind, places in PLACES.items()
        for number in range(len(places))
    ],
)
def test_checkpoints_and_weights_go_from_mesh_to_mesh(ranks: RanksOf, tmp_path: Path, kind: str, number: int) -> None:
    (sizes, world, stage, over), (others, size, other, other_over) = PLACES[kind][number], PLACES[kind][number - 1]
    given = {"folder": str(tmp_path), "kind": kind}
    saved, later = ranks(world).run(save, **given, sizes=sizes, stage=stage, over=over)[0]
    for found, after in ranks(size).run(load, **given, sizes=others, stage=other, over=other_over):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)
        assert after == pytest.approx(later, rel=1e-5)


def told(kind: str, sizes: dict[str, int], over: str) -> tuple[str, dict[str, float]]:
    model, optimizer = model_on(kind, sizes, 3, over)
    advance(model, optimizer, range(1))
    return str(optimizer.summary()), optimizer.totals()


@pytest.mark.parametrize(
    ("kind", "sizes", "over", "axes"),
    [
        # gathers and reductions of an eager step; over all ranks what is not cut, or exchanged where state is cut so
        ("odd", {"replicate": 2, "shard": 2}, "all", {"shard", "replicate", "all"}),
        # gathers, and directions: where the pieces of a matrix meet
        pytest.param(
            "sliced", {"shard": 2, "tensor": 2}, "shard", {"shard", "tensor", "shard_tensor"}, marks=pytest.mark.full
        ),
    ],
)
def test_summary_and_metrics_speak_of_axes(
    ranks: RanksOf, kind: str, sizes: dict[str, int], over: str, axes: set[str]
) -> None:
    seen = set[str]()
    for summary, metrics in ranks(4).run(told, kind=kind, sizes=sizes, over=over):
        assert f"world 4 ({' x '.join(f'{name} 2' for name in sizes)})" in summary
        assert all(axis in summary for axis in axes)
        by_axis = {name: sent for name, sent in metrics.items() if name.startswith("bytes_sent_")}
        assert sum(by_axis.values()) == metrics["bytes_sent"]
        seen |= {name for name, count in by_axis.items() if count}  # a rank may own nothing of a kind
    assert seen == {f"bytes_sent_{axis}" for axis in axes}


@pytest.mark.parametrize(
    ("dims", "sizes", "said"),
    [
        (None, {"replicate": 3}, "mesh = 'replicate 3 x shard -1': does not make up 4 ranks; set one"),
        (None, {"replicate": 2, "shard": 4}, r"mesh = 'replicate 2 x shard 4': does not make up 4 ranks"),
        ({"replicate": 2, "shard": 2}, {"replicate": 2}, r"mesh = .*: is given, and the config has sizes of one"),
        ({"shard": 2, "replicate": 2}, None, r"has the dimensions \('shard', 'replicate'\); name them .*in this order"),
        ({"dp": 2, "tensor": 2}, None, r"has the dimensions \('dp', 'tensor'\); name them as here"),
        (None, {"tensor": 3}, r"mesh = 'replicate 1 x shard -1 x tensor 3': does not make up 4 ranks"),
    ],
)
@on_ranks(4)
def test_meshes_that_do_not_fit_are_refused_on_every_rank(
    dims: dict[str, int] | None, sizes: dict[str, int] | None, said: str
) -> None:
    model = Odd()
    mesh = dims and init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    config = {"zero_optimization": {"stage": 2}, **({"mesh": sizes} if sizes else {})}
    with pytest.raises(compile_muon.ConfigError, match=said):
        compile_muon.initialize(model, config, mesh=mesh)
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
