"""The exchange: balanced owners, and what travels; that directions are right is a property of every lowered graph."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_muon.passes.costs import Costs
from compile_muon.passes.exchange.orthogonalize import orthogonalize_group
from compile_muon.passes.exchange.owner import assign_owners
from compile_muon.passes.exchange.shares import shares
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.language.views import View

JORDAN = (3.4445, -4.7750, 2.0315) * 5
HYPER = torch.tensor([0.05, 0.95])


def spec(shape, world=1, rank=0, group="", exchange="owner", stage=2, dtype="float32", replicas=1, **muon):
    how = MuonSpec(1, *shape, True, "standard", JORDAN, 1.0, (), dtype, 1e-7, exchange, **muon)
    axes = Axis("shard", world, rank, group), Axis("replicate", replicas, 0, "r")
    both = Axis("all", world * replicas, rank, "a") if replicas > 1 else None
    return ParamSpec(Layout(tuple(shape), stage, *axes, both), "float32", "float32", "float32", how)


def work(s):
    k, l = sorted(s.layout.shape)  # noqa: E741
    return k * k * (2 * l + k)


shapes = st.tuples(st.integers(1, 64), st.integers(1, 64))


def loads(specs, owners, world, chosen=None):
    """The work of each rank, of the ``chosen`` matrices."""
    chosen = range(len(specs)) if chosen is None else chosen
    return [sum(work(specs[i]) for i in chosen if owners[i] == rank) for rank in range(world)]


@settings(max_examples=60)
@given(st.lists(shapes, min_size=1, max_size=7), st.integers(2, 3), st.data())
def test_owners_are_balanced_alike_on_all_ranks_and_no_bucket_changes_that(sizes, world, data):
    """Longest processing time first is within 4/3 - 1/(3 W) of the best (Graham 1969)."""
    specs = [spec(s, world) for s in sizes]
    owners = assign_owners(specs, Costs())
    assert all(assign_owners([spec(s, world, rank) for s in sizes], Costs()) == owners for rank in range(world))
    every = itertools.product(range(world), repeat=len(specs))
    best = min(max(loads(specs, ranks, world)) for ranks in every)
    assert max(loads(specs, owners, world)) <= (4 / 3 - 1 / (3 * world)) * best * (1 + 1e-9)
    ends = sorted(data.draw(st.lists(st.integers(0, len(specs)), max_size=4)))
    buckets = [list(range(*pair)) for pair in itertools.pairwise([0, *ends, len(specs)])]
    assert sorted(loads(specs, assign_owners(specs, Costs(), buckets), world)) == sorted(loads(specs, owners, world))


@pytest.mark.parametrize(("world", "together"), [(2, 7), (4, 19), (8, 13), (16, 6), (32, 32), (64, 75)])
def test_every_bucket_has_about_as_much_for_each_rank(world, together):
    """Ranks that wait for each other at each bucket take little longer than the ideal; 1.06 to 1.39 times as long were
    owners balanced only as a whole."""
    layer = [(8, 28), (28, 8), (28, 8), (8, 8), (2, 8), (2, 8), (8, 8)]
    specs = [spec(s, world) for s in layer * 32]
    ends = [0, *range(together, len(specs), together), len(specs)]
    buckets = [list(range(*pair)) for pair in itertools.pairwise(ends)]
    owners = assign_owners(specs, Costs(), buckets)
    total = sum(max(loads(specs, owners, world, bucket)) for bucket in buckets)
    work_of = [[work(specs[i]) for i in bucket] for bucket in buckets]
    assert total <= 1.13 * sum(max(sum(each) / world, max(each)) for each in work_of)


def test_owners_are_balanced_by_the_cost_models_time():
    """A matrix may take longer than another with more operations."""
    specs = [spec((8, 8), 2), *[spec((16, 16), 2)] * 3]
    small_are_slow = Costs(rates={"float32": ((8.0, 1e9), (16.0, 24e9))})  # 8³ take three times as long as 16³
    assert assign_owners(specs, small_are_slow) == (0, 1, 1, 1) != assign_owners(specs, Costs())
    assert assign_owners([spec((8, 8), 4)] * 12, Costs())[:5] == (0, 1, 2, 3, 0) and not assign_owners([], Costs())
    with pytest.raises(ValueError, match="not a Muon matrix"):
        assign_owners([ParamSpec(Layout((4, 4), 2), "float32", "float32", "float32", None)], Costs())


def test_what_lies_whole_on_a_rank_stays_there_and_the_rest_is_dealt():
    """18 rows on 4 ranks, 5 each and 3: heads of 3 rows straddle where 5, 10 and 15 are inside of one."""
    dealt = shares(spec((18, 4), 4, view=View.of(18, heads=6)))
    assert [(share.span, share.whole_at) for share in dealt] == [
        ((0, 3), 0), ((3, 6), None), ((6, 9), 1), ((9, 12), None), ((12, 15), 2), ((15, 18), 3),
    ]  # fmt: skip
    columns = spec((64, 64), 4, view=View.of(64, heads=8, dim=1))
    heads = Counter()
    for share, owner in zip(shares(columns), assign_owners([columns], Costs()), strict=True):
        heads[owner] += share.matrices[0][0]
    assert heads == {0: 2, 1: 2, 2: 2, 3: 2}
    replicated = spec((64, 64), 4, stage=0, replicas=2, view=View.of(64, heads=8))
    assert len(set(assign_owners([replicated], Costs()))) == 8
    turns = View.of(24, split=[12, 6, 6], groups=3, heads=[6, 1, 1])  # no run of rows
    assert len(shares(spec((24, 4), 4, view=turns))) == 1


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_float16_matrices_travel_in_bfloat16_and_padding_never_leaks(size, threads):
    """A gradient may be anywhere in float32's range. Each slot of the wire is padded by itself: NaN stays in one."""
    sizes, seed = [(7, 4), (2, 5), (13, 3)], torch.Generator().manual_seed(0)
    grads = [torch.randn(s, generator=seed) * size for s in sizes]
    grads[0].fill_(float("nan"))

    def body(rank, group):
        specs = [spec(s, 3, rank, group, dtype="float16") for s in sizes]
        specs = [replace(s, muon=replace(s.muon_settings, eps=0.0)) for s in specs]
        pieces = [grad[s.layout.local_rows].clone() for grad, s in zip(grads, specs, strict=True)]
        zeros = [torch.zeros_like(grad) for grad in pieces]
        return orthogonalize_group(pieces, zeros, [HYPER] * 3, specs, assign_owners(specs, Costs()))

    for first, *others in threads(3, body):
        assert bool(torch.isnan(first).all())
        assert all(bool(torch.isfinite(d).all()) and (not d.numel() or float(d.abs().max()) > 0.1) for d in others)


