"""Matrices of a view: those that lie whole on a rank stay there, the others are dealt one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_muon.kernels import newton_schulz
from compile_muon.passes.costs import Costs
from compile_muon.passes.exchange.orthogonalize import orthogonalize_group
from compile_muon.passes.exchange.owner import assign_owners
from compile_muon.passes.exchange.shares import shares
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.language.views import View

JORDAN = (3.4445, -4.7750, 2.0315) * 5
HYPER = torch.tensor([0.05, 0.95])


def spec(rows, cols, view, world, rank=0, *, group="", stage=2, replicas=1, over_all=False):
    muon = MuonSpec(1, rows, cols, True, "standard", JORDAN, 1.0, (), "float32", 1e-7, "owner", view=view)
    axes = Axis("shard", world, rank, group), Axis("replicate", replicas, 0, "r")
    both = Axis("all", world * replicas, rank, "a") if replicas > 1 else None
    layout = Layout((rows, cols), stage, *axes, both, state_over_all=over_all)
    return ParamSpec(layout, "float32", "float32", "float32", muon)


@st.composite
def cut_matrices(draw):
    parts = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3))
    dim = draw(st.integers(0, 1))
    split, heads = [count * size for count, size in parts], [count for count, _ in parts]
    rows, cols = sum(split), draw(st.integers(1, 6))
    view = View.of(rows, split=split, heads=heads, dim=dim)
    replicas = draw(st.integers(1, 3))
    given = {"replicas": replicas, "over_all": draw(st.booleans()), "stage": draw(st.sampled_from((0, 2)))}
    return (cols, rows) if dim else (rows, cols), view, draw(st.integers(1, 5)), given


@settings(max_examples=150)
@given(cut_matrices())
def test_shares_are_every_matrix_once_and_pieces_are_joined_again(case):
    (rows, cols), view, world, given = case
    own = spec(rows, cols, view, world, **given)
    whole = torch.arange(rows * cols).view(rows, cols)
    count = own.layout.owner_group.size
    width = own.layout.owner_group.size * own.layout.replica_group.size

    def local(place):
        return whole[slice(*own.layout.owner_group_rows(place))]

    def piece(share, place):
        axis = replace(own.layout.owner_group, index=place)
        here = replace(share.spec, layout=replace(own.layout, owner_group_over=axis))
        return replace(share, spec=here).piece(local(place))

    found = []
    for share in shares(own):
        pieces = [piece(share, place) for place in range(count)]
        assert [x.numel() for x in pieces] == [share.numel(place) for place in range(count)]
        matrix = share.join([x.reshape(-1) for x in pieces])
        ((number, *shape),) = share.matrices
        parts = [matrix[None]] if share.view is None else share.view.cut(matrix)
        assert [tuple(part.shape) for part in parts] == [(number, *shape)]
        found += list(torch.cat(parts))
        if share.whole_at is not None:
            assert share.numel(share.whole_at) == matrix.numel()
        for place in range(count):
            assert torch.equal(share.cut(matrix, place).reshape(-1), pieces[place].reshape(-1))
    assert all(torch.equal(a, b) for a, b in zip(found, (m for part in view.cut(whole) for m in part), strict=True))
    owners = assign_owners([own], Costs())
    assert len(owners) == len(shares(own)) and all(0 <= owner < width for owner in owners)
    assert all(s.whole_at in (None, owner % count) for s, owner in zip(shares(own), owners, strict=True))


VIEWS = {
    "heads that straddle": (12, 6, View.of(12, heads=6)),
    "columns": (5, 12, View.of(12, heads=6, dim=1)),
    "parts of unequal height": (13, 4, View.of(13, split=[8, 3, 2], heads=[4, 1, 1])),
}


@pytest.mark.parametrize("case", VIEWS)
@pytest.mark.parametrize("stage", [0, 2])
def test_directions_are_a_loop_over_the_matrices(case, stage, threads):
    rows, cols, view = VIEWS[case]
    world = 5 if case == "heads that straddle" else 3
    grad, old = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(i)) for i in (0, 1))

    def body(rank, group):
        own = spec(rows, cols, view, world, rank, group=group, stage=stage)
        mine = own.layout.local_rows if own.layout.sharded else slice(None)
        owners = assign_owners([own], Costs())
        made = orthogonalize_group([grad[mine].clone()], [old[mine].clone()], [HYPER], [own], owners)
        return made[0], mine

    update = grad.lerp(old.lerp(grad, 0.05), 0.95)
    parts = [newton_schulz(part, dtype="float32", method="standard") for part in view.cut(update)]
    expected = view.join(parts)
    for direction, mine in threads(world, body):
        torch.testing.assert_close(direction, expected[mine], atol=2e-6, rtol=1e-5)


def test_what_lies_whole_on_a_rank_stays_there_and_the_rest_is_dealt():
    """18 rows on 4 ranks, 5 each and 3: heads of 3 rows straddle where 5, 10 and 15 are inside of one."""
    found = shares(spec(18, 4, View.of(18, heads=6), 4))
    assert [(share.span, share.whole_at) for share in found] == [
        ((0, 3), 0), ((3, 6), None), ((6, 9), 1), ((9, 12), None), ((12, 15), 2), ((15, 18), 3),
    ]  # fmt: skip


def test_heads_of_one_projection_have_as_many_owners_as_there_are_ranks():
    own = spec(64, 64, View.of(64, heads=8, dim=1), 4)
    heads = Counter()
    for share, owner in zip(shares(own), assign_owners([own], Costs()), strict=True):
        heads[owner] += share.matrices[0][0]
    assert heads == {0: 2, 1: 2, 2: 2, 3: 2}
    replicated = spec(64, 64, View.of(64, heads=8), 4, stage=0, replicas=2)
    assert len(set(assign_owners([replicated], Costs()))) == 8


def test_what_is_no_run_of_rows_goes_to_one_owner():
    turns = View.of(24, split=[12, 6, 6], groups=3, heads=[6, 1, 1])
    assert len(shares(spec(24, 4, turns, 4))) == 1
    assert len(shares(spec(24, 4, None, 4))) == 1
