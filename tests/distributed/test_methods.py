"""Every method beside a reference written from its paper: a row of data each, and what holds of all rows."""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import books, held_out
from support.books import Book, by_updates
from support.exact import (
    ELEMENT_LR,
    REST,
    SHAPES,
    STEPS,
    VIEWS,
    Case,
    Exact,
    blocks_of,
    given,
    made,
    resumed,
    steps_of,
    train,
)
from support.harness import RanksOf, on_ranks
from support.reference import ADAMW_EPS, DECAY, LR, newton_schulz, relative_error
from torch import Tensor

import compile_muon
from compile_muon.engine.commit import Matrices, commit_elements, commit_states, commit_weights
from compile_muon.passes import methods
from compile_muon.passes.methods import METHODS, ElementMethod, MatrixMethod

TOLERANCE = 1e-5
ADAMW = partial(books.adamw, eps=ADAMW_EPS)


@dataclass(frozen=True)
class Row:
    """A method. ``book``: of a matrix; ``rest``: of everything else; ``joined``: whether it is of whole parameters,
    whatever the view. ``views``: that it is trained with. ``record``: of a method the package does not know."""

    book: Book
    settings: dict[str, Any] = field(default_factory=dict)
    rest: Book = ADAMW
    joined: bool = False
    views: tuple[str, ...] = tuple(VIEWS)
    record: MatrixMethod | None = None


MUON = by_updates(books.muon)
#: of the methods in METHODS, by name; and of settings of them and of others
ROWS: dict[str, Row] = {
    "muon": Row(MUON),
    "lion": Row(MUON, {"auxiliary": "lion"}, books.lion),
    "cautious": Row(by_updates(books.cautious), {"rates": {"cautious_decay": True}}, partial(ADAMW, careful=True)),
    "heavy_ball": Row(by_updates(books.muon, heavy=True), {"method": "heavy_ball"}),
    "normuon": Row(by_updates(partial(books.normuon, beta2=0.9)), {"method": "normuon", "rates": {"beta2": 0.9}}),
    "adamuon": Row(by_updates(partial(books.adamuon, beta2=0.9)), {"method": "adamuon", "rates": {"beta2": 0.9}}),
    "muonh": Row(by_updates(books.muonh), {"method": "muonh"}),
    "soap": Row(partial(books.soap, every=3), {"method": "soap", "rates": {"basis_every": 3}}),
    "muonbp": Row(
        partial(books.muonbp, period=3, factor=0.5),
        {"method": "muonbp", "rates": {"period": 3, "block_lr_factor": 0.5}},
        joined=True,
        views=("heads",),
    ),
    "dion2": Row(partial(books.dion2, fraction=0.4), {"method": "dion2", "rates": {"fraction": 0.4}}),
    "muown": Row(books.muown, {"method": "muown"}),
    "tilted": Row(held_out.tilted, {"method": "tilted"}, record=held_out.TILTED),
}
MATRIX = {name: row.record or methods.method_of(row.settings.get("method", "muon")) for name, row in ROWS.items()}


def test_every_method_has_a_row() -> None:
    """AdamW trains what other methods leave it."""
    assert {method.name for method in METHODS} <= {*ROWS, "adamw"}


@functools.cache
def by_the_book(name: str, view: str = "", steps: int = STEPS) -> dict[str, Tensor]:
    row, found = ROWS[name], {}
    for param, weight in Exact().named_parameters():
        every = steps_of(param, steps, ELEMENT_LR if param in REST else LR)
        if param in REST:
            found[param] = row.rest(newton_schulz, weight.detach(), every, DECAY if weight.ndim > 1 else 0.0)
            continue
        dim, blocks = blocks_of(param, view)
        book: Any = row.book
        if row.joined:
            book, dim, blocks = partial(book, blocks=len(blocks)), 0, [torch.arange(weight.shape[-2])]
        whole = weight.detach().clone().view(-1, *weight.shape[-2:])
        for number, matrix in enumerate(whole):
            own = [step._replace(gradient=step.gradient.view(whole.shape)[number]) for step in every]
            for block in blocks:
                parts = [step._replace(gradient=step.gradient.index_select(dim, block)) for step in own]
                written = book(newton_schulz, matrix.index_select(dim, block), parts, DECAY)
                matrix.index_copy_(dim, block, written)
        found[param] = whole.view(weight.shape)
    return found


@contextmanager
def known(name: str) -> Iterator[dict[str, Any]]:
    """The settings of a method, in a package that knows of its record: a line in ``METHODS``."""
    record = ROWS[name].record
    with mock.patch.object(methods, "METHODS", (*METHODS, *([record] if record else []))):
        yield ROWS[name].settings


def check(name: str, cases: list[Case], folder: str) -> None:
    """Each parameter is what the book says, in each case."""
    for case in cases:
        with known(name) as settings:
            model, optimizer = made(settings, case, folder)
            weights, replays = train(model, optimizer, range(STEPS), case)
        expected = by_the_book(name, case.view)
        assert expected.keys() == SHAPES.keys()
        far = {param: relative_error(weights[param], weight) for param, weight in expected.items()}
        assert all(error <= TOLERANCE for error in far.values()), (name, str(case), far)
        used, early = optimizer.totals()["directions_used"], case.compiled and case.update == "backward"
        assert bool(used) == (early and not MATRIX[name].in_step), (case, used)
        assert not case.recorded or replays >= 2, (case, replays)


