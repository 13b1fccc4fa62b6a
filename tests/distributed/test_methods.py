"""Every method, at every stage and mesh, beside an unsharded reference written from its paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.books import AUXILIARIES, BETA2, BOOKS
from support.exact import SETTINGS
from support.harness import Ranks
from support.odd import MATRICES, STEPS, Odd, data, loss, train_on
from support.reference import DEVICE, Report, full, train, world_and_rank
from support.sliced import train_sliced
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import compile_muon
from compile_muon.checkpoint.optimizer_state import full_optimizer_state, load_full_optimizer_state
from compile_muon.engine.commit import commit_states, commit_weights
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.elements import commit_elements
from compile_muon.engine.pieces import Matrices
from compile_muon.passes.methods import METHODS, ElementMethod, MatrixMethod, matrix_method

OWN = [m.name for m in METHODS if isinstance(m, MatrixMethod) and m.name in BOOKS and m.name != "muon"]
ELEMENTS = [method.name for method in METHODS if isinstance(method, ElementMethod) and method.name != "adamw"]
WAYS = [*OWN, "cautious", *ELEMENTS]
#: the others in the full tier


def few(*default: str) -> list[Any]:
    """All ways, those of the default tier and the others."""
    return [pytest.param(way, marks=() if way in default else pytest.mark.full) for way in WAYS]


FEW = few("normuon", "muonh")


def test_every_method_has_a_reference() -> None:
    """Here, or beside the states that it keeps at owners (test_owner_methods.py)."""
    matrices = {method.name for method in METHODS if isinstance(method, MatrixMethod)}
    assert matrices == {*BOOKS, *SETTINGS} - {"cautious"}
    assert {*ELEMENTS, "adamw"} <= AUXILIARIES.keys()


def settings_of(way: str) -> dict[str, Any]:
    if way == "cautious":
        return {"rates": {"cautious_decay": True}}
    if way in ELEMENTS:
        return {"auxiliary": way}
    found: dict[str, Any] = {"method": way}
    if "beta2" in {rate.name for rate in matrix_method(way).rates}:
        found["rates"] = {"beta2": BETA2}
    return found


def trained(way: str, **settings: Any) -> Report:
    torch.manual_seed(0)
    return train(Odd(), MATRICES, loss, data, steps=STEPS, **settings_of(way), **settings)


def check(reports: list[Report]) -> None:
    for rank, report in enumerate(reports):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("world", "stage", "micro"),
    [
        (3, 3, 1),
        *(pytest.param(*given, marks=pytest.mark.full) for given in ((1, 2, 1), (2, 0, 1), (2, 1, 2), (3, 2, 1))),
    ],
)
def test_a_method_is_what_its_paper_says(
    ranks: Callable[[int], Ranks], way: str, world: int, stage: int, micro: int
) -> None:
    check(ranks(world).run(trained, way=way, stage=stage, update="step", gradient_accumulation_steps=micro))


@pytest.mark.parametrize("way", few("normuon"))
def test_directions_of_backward(ranks: Callable[[int], Ranks], way: str) -> None:
    check(ranks(2).run(trained, way=way, stage=3, update="backward"))


def on_replicas(way: str, **settings: Any) -> Report:
    return train_on((2, 2), **settings_of(way), **settings)


def on_slices(way: str, **settings: Any) -> Report:
    return train_sliced((2, 2), ("shard", "tensor"), **settings_of(way), **settings)


@pytest.mark.parametrize(
    ("mesh", "way"),
    [
        pytest.param(mesh, way, marks=() if (mesh, way) == (on_replicas, "muonh") else pytest.mark.full)
        for mesh in (on_replicas, on_slices)
        for way in WAYS
    ],
)
def test_meshes_with_several_axes(ranks: Callable[[int], Ranks], way: str, mesh: Callable[..., Report]) -> None:
    check(ranks(4).run(mesh, way=way, stage=3, update="step"))


# ---------------------------------------------------------------------------------------------------------------- views

WIDTH, HEADS, KEYS, SIZE = 8, 4, 2, 3


class Fused(nn.Module):
    """Attention and MLP with fused projections, of sizes that ranks cut in the middle of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEYS) * SIZE, bias=False)
        self.merge = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.gates = nn.Linear(WIDTH, 2 * 11, bias=False)
        self.down = nn.Linear(11, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.qkv(h).unflatten(-1, (-1, SIZE)).transpose(1, 2).split([HEADS, KEYS, KEYS], 1)
        k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.merge(made.transpose(1, 2).flatten(-2))
        gate, up = self.gates(h).chunk(2, -1)
        return self.head(h + self.down(nn.functional.silu(gate) * up))


def runs(*sizes: int) -> list[Tensor]:
    return list(torch.arange(sum(sizes)).split(list(sizes)))


ROWS = torch.arange((HEADS + 2 * KEYS) * SIZE).view(KEYS, -1)  # of each group of queries
PART = HEADS // KEYS * SIZE
TURNS = [*ROWS[:, :PART].flatten().split(SIZE), ROWS[:, PART : PART + SIZE].flatten(), ROWS[:, -SIZE:].flatten()]
#: what users say, and which rows or columns the reference takes for it
VIEWS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, list[Tensor]]]]] = {
    "heads": (
        {"qkv*": {"heads": HEADS + 2 * KEYS}, "merge*": {"heads": HEADS, "dim": 1}},
        {"qkv.weight": (0, runs(*[SIZE] * 8)), "merge.weight": (1, runs(*[SIZE] * HEADS))},
    ),
    "split": (
        {"qkv*": {"split": [12, 6, 6]}, "gates*": {"split": [11, 11]}, "merge*": {"split": [5, 7], "dim": 1}},
        {"qkv.weight": (0, runs(12, 6, 6)), "gates.weight": (0, runs(11, 11)), "merge.weight": (1, runs(5, 7))},
    ),
    "turns": (  # Megatron's: queries, keys and values take turns; queries by heads, the others whole
        {"qkv*": {"split": [12, 6, 6], "groups": KEYS, "heads": [HEADS, 1, 1]}, "down*": {"split": [3, 5]}},
        {"qkv.weight": (0, TURNS), "down.weight": (0, runs(3, 5))},
    ),
}
FUSED = {"qkv.weight": (1, 24, 8), "merge.weight": (1, 8, 12), "gates.weight": (1, 22, 8), "down.weight": (1, 8, 11)}