def test_norms_of_rows_come_with_what_makes_the_rows(monkeypatch):
    """Norms come where Triton's kernels are to be expected, and float32 has room for the squares."""
    seen, op = [], torch.ops.muon_zero.newton_schulz

    def noted(*args):
        seen.append(args[-1])
        return op(*args)

    monkeypatch.setattr(torch.ops.muon_zero, "newton_schulz", noted)
    local = spec((6, 4), exchange="local", dtype="float16")
    grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    views = {"heads": View.of(4, heads=2, dim=1), "turns": View.of(6, split=[4, 2], groups=2)}
    without = [{"dtype": "float32"}, {"eps": 0.0}, {"backend": "aten"}, {"exchange": "owner"}]
    without += [{"view": view} for view in views.values()]
    for changed in ({}, *without, {"view": View.of(6, split=[4, 2])}):
        changed_spec = replace(local, muon=replace(local.muon_settings, **changed))
        orthogonalize_group(
            [grad], [torch.zeros(6, 4)], [HYPER], [changed_spec], assign_owners([changed_spec], Costs())
        )
    assert [len(norms) for norms in seen] == [1, *[0] * 6, 2]
    expected = grad.lerp(torch.zeros(6, 4).lerp(grad, 0.05), 0.95).norm(dim=1)
    torch.testing.assert_close(seen[0][0], expected, rtol=4e-3, atol=0)
    for norms, rows in zip(seen[-1], ([0, 1, 2, 3], [4, 5]), strict=True):
        torch.testing.assert_close(norms, expected[rows][None], rtol=4e-3, atol=0)