@pytest.mark.parametrize("name", ROWS)
def test_a_method_is_what_its_paper_says(ranks: RanksOf, tmp_path: Path, name: str) -> None:
    """On ranks that cut views in the middle."""
    number, views = list(ROWS).index(name), ROWS[name].views[1:] or ROWS[name].views
    for world, case in ((1, Case(number % 4)), (3, Case((number + 2) % 4, view=views[number % len(views)]))):
        ranks(world).run(check, name=name, cases=[case], folder=str(tmp_path))


EARLY = {"compiled": True, "update": "backward"}
#: method, ranks, case
SETTINGS = [
    ("normuon", 2, Case(3, **EARLY, view="turns")),
    ("tilted", 2, Case(2, compiled=True, recorded=True)),  # the number of a step is read from the device
    ("soap", 2, Case(3, compiled=True, checks="next_step")),
    ("soap", 2, Case(1, offload="cpu", view="split")),
    ("muown", 2, Case(3, offload="nvme", masters=True)),
    ("muonh", 4, Case(3, mesh="replicas")),
    ("normuon", 4, Case(2, mesh="replicas", over="all", view="heads")),
    ("normuon", 2, Case(1, mesh="slices", view="turns")),  # a view of columns where ranks cut these
    ("muonbp", 2, Case(3, mesh="slices", view="heads")),
]
MORE = [
    ("normuon", 2, Case(3, **EARLY, recorded=True, micro=2)),
    ("adamuon", 2, Case(1, checks="in_step", micro=2)),
    ("normuon", 2, Case(0, mesh="slices")),
    ("muown", 2, Case(2, mesh="slices", view="split")),  # in the middle of a matrix
    ("muown", 2, Case(3, mesh="slices", offload="cpu", masters=True)),
]


@pytest.mark.parametrize(
    ("name", "world", "case"), [*SETTINGS, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)], ids=str
)
@on_ranks()
def test_a_method_is_the_same_in_every_setting(tmp_path: Path, name: str, case: Case) -> None:
    check(name, [case], str(tmp_path))


def drawn(dice: random.Random, name: str, world: int) -> Case:
    """A case that there is; what cannot be together is left out."""
    mesh = dice.choice(["", "", "replicas", "slices"]) if world in (2, 4) else ""
    offload = dice.choice(["", "", "cpu", "nvme"])
    masters = offload != "" and world != 3 and dice.random() < 0.5
    compiled = mesh != "slices" and dice.random() < 0.3
    recorded = compiled and not (offload or mesh) and dice.random() < 0.5
    return Case(
        stage=dice.randrange(4),
        compiled=compiled,
        update="backward" if compiled and not MATRIX[name].in_step else "step",
        view=dice.choice(ROWS[name].views),
        mesh=mesh,
        over=dice.choice(["shard", "all"]) if mesh == "replicas" else "shard",
        offload=offload,
        masters=masters,
        micro=1 if masters else dice.choice([1, 2]),
        checks="" if recorded else dice.choice(["", "", "in_step", "next_step"]),
        recorded=recorded,
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 20))])
def test_drawn_settings(ranks: RanksOf, tmp_path: Path, name: str, seed: int) -> None:
    dice = random.Random(f"{name} {seed}")
    world = dice.choice([1, 2, 3, 4])
    cases = list({drawn(dice, name, world) for _ in range(2)})
    ranks(world).run(check, name=name, cases=cases, folder=str(tmp_path))


def going_on(name: str, case: Case, folder: str, first: int, last: int, whole: bool) -> dict[str, Tensor]:
    with known(name) as settings:
        return resumed(settings, case, folder, first, last, whole)


@pytest.mark.parametrize(
    ("name", "worlds", "whole"),
    [
        ("normuon", (3, 1), True),
        *(
            pytest.param(name, (2, 3, 1) if number % 2 else (1, 2), number % 3 == 0, marks=pytest.mark.full)
            for number, name in enumerate(ROWS)
        ),
    ],
    ids=str,
)
def test_states_are_saved_and_resharded(
    ranks: RanksOf, tmp_path: Path, name: str, worlds: tuple[int, ...], whole: bool
) -> None:
    """Stopped and gone on with by other ranks, at another stage, offloaded or not, the last time on a mesh if it can
    be: with the weights of a run that never stopped."""
    view, mesh = ROWS[name].views[-1], "replicas" if worlds[-1] == 2 else ""
    for part, world in enumerate(worlds):
        last = STEPS if world is worlds[-1] else 2 + part
        case = Case((3, 1, 2)[part], view=view, offload=("", "nvme", "cpu")[part], mesh=mesh if last == STEPS else "")
        given = {"name": name, "case": case, "folder": str(tmp_path), "first": part and 1 + part, "last": last}
        found = ranks(world).run(going_on, **given, whole=whole)
    for own in found:
        far = {param: relative_error(own[param], weight) for param, weight in by_the_book(name, view).items()}
        assert all(error <= TOLERANCE for error in far.values()), far