def trained_in_parts(way: str, view: str, mesh: tuple[int, int] | None = None, **settings: Any) -> Report:
    torch.manual_seed(0)
    views, blocks = VIEWS[view]
    if mesh is not None:
        settings["mesh"] = init_device_mesh(DEVICE.type, mesh, mesh_dim_names=("replicate", "shard"))
    return train(
        Fused(), FUSED, loss, data, steps=STEPS, blocks=blocks, muon_views=views, **settings_of(way), **settings
    )


@pytest.mark.parametrize("way", ["normuon", *(pytest.param(way, marks=pytest.mark.full) for way in ("muon", "muonh"))])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("world", "stage"), [(3, 1), *(pytest.param(*given, marks=pytest.mark.full) for given in ((1, 2), (2, 0), (2, 3)))]
)
def test_a_view_is_a_loop_over_its_matrices(
    ranks: Callable[[int], Ranks], way: str, view: str, world: int, stage: int
) -> None:
    check(ranks(world).run(trained_in_parts, way=way, view=view, stage=stage, update="step"))


@pytest.mark.parametrize(
    ("way", "view"),
    [
        ("normuon", "turns"),
        *(pytest.param(*given, marks=pytest.mark.full) for given in (("muon", "heads"), ("adamuon", "split"))),
    ],
)
def test_views_in_backward(ranks: Callable[[int], Ranks], way: str, view: str) -> None:
    check(ranks(2).run(trained_in_parts, way=way, view=view, stage=3, update="backward"))


