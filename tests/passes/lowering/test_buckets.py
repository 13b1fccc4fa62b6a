"""Which tensors share a collective: as the cost model says, within what the user allows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_muon import MuonZero
from compile_muon.kernels import resolve_coefficients
from compile_muon.passes.costs import Costs, Link, exchange_start, gather_start, reduce_start
from compile_muon.passes.formulas import bucket_bytes
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.lowering.buckets import bucket_matrices, group_neighbours, largest_bucket
from compile_muon.planning.machine import load_machine

MIB = 2**20
JORDAN = tuple(value for triple in resolve_coefficients("jordan", 5).steps for value in triple)
H100 = load_machine("h100")


def spec(mib: float, *, dtype: str = "float32", ranks: int = 4) -> ParamSpec:
    layout = Layout((int(mib * MIB / 4),), 3, Axis("shard", ranks, 0, "s"))
    return ParamSpec(layout, dtype, dtype, dtype)


def starting(nbytes: float, **collectives: Any) -> Costs:
    """Of links on which four ranks could gather so many bytes of weights in the time that a gather takes to start."""
    return Costs(start_seconds=nbytes * 3 / 4, links=(Link(None, 1.0, 0.0),), collectives=collectives)


def sizes(specs, groups):
    return [sum(specs[i].layout.numel * 4 for i in group) / MIB for group in groups]


def grouped(specs, costs, cap_mib=512, **kind):
    return group_neighbours(specs, lambda each: each.compute_dtype, costs, int(cap_mib * MIB), **kind)


def test_gathers_begin_with_a_small_bucket_and_reductions_end_with_one():
    specs, costs = [spec(1)] * 256, starting(MIB, reduce_scatter=(1.0, 0.25))
    gathers, reductions = sizes(specs, grouped(specs, costs)), sizes(specs, grouped(specs, costs, reduces=True))
    assert gathers[:5] == [1, 1, 2, 4, 8]
    assert set(gathers[5:-1]) == {16}  # the root of 256 · 1
    assert reductions[-4:] == [16, 8, 4, 4]
    assert set(reductions[1:-4]) == {32}


@pytest.mark.parametrize(("start", "best"), [(0, 1), (MIB // 4, 8), (MIB, 16), (64 * MIB, 32)])
def test_links_that_start_slowly_get_larger_buckets(start, best):
    """Up to an eighth of all."""
    specs, costs = [spec(1)] * 256, starting(start)
    assert max(sizes(specs, grouped(specs, costs))) == best
    assert max(sizes(specs, grouped(specs, costs, cap_mib=6))) == min(best, 6)


def test_tensors_of_another_dtype_or_company_do_not_count_for_a_bucket():
    one, costs = [spec(1)] * 64, starting(MIB)
    mixed = [kind for each in one for kind in (each, spec(1, ranks=8))]
    groups = grouped(mixed, costs)
    first = [[i // 2 for i in group] for group in groups if mixed[group[0]].layout.shard.size == 4]
    assert first == grouped(one, costs)
    assert len(groups) > 2 * len(first) - 8
    assert all(len({mixed[i].layout.shard.size for i in group}) == 1 for group in groups)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.integers(0, 50 * MIB),
    st.sampled_from([0.25, 3.0, 25.0]),
    st.booleans(),
)
def test_every_tensor_is_in_one_bucket_that_keeps_to_its_size(kib, start, cap_mib, reduces):
    specs = [spec(each / 1024) for each in kib]
    groups = grouped(specs, starting(start), cap_mib, reduces=reduces)
    assert sorted(i for group in groups for i in group) == list(range(len(specs)))
    assert groups == sorted(groups)
    total = sum(each.layout.numel * 4 for each in specs)
    largest = largest_bucket(total, int(cap_mib * MIB)) / MIB
    for group, size in zip(groups, sizes(specs, groups), strict=True):
        assert size <= largest or len(group) == 1
    # Two that follow each other would not have fitted into one.
    found = sizes(specs, groups)
    best = max(bucket_bytes(total, start) / MIB, 1)
    ordered = found[::-1] if reduces else found
    for place in range(len(ordered) - 1):
        assert sum(ordered[place : place + 2]) > min(largest, best, max(sum(ordered[:place]), start / MIB, 1)) - 1e-9


def test_exchanges_of_links_that_start_slowly_are_fewer():
    def count(start, cap_mib=512):
        specs = [matrix(512, 512, 3, 4)] * 128  # a mebibyte each: 32 for each rank
        costs = Costs(start_seconds=start, links=(Link(None, 1.0, 0.0),))
        return len(bucket_matrices(specs, costs, cap_mib * MIB))

    assert [count(start) for start in (0, MIB // 8, MIB // 2, 64 * MIB)] == [32, 16, 8, 4]
    assert count(64 * MIB, cap_mib=2) == 16


@pytest.mark.parametrize(
    ("fill", "cap_mib", "count"),
    [(0, 512, 32), (512 * 512, 512, 32), (2 * 512 * 512, 512, 16), (64 * 512 * 512, 512, 4), (64 * 512 * 512, 4, 8)],
)
def test_exchanges_have_as_many_matrices_as_fill_a_device(fill, cap_mib, count):
    """Not so many that none travels under backward, and no more than memory is for."""
    specs = [matrix(512, 512, 3, 4)] * 128
    costs = Costs(links=(Link(None, 1.0, 0.0),), fill_entries=fill)
    assert len(bucket_matrices(specs, costs, cap_mib * MIB)) == count


def matrix(rows: int, cols: int, stage: int, ranks: int) -> ParamSpec:
    how = MuonSpec(1, rows, cols, True, "standard", JORDAN, 1.0, (), "float32", 1e-7, "owner")
    return ParamSpec(Layout((rows, cols), stage, Axis("shard", ranks, 0, "s")), "float32", "float32", "float32", how)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_exchange_has_a_matrix_for_each_rank(stage):
    """Cut by bytes alone, every other exchange here would be one matrix, which nobody but its owner has work from."""
    layer = [(512, 2048), (2048, 512), (512, 512), (1536, 512)]
    specs = [matrix(*shape, stage, 2) for shape in layer * 6]
    assert bucket_matrices(specs, Costs(), 512 * MIB) == [[i, i + 1] for i in range(0, 24, 2)]


@given(
    st.lists(st.tuples(st.integers(1, 2048), st.integers(1, 2048)), min_size=1, max_size=40),
    st.integers(2, 9),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0.25, 3.0, 512.0]),
)
def test_every_matrix_is_in_one_exchange_that_has_one_for_each_rank(shapes, ranks, stage, cap_mib):
    specs = [matrix(*shape, stage, ranks) for shape in shapes]
    buckets = bucket_matrices(specs, Costs(), int(cap_mib * MIB))
    assert [i for bucket in buckets for i in bucket] == list(range(len(specs)))
    assert len(buckets) == 1 or min(map(len, buckets)) >= ranks


def test_one_rank_which_sends_nothing_has_twice_as_many_matrices_to_a_call():
    alone = bucket_matrices([matrix(512, 512, 0, 1)] * 8, Costs(), 2 * MIB)  # of a mebibyte each
    assert [len(bucket) for bucket in alone] == [4, 4]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_machine_says_what_its_collectives_take_to_start(stage, world, tmp_path):
    """In bytes that they could have gathered or reduced meanwhile: more ranks and slower links, more of them."""
    slow = tmp_path / "slow.json"
    links = H100.links[0], replace(H100.links[1], latency=1e-3)
    slow.write_text(json.dumps(replace(H100, links=links, protocols=()).to_json()))

    def described(machine, size, **mesh):
        with world(0, size):
            model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 4))
            if mesh:
                mesh = {"mesh": init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))}
            ledger = MuonZero(model, stage=stage, machine=machine, **mesh).engine.ledger
            layout, costs = ledger.sharded_params[0].spec.layout, ledger.costs
            return {start: start(layout, costs) for start in (gather_start, reduce_start, exchange_start)}

    near, far, further = (described(*given) for given in (("h100", 8), ("h100", 64), (slow, 64)))
    assert 0 < near[reduce_start] < far[reduce_start] < further[reduce_start]
    assert far[exchange_start] < further[exchange_start]
    if stage:
        assert 0 < near[gather_start] < far[gather_start] < further[gather_start]
        inside = described("h100", 64, replicate=8, shard=8)
        assert inside[gather_start] == near[gather_start]
        assert near[reduce_start] < inside[reduce_start] < far[reduce_start]
        # Replicas are a node apart each, and what is handed round goes from node to node.
        assert described("h100", 16, replicate=8, shard=2)[exchange_start] < inside[exchange_start]
    else:
        assert near[gather_start] == 0