def sent_for(name: str, stage: int, views: dict[str, Any]) -> tuple[int, int, int, dict[str, tuple[str, float]]]:
    """All-reduces of a third step, other bytes, matrices orthogonalized; the exchange of each matrix and its bytes."""
    with known(name) as settings:
        model, optimizer = made({**settings, "muon_views": views}, Case(stage))
        for step in range(3):
            before = optimizer.traffic
            model(*given(step, 0, 1, 1)).backward()
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                optimizer.step()
            optimizer.zero_grad()
        now, rows = optimizer.traffic, optimizer.summary().rows
    kinds = {row.name: (row.exchange, row.bytes_sent.get("shard", 0.0)) for row in rows if row.exchange != "-"}
    return all_reduce.call_count, now.bytes_sent - before.bytes_sent, now.matrices - before.matrices, kinds


def test_a_method_costs_one_collective_where_it_has_facts(ranks: RanksOf) -> None:
    group = ranks(2)
    plain = group.run(sent_for, name="muon", stage=2, views={})
    for name in ("normuon", "heavy_ball"):
        for found, (calls, *rest) in zip(group.run(sent_for, name=name, stage=2, views={}), plain, strict=True):
            assert found == (calls + bool(MATRIX[name].facts), *rest), name


def test_matrices_that_lie_whole_on_their_ranks_send_nothing(ranks: RanksOf) -> None:
    *_, sent, _, whole = ranks(2).run(sent_for, name="muon", stage=2, views={})[0]
    *_, less, _, heads = ranks(2).run(sent_for, name="muon", stage=2, views={"fused": {"heads": 8}})[0]
    assert whole["fused"][0] == "owner" and heads == {**whole, "fused": ("local", 0.0)}
    assert 0 < less < sent


def test_only_heads_that_straddle_ranks_travel(ranks: RanksOf) -> None:
    """24 rows on 3 ranks, 8 each: of 8 heads of 3 rows two are on two ranks."""
    whole, heads = (
        ranks(3).run(sent_for, name="muon", stage=2, views=views) for views in ({}, {"fused": {"heads": 8}})
    )
    assert heads[0][3]["fused"][1] == whole[0][3]["fused"][1] / 4
    # 16 rows of 8 numbers went to an owner and back; now 2 of 3 rows at most, twice
    saved = sum(found[1] for found in whole) - sum(found[1] for found in heads)
    assert saved >= 2 * (16 - 2 * 3) * 8 * 4


def everything(model: Exact, optimizer: compile_muon.MuonZero) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    states = {f"{slot} of {name}": x for name, p in named.items() for slot, x in optimizer.state[p].items()}
    return {name: value.detach().clone() for name, value in {**named, **states}.items()}


@pytest.mark.parametrize("name", ["lion", "cautious", "heavy_ball", "normuon", "adamuon", "muonh"])
def test_a_step_that_the_device_withholds_writes_nothing(name: str) -> None:
    """On a GPU the host does not know yet whether a step may write; here the kernels are told the same."""
    model, optimizer = made(ROWS[name].settings)
    steps, kept = optimizer.engine.step, dict[float, set[str]]()
    for found_inf in (0.0, 1.0, 0.0):
        model(*given(0, 0, 1, 1)).backward()
        before, flag = everything(model, optimizer), torch.tensor(found_inf)
        parts = []
        for group in optimizer.param_groups:
            if isinstance(method := steps.method(group), MatrixMethod):
                directions = {
                    a: torch.randn_like(a.local) for a in map(steps.sharded_params.__getitem__, group["params"])
                }
                parts.append(Matrices(method, group, directions, lambda rows, cols: 1.0))
        states = commit_states(parts, steps.provide, flag, all_resident=True)
        commit_weights(states, steps.summed, None, flag)
        for group in optimizer.param_groups:
            if isinstance(method := steps.method(group), ElementMethod) and not method.withholds:
                own = [steps.sharded_params[param] for param in group["params"]]
                slots = [optimizer.state[sharded.param] for sharded in own]
                commit_elements(method, group, own, slots, torch.tensor(found_inf))
        after = everything(model, optimizer)
        kept[found_inf] = {param for param, value in after.items() if torch.equal(value, before[param])}
        optimizer.zero_grad()
    assert kept[1.0] == after.keys()
    assert not kept[0.0] & {"stack", "wide", "tall", "momentum_buffer of stack"}


def test_gains_are_of_what_weights_are() -> None:
    """Loaded behind the optimizer, and scaled between two steps as MuonClip does: no step takes that back."""
    model, optimizer = made(ROWS["muown"].settings, Case(0))
    plain = {name: param.detach().clone() * 3 for name, param in Exact().named_parameters()}
    model.load_state_dict(plain)
    first, _ = train(model, optimizer, range(1))
    assert relative_error(first["wide"], books.muown(newton_schulz, plain["wide"], steps_of("wide", 1, LR), DECAY)) <= (
        TOLERANCE
    )
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert relative_error(model.wide.detach(), first["wide"] / 2) <= TOLERANCE
