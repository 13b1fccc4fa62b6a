"""The formulas: the numbers that docs/why/exchange.md prints, and the facts that choices rest on."""

from functools import partial

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compile_muon
from compile_muon.passes import formulas


def over_all_axes(by_axis, name, rows, cols, *, world, replicas=1, itemsize):
    """The bytes of `world` ranks in all."""
    return sum(by_axis(name, rows, cols, shards=world // replicas, replicas=replicas, itemsize=itemsize).values())


EXCHANGES = ("local", "owner", "local_over_all", "owner_over_all")

bytes_sent = partial(over_all_axes, formulas.bytes_by_axis)
weight_bytes = partial(over_all_axes, formulas.bytes_by_axis)

sizes = st.integers(1, 4096)
worlds = st.integers(2, 512)


@given(sizes, sizes, worlds, st.sampled_from([2, 4]))
def test_table_of_bytes(rows, cols, world, itemsize):
    """docs/why/exchange.md: sent bytes per rank and matrix of S bytes."""
    s = rows * cols * itemsize
    sent = {
        name: bytes_sent(name, rows, cols, world=world, itemsize=itemsize) for name in ("local", "owner", "owner_whole")
    }
    assert sent["local"] == 0
    assert sent["owner"] == pytest.approx(2 * s * (world - 1) / world**2)
    assert sent["owner_whole"] == pytest.approx(s * (world - 1) / world)
    gathered = weight_bytes("all_gather", rows, cols, world=world, itemsize=itemsize)
    scattered = weight_bytes("reduce_scatter", rows, cols, world=world, itemsize=itemsize)
    reduced = weight_bytes("all_reduce", rows, cols, world=world, itemsize=itemsize)
    assert gathered == scattered == pytest.approx(s * (world - 1) / world)
    assert reduced == pytest.approx(gathered + scattered)


@given(sizes, sizes, st.integers(2, 32), st.integers(2, 32))
def test_table_of_bytes_of_a_mesh(rows, cols, shards, replicas):
    """docs/how-to/meshes.md: state over all ranks sends no more bytes than state over shards."""
    s, world = rows * cols * 2, shards * replicas
    size = {"world": world, "replicas": replicas, "itemsize": 2}
    sent = {name: bytes_sent(name, rows, cols, **size) for name in EXCHANGES}
    assert sent["local_over_all"] == 0 < sent["local"]
    assert sent["owner_over_all"] == pytest.approx(2 * s * (world - 1) / world**2)
    reduced, slices = (weight_bytes(name, rows, cols, **size) for name in ("reduce_scatter_over_all", "slice_gather"))
    assert reduced + slices == pytest.approx(weight_bytes("reduce_scatter", rows, cols, **size))


def counted(model, optimizer, inputs):
    """Bytes by axis of one compiled forward and backward."""
    torch._dynamo.reset()
    model = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}, fullgraph=True)
    output = model(**inputs)
    (output.loss if hasattr(output, "loss") else output.sum()).backward()
    return dict(optimizer.traffic.by_axis)


def bytes_of_activations(tokens, hidden, ranks):
    """Of one rank's forward and backward in float32: to experts and back, twice; or two all-reduces of a pair."""
    return 4 * tokens * hidden * 4 * (ranks - 1) / ranks


@pytest.mark.full
def test_dispatch_to_experts_is_counted_as_its_formula_says(world):
    transformers = pytest.importorskip("transformers")
    with world(3, 8):
        config = transformers.MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
        )  # fmt: skip
        # capacity 1: each expert gets the mean, which is what the formula is for
        settings = {
            "zero_optimization": {"stage": 3},
            "expert_parallel": {"size": 4, "capacity_factor": 1.0},
            "optimizer": {"params": {"update": "step"}},
        }
        model, optimizer = compile_muon.initialize(transformers.MixtralForCausalLM(config), settings)
        tokens = torch.arange(16).view(2, 8)
        found = counted(model, optimizer, {"input_ids": tokens, "labels": tokens})
    assert set(found) == {"shard", "expert", "shard_expert"}
    assert found["expert"] == bytes_of_activations(tokens=16 * 2, hidden=16, ranks=4)


def test_tensor_slices_are_counted_as_their_formula_says(world):
    with world(3, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("shard", "tensor"))
        model = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in ((16, 16), (16, 32), (32, 16))))
        parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = compile_muon.MuonZero(model, mesh=mesh, stage=3, update="step")
        found = counted(model, optimizer, {"input": torch.ones(6, 16)})
    assert set(found) == {"shard", "tensor"}
    assert found["tensor"] == bytes_of_activations(tokens=6, hidden=16, ranks=4)


def test_the_best_bucket_is_where_its_time_is_shortest():
    size, total, start = sympy.symbols("size total start", positive=True)
    seconds = (total / size + 1) * (start + size)  # in bytes that the link could carry meanwhile
    (best,) = sympy.solve(sympy.diff(seconds, size), size)
    assert sympy.simplify(sympy.diff(seconds, size, 2)).is_positive
    assert formulas.bucket_bytes(100.0, 4.0) == best.subs({total: 100, start: 4}) == 20
    assert formulas.bucket_bytes(1e12, 0) == 0