@pytest.mark.full
@pytest.mark.parametrize(("way", "view"), [("normuon", "turns"), ("adamuon", "split")])
def test_views_on_replicas(ranks: Callable[[int], Ranks], way: str, view: str) -> None:
    check(ranks(4).run(trained_in_parts, way=way, view=view, stage=3, update="step", mesh=(2, 2)))


def sent_for(views: dict[str, Any]) -> tuple[dict[str, str], int, dict[str, float]]:
    """Exchange of each matrix, the bytes of a step, and those of each matrix by formula."""
    torch.manual_seed(0)
    model = Fused()
    optimizer = compile_muon.MuonZero(model, stage=2, update="step", muon_views=views, ns_dtype="float32")
    loss(model, data(0, 0, 0)).backward()
    before = optimizer.traffic.bytes_sent
    optimizer.step()
    rows = [row for row in optimizer.summary().rows if row.exchange != "-"]
    sent = {row.name: row.bytes_sent.get("shard", 0.0) for row in rows}
    return {row.name: row.exchange for row in rows}, optimizer.traffic.bytes_sent - before, sent


def test_matrices_that_lie_whole_on_their_ranks_send_nothing(ranks: Callable[[int], Ranks]) -> None:
    whole, sent, _ = ranks(2).run(sent_for, views={})[0]
    heads, less, _ = ranks(2).run(sent_for, views={"qkv*": {"heads": 8}, "gates*": {"split": [11, 11]}})[0]
    assert set(whole.values()) == {"owner"}
    assert heads == {**whole, "qkv.weight": "local", "gates.weight": "local"}
    assert 0 < less < sent


def test_only_heads_that_straddle_ranks_travel(ranks: Callable[[int], Ranks]) -> None:
    """24 rows on 3 ranks, 8 each: of 8 heads of 3 rows two are on two ranks."""
    whole = ranks(3).run(sent_for, views={})
    heads = ranks(3).run(sent_for, views={"qkv*": {"heads": 8}})
    assert heads[0][2]["qkv.weight"] == whole[0][2]["qkv.weight"] / 4
    # 16 rows of 8 numbers went to an owner and back; now 2 of 3 rows at most, twice
    saved = sum(sent for _, sent, _ in whole) - sum(sent for _, sent, _ in heads)
    assert saved >= 2 * (16 - 2 * 3) * 8 * 4


# ---------------------------------------------------------------------------------------------------------- checkpoints


