"""Tensors that share a collective: as the cost model says, within the user's limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_muon import MuonZero
from compile_muon.config.machine import load_costs
from compile_muon.kernels import resolve_coefficients
from compile_muon.passes.costs import Costs, Link, exchange_start, gather_start, reduce_start
from compile_muon.passes.formulas import bucket_bytes
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.lowering.buckets import bucket_matrices, group_neighbours, largest_bucket

MIB = 2**20
JORDAN = tuple(value for triple in resolve_coefficients("jordan", 5).steps for value in triple)


def spec(shape, stage=3, ranks=4, dtype="float32"):
    how = (True, "standard", JORDAN, 1.0, (), "float32", 1e-7, "owner")
    muon = MuonSpec(1, *shape, *how) if len(shape) == 2 else None
    return ParamSpec(Layout(shape, stage, Axis("shard", ranks, 0, "s")), dtype, dtype, dtype, muon)


def starting(nbytes, **settings):
    """Costs of links on which four ranks could gather ``nbytes`` in the time that a gather takes to start."""
    return Costs(start_seconds=nbytes * 3 / 4, links=(Link(None, 1.0, 0.0),), **settings)


def grouped(specs, costs, cap_mib=512.0, **kind):
    groups = group_neighbours(specs, lambda each: each.compute_dtype, costs, int(cap_mib * MIB), **kind)
    return groups, [sum(specs[i].layout.numel * 4 for i in group) / MIB for group in groups]


@pytest.mark.parametrize(("start", "best"), [(0, 1), (MIB // 4, 8), (MIB, 16), (64 * MIB, 32)])
def test_links_that_start_slowly_get_larger_buckets(start, best):
    """Up to an eighth of all, and what the user allows; gathers begin with a small one, and reductions end so."""
    specs = [spec((MIB // 4,))] * 256
    gathers, reductions = (grouped(specs, starting(start), reduces=reduces)[1] for reduces in (False, True))
    assert max(gathers) == best and max(grouped(specs, starting(start), cap_mib=6)[1]) == min(best, 6)
    if start == MIB:
        assert gathers[:5] == [1, 1, 2, 4, 8] and set(gathers[5:-1]) == {16}  # the root of 256 · 1
        assert reductions[-4:] == [4, 2, 1, 1]


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.integers(0, 50 * MIB),
    st.sampled_from([0.25, 3.0, 25.0]),
    st.booleans(),
    st.integers(0, 2),
)
def test_every_tensor_is_in_one_bucket_that_keeps_to_its_size(kib, start, cap_mib, reduces, kinds):
    """A bucket has one dtype and one redistribution key."""
    every = ({}, {"ranks": 8}, {"dtype": "int32"})[: kinds + 1]
    specs = [spec((each * 256,), **every[i % len(every)]) for i, each in enumerate(kib)]
    groups, sizes = grouped(specs, starting(start), cap_mib, reduces=reduces)
    assert sorted(i for group in groups for i in group) == list(range(len(specs))) and groups == sorted(groups)
    assert all(len({i % len(every) for i in group}) == 1 for group in groups)
    total = sum(kib) * 1024
    largest = largest_bucket(total, int(cap_mib * MIB)) / MIB
    assert all(size <= largest or len(group) == 1 for group, size in zip(groups, sizes, strict=True))
    best, ordered = max(bucket_bytes(total, start) / MIB, 1), sizes[::-1] if reduces else sizes
    for place in range(len(ordered) - 1 if len(every) == 1 else 0):  # two that follow would not have fitted into one
        assert sum(ordered[place : place + 2]) > min(largest, best, max(sum(ordered[:place]), start / MIB, 1)) - 1e-9


@given(
    st.lists(st.tuples(st.integers(1, 2048), st.integers(1, 2048)), min_size=1, max_size=40),
    st.integers(2, 9),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0.25, 3.0, 512.0]),
)
def test_every_matrix_is_in_one_exchange_that_has_one_for_each_rank(shapes, ranks, stage, cap_mib):
    specs = [spec(shape, stage, ranks) for shape in shapes]
    exchanges = bucket_matrices(specs, Costs(), int(cap_mib * MIB))
    assert [i for bucket in exchanges for i in bucket] == list(range(len(specs)))
    assert len(exchanges) == 1 or min(map(len, exchanges)) >= ranks


@pytest.mark.parametrize(
    ("start", "fill", "cap_mib", "count"),
    [
        *((start, 0, 512, count) for start, count in ((0, 32), (MIB // 6, 16), (MIB * 2 / 3, 8), (64 * MIB, 4))),
        (64 * MIB, 0, 2, 16),
        *((0, fill * 512 * 512, 512, count) for fill, count in ((1, 32), (2, 16), (64, 4))),
        (0, 64 * 512 * 512, 4, 8),
    ],
)
def test_exchanges_are_as_many_as_links_devices_and_memory_want(start, fill, cap_mib, count):
    """Fewer where links start slowly, or a device is not full; as many as travel under backward, or fit into memory."""
    specs = [spec((512, 512))] * 128  # a mebibyte each: 32 for each rank
    assert len(bucket_matrices(specs, starting(start, fill_entries=fill), cap_mib * MIB)) == count


def test_one_rank_which_sends_nothing_has_twice_as_many_matrices_to_a_call():
    alone = bucket_matrices([spec((512, 512), 0, 1)] * 8, Costs(), 2 * MIB)  # of a mebibyte each
    assert [len(bucket) for bucket in alone] == [4, 4]


def test_a_machine_says_what_its_collectives_take_to_start(world):
    """Bytes that they could have sent meanwhile are more over more ranks, and fewer inside a replica."""

    def described(size, **mesh):
        with world(0, size):
            if mesh:
                mesh = {"mesh": init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))}
            ledger = MuonZero(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4)), machine="h100", **mesh).engine.ledger
            layout, costs = ledger.sharded_params[0].spec.layout, ledger.costs
            return [start(layout, costs) for start in (gather_start, reduce_start, exchange_start)]

    (near, first, _), (far, last, _), inside = described(8), described(64), described(64, replicate=8, shard=8)
    assert 0 < near == inside[0] < far and 0 < first < inside[1] < last
    assert inside[2] == load_costs("h100").start_bytes("all_to_all", range(0, 64, 8)), "replicas are a node apart each"