def through_a_checkpoint(
    way: str, folder: str, stage: int, mesh: tuple[int, int] | None, begin: bool, whole: bool
) -> dict[str, Any]:
    """Three steps and a save, or what was saved and two steps more; states and weights at the end.

    Args:
        whole: by the state as one file has it, instead of a folder.
    """
    torch.manual_seed(0)
    model = Odd()
    placed = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    optimizer = compile_muon.MuonZero(model, mesh=placed, stage=stage, update="step", **settings_of(way))
    file = Path(folder) / "whole.pt"
    if not begin:
        compile_muon.Checkpointer(folder).load(model, optimizer)
        if whole:
            for states in optimizer.state.values():
                for tensor in states.values():
                    local_tensor(tensor).zero_()
            load_full_optimizer_state(optimizer, torch.load(file) if world_and_rank()[1] == 0 else None)
    for step in range(3) if begin else (3, 4):
        loss(model, data(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = full_optimizer_state(optimizer)
    if begin:
        compile_muon.Checkpointer(folder).save(3, model, optimizer)
        if world_and_rank()[1] == 0:
            torch.save(state, file)
    return {"state": state, "weights": {name: full(param).detach() for name, param in model.named_parameters()}}


@pytest.mark.parametrize(
    ("way", "whole"),
    [
        ("normuon", False),
        *(pytest.param(*given, marks=pytest.mark.full) for given in (("normuon", True), ("lion", False))),
    ],
)
def test_states_go_from_mesh_to_mesh(ranks: Callable[[int], Ranks], tmp_path: Path, way: str, whole: bool) -> None:
    ranks(3).run(through_a_checkpoint, way=way, folder=str(tmp_path), stage=3, mesh=None, begin=True, whole=whole)
    found = [
        ranks(world).run(
            through_a_checkpoint, way=way, folder=str(tmp_path), stage=stage, mesh=mesh, begin=False, whole=whole
        )[0]
        for world, stage, mesh in ((1, 2, None), (4, 2, (2, 2)))
    ]
    for name, weight in found[0]["weights"].items():
        torch.testing.assert_close(found[1]["weights"][name], weight, rtol=1e-5, atol=1e-6)
    for name, states in found[0]["state"]["state"].items():
        for slot, value in states.items():
            assert value.any(), (name, slot)
            torch.testing.assert_close(found[1]["state"]["state"][name][slot], value, rtol=1e-4, atol=1e-7)


# --------------------------------------------------------------------------------------------------------------- counts


def counted(way: str, update: str) -> tuple[int, int, int]:
    """All-reduces, other bytes and matrices orthogonalized in the third step."""
    torch.manual_seed(0)
    model = Odd()
    optimizer = compile_muon.MuonZero(model, stage=2, update=update, **settings_of(way))
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if update == "backward" else model
    for step in range(3):
        before = optimizer.traffic
        loss(run, data(step, 0, 0)).backward()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            optimizer.step()
        optimizer.zero_grad()
    now = optimizer.traffic
    return all_reduce.call_count, now.bytes_sent - before.bytes_sent, now.matrices - before.matrices


@pytest.mark.parametrize("update", ["step", pytest.param("backward", marks=pytest.mark.campaign)])
def test_a_method_costs_one_collective_where_it_has_facts(ranks: Callable[[int], Ranks], update: str) -> None:
    group = ranks(2)
    plain = group.run(counted, way="muon", update=update)
    for way in OWN:
        facts = matrix_method(way).facts
        for (calls, sent, matrices), (plain_calls, *rest) in zip(
            group.run(counted, way=way, update=update), plain, strict=True
        ):
            assert calls == plain_calls + bool(facts), way
            assert [sent, matrices] == rest, way


# ------------------------------------------------------------------------------------------------ steps left out


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_the_device_withholds_writes_nothing(way: str) -> None:
    """On a GPU the host does not know yet whether a step may write; here the kernels are told the same."""
    torch.manual_seed(0)
    model = Odd()
    optimizer = compile_muon.MuonZero(model, update="step", **settings_of(way))
    kept = {}
    for found_inf in (0.0, 1.0, 0.0):
        loss(model, data(0, 0, 0)).backward()
        before = {name: value.detach().clone() for name, value in everything(model, optimizer).items()}
        steps, flag = optimizer.engine.step, torch.tensor(found_inf)
        states = commit_states(_parts(optimizer), steps.provide, flag, all_resident=True)
        commit_weights(states, steps.summed, None, flag)
        for group in optimizer.param_groups:
            if isinstance(method := optimizer.engine.step.method(group), ElementMethod) and not method.withholds:
                own = optimizer.engine.step.with_gradient(group)
                slots = [optimizer.state[sharded.param] for sharded in own]
                commit_elements(method, group, own, slots, torch.tensor(found_inf))
        after = everything(model, optimizer)
        kept[found_inf] = {name for name, value in after.items() if torch.equal(value, before[name])}
        optimizer.zero_grad()
    assert kept[1.0] == after.keys()
    assert not kept[0.0] & {"experts", "conv.weight", "uneven.weight", "momentum_buffer of experts"}


def everything(model: nn.Module, optimizer: compile_muon.MuonZero) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    states = {f"{slot} of {name}": x for name, p in named.items() for slot, x in optimizer.state[p].items()}
    return {**named, **states}


def _parts(optimizer: compile_muon.MuonZero) -> list[Matrices]:
    found = []
    for group in optimizer.param_groups:
        method, own = optimizer.engine.step.method(group), optimizer.engine.step.with_gradient(group)
        if isinstance(method, MatrixMethod):
            made = {sharded: torch.randn_like(sharded.local) for sharded in own}
            found.append(Matrices(method, group, made, lambda rows, cols: 1.0))
    return found
