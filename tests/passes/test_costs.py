"""The formulas: the numbers that docs/why/exchange.md prints, and the facts that choices rest on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compile_muon
from compile_muon.kernels.operations import gram_flops, standard_flops
from compile_muon.machines import known_machines, load_machine
from compile_muon.passes import costs
from compile_muon.passes.layout import Axis, Layout
from compile_muon.passes.machine import Link

sizes = st.integers(1, 4096)
worlds = st.integers(2, 512)
MACHINES = [load_machine(name) for name in known_machines()]
H100 = load_machine("h100")


@pytest.mark.parametrize("alpha", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("k", [1, 16, 768])
def test_operations_in_units_of_k_cubed(alpha, k):
    """docs/why/exchange.md: 20a + 10 and 8a + 28 operations, five steps, dense, one restart."""
    assert costs.standard_operations(k, alpha * k, steps=5) == (20 * alpha + 10) * k**3
    assert costs.gram_operations(k, alpha * k, steps=5) == (8 * alpha + 28) * k**3
    assert costs.gram_operations(alpha * k, k, steps=5) == (8 * alpha + 28) * k**3


def test_gram_wins_from_an_aspect_of_one_and_a_half():
    def gain(alpha: float) -> float:
        k = 64
        l = int(alpha * k)  # noqa: E741
        return costs.standard_operations(k, l, steps=5) - costs.gram_operations(k, l, steps=5)

    assert gain(1.25) < 0
    assert gain(1.5) == 0
    assert gain(1.75) > 0


@given(sizes, sizes, st.integers(1, 20))
def test_operations_are_those_the_kernels_count(rows, cols, steps):
    k, l = sorted((rows, cols))  # noqa: E741
    assert costs.standard_operations(rows, cols, steps=steps) == standard_flops(k, l, steps)
    assert costs.owner_work(rows, cols, steps=steps) * 2 == standard_flops(k, l, steps)
    assert costs.owner_work(rows, cols, steps=steps) == steps * k * k * (2 * l + k)
    if steps > 1:
        assert costs.gram_operations(rows, cols, steps=steps) == gram_flops(k, l, steps, 1)


@given(sizes, sizes, worlds, st.sampled_from([2, 4]))
def test_table_of_bytes(rows, cols, world, itemsize):
    """docs/why/exchange.md: sent bytes per rank and matrix of S bytes."""
    s = rows * cols * itemsize
    sent = {name: costs.bytes_sent(name, rows, cols, world=world, itemsize=itemsize) for name in costs.BYTES_SENT}
    assert sent["local"] == 0
    assert sent["replicate"] == pytest.approx(s * (world - 1) / world)
    assert sent["owner"] == pytest.approx(2 * s * (world - 1) / world**2)
    assert sent["owner_whole"] == pytest.approx(s * (world - 1) / world)
    assert sent["owner"] <= sent["replicate"] * (1 + 1e-12)  # equal at world 2, less from world 3
    gathered = costs.weight_bytes("all_gather", rows, cols, world=world, itemsize=itemsize)
    scattered = costs.weight_bytes("reduce_scatter", rows, cols, world=world, itemsize=itemsize)
    reduced = costs.weight_bytes("all_reduce", rows, cols, world=world, itemsize=itemsize)
    assert gathered == scattered == pytest.approx(s * (world - 1) / world)
    assert reduced == pytest.approx(gathered + scattered)


@given(sizes, sizes, st.integers(2, 32), st.integers(2, 32))
def test_table_of_bytes_of_a_mesh(rows, cols, shards, replicas):
    """docs/how-to/meshes.md: state over all ranks sends no more bytes than state over shards."""
    s, world = rows * cols * 2, shards * replicas
    size = {"world": world, "replicas": replicas, "itemsize": 2}
    sent = {name: costs.bytes_sent(name, rows, cols, **size) for name in costs.BYTES_SENT}
    assert sent["local_over_all"] == 0 < sent["local"]
    assert sent["owner_over_all"] == pytest.approx(2 * s * (world - 1) / world**2)
    assert sent["replicate_over_all"] == pytest.approx(s * (world - 1) / world)
    reduced, slices = (
        costs.weight_bytes(name, rows, cols, **size) for name in ("reduce_scatter_over_all", "slice_gather")
    )
    assert reduced + slices == pytest.approx(costs.weight_bytes("reduce_scatter", rows, cols, **size))
    over_all = {"world": world, "replicas": replicas, "state_over_all": True}
    choice = costs.choose_exchange(rows, cols, **over_all, steps=5, dtype="bfloat16", machine=H100)
    assert choice in ("owner", "replicate")


@pytest.mark.parametrize(("experts", "shards", "sent"), [(64, 8, 64), (8, 8, 8), (8, 64, 64), (3, 2, 4), (1, 512, 512)])
def test_a_stack_over_more_ranks_than_it_has_experts_is_padded(experts, shards, sent):
    assert costs.padded_rows(experts, shards=shards) == sent
    assert costs.padded_rows(experts, shards=shards, replicas=4, state_over_all=True) >= 4 * shards


def test_padded_rows_are_those_of_the_layout():
    for rows, shards, replicas in ((8, 3, 2), (5, 8, 2), (13, 2, 5), (1, 2, 2)):
        axes = Axis("shard", shards, 0, "s"), Axis("replicate", replicas, 0, "r")
        both = Axis("all", shards * replicas, 0, "a")
        layout = Layout((rows, 1), 3, *axes, both, state_over_all=True)
        assert costs.padded_rows(rows, shards=shards) == layout.chunk * shards
        padded = costs.padded_rows(rows, shards=shards, replicas=replicas, state_over_all=True)
        assert padded == layout.widest_piece * shards * replicas  # the first slice is the largest


def counted(model, optimizer, inputs):
    """Bytes by axis of one compiled forward and backward."""
    torch._dynamo.reset()
    model = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}, fullgraph=True)
    output = model(**inputs)
    (output.loss if hasattr(output, "loss") else output.sum()).backward()
    return dict(optimizer.traffic.by_axis)


def test_dispatch_to_experts_is_counted_as_its_formula_says(world):
    transformers = pytest.importorskip("transformers")
    with world(3, 8):
        config = transformers.MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
        )  # fmt: skip
        # capacity 1: each expert gets the mean, which is what the formula is for
        settings = {"zero_optimization": {"stage": 3}, "expert_parallel": {"size": 4, "capacity_factor": 1.0}}
        model, optimizer = compile_muon.initialize(transformers.MixtralForCausalLM(config), settings)
        tokens = torch.arange(16).view(2, 8)
        found = counted(model, optimizer, {"input_ids": tokens, "labels": tokens})
    assert set(found) == {"shard", "expert", "shard_expert"}
    assert found["expert"] == 2 * costs.activation_bytes("dispatch", tokens=16, slots=2, hidden=16, ranks=4, itemsize=4)


def test_tensor_slices_are_counted_as_their_formula_says(world):
    with world(3, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("shard", "tensor"))
        model = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in ((16, 16), (16, 32), (32, 16))))
        parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = compile_muon.MuonZero(model, mesh=mesh, stage=3, update="step")
        found = counted(model, optimizer, {"input": torch.ones(6, 16)})
    assert set(found) == {"shard", "tensor"}
    assert found["tensor"] == costs.activation_bytes("tensor_pair", tokens=6, hidden=16, ranks=4, itemsize=4)


def test_formulas_print_in_their_symbols():
    names = {
        str(symbol)
        for table in costs.BYTES_SENT.values()
        for formula in table.values()
        for symbol in formula.free_symbols
    }
    assert names == {"rows", "cols", "shards", "replicas", "itemsize"}
    assert {str(s) for s in costs.OWNER_WORK.free_symbols} == {"rows", "cols", "steps"}
    owner, replicate = costs.BYTES_SENT["owner"]["shard"], costs.BYTES_SENT["replicate"]["shard"]
    assert sympy.simplify(owner * costs.W / 2 - replicate) == 0


@pytest.mark.parametrize("machine", known_machines())
def test_one_process_exchanges_nothing(machine):
    choice = costs.choose_exchange(512, 512, world=1, steps=5, dtype="bfloat16", machine=load_machine(machine))
    assert choice == "local"


@given(sizes, sizes, worlds, st.integers(1, 10), st.sampled_from(MACHINES))
def test_choice_is_one_of_two_and_ignores_orientation(rows, cols, world, steps, machine):
    given = {"world": world, "steps": steps, "dtype": "bfloat16", "machine": machine}
    choice = costs.choose_exchange(rows, cols, **given)
    assert choice in ("replicate", "owner")
    assert choice == costs.choose_exchange(cols, rows, **given)


@given(sizes, sizes, worlds, st.integers(1, 10), st.integers(1, 4), st.sampled_from(MACHINES))
def test_once_owner_pays_it_keeps_paying(rows, cols, world, steps, more, machine):
    """Owner trades one more start for less work and no more bytes: more of either never turns it back.

    On links that are the same between all ranks, that is: more of them may make a slower link part of it, or more hops.
    """
    alike = replace(machine, links=(Link(None, 1e11, 0.0),), protocols=(), cores=0)
    given = {"dtype": "bfloat16", "machine": alike}
    if costs.choose_exchange(rows, cols, world=world, steps=steps, **given) == "owner":
        for larger in (
            {"rows": rows * more, "cols": cols * more, "world": world, "steps": steps},
            {"rows": rows, "cols": cols, "world": world * more, "steps": steps},
            {"rows": rows, "cols": cols, "world": world, "steps": steps * more},
        ):
            assert costs.choose_exchange(**larger, **given) == "owner", larger


@pytest.mark.parametrize("world", [2, 8, 64])
@pytest.mark.parametrize("machine", known_machines())
def test_ends_of_the_choice(world, machine):
    given = {"world": world, "steps": 5, "dtype": "bfloat16", "machine": load_machine(machine)}
    assert costs.choose_exchange(8, 8, **given) == "replicate"
    assert costs.choose_exchange(2048, 8192, **given) == "owner"


def test_the_machine_decides():
    """Slow links keep a matrix where it is multiplied by everybody, slow devices do not."""
    slow_links = replace(H100, links=tuple(replace(link, latency=1e-3) for link in H100.links))
    slow_device = replace(H100, rates={"bfloat16": ((1.0, 1e10),)})
    given = {"world": 8, "steps": 5, "dtype": "bfloat16"}
    assert costs.choose_exchange(1024, 1024, machine=slow_links, **given) == "replicate"
    assert costs.choose_exchange(1024, 1024, machine=H100, **given) == "owner"
    assert costs.choose_exchange(128, 128, machine=H100, **given) == "replicate"
    assert costs.choose_exchange(128, 128, machine=slow_device, **given) == "owner"


def test_newton_schulz_takes_what_its_products_take():
    seconds = costs.newton_schulz_seconds(H100, 2048, 1024, steps=5, dtype="bfloat16")
    products = [
        H100.product_seconds(m, n, k, dtype="bfloat16")
        for m, n, k in ((1024, 1024, 2048), (1024,) * 3, (1024, 2048, 1024))
    ]
    assert seconds == pytest.approx(5 * sum(products))
    operations = costs.standard_operations(2048, 1024, steps=5)
    assert seconds == pytest.approx(operations / H100.rate(1024, "bfloat16") + 15 * H100.kernel_seconds)


def test_gram_form_takes_what_its_products_take():
    seconds = costs.newton_schulz_seconds(H100, 1024, 4096, steps=5, dtype="bfloat16", restarts=1)
    wide = sum(H100.product_seconds(*shape, dtype="bfloat16") for shape in ((1024, 1024, 4096), (1024, 4096, 1024)))
    square = H100.product_seconds(1024, 1024, 1024, dtype="bfloat16")
    assert seconds == pytest.approx(2 * wide + 14 * square)
    operations = costs.gram_operations(4096, 1024, steps=5)
    assert seconds == pytest.approx(operations / H100.rate(1024, "bfloat16") + 18 * H100.kernel_seconds)


def test_the_best_bucket_is_where_its_time_is_shortest():
    assert sympy.solve(sympy.diff(costs.BUCKET_TIME, costs.SIZE), costs.SIZE) == [costs.BUCKET_BYTES]
    assert sympy.simplify(sympy.diff(costs.BUCKET_TIME, costs.SIZE, 2)).is_positive
    assert costs.bucket_bytes(100.0, 4.0) == 20
    assert costs.bucket_bytes(1e12, 0) == 0


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("ranks", [range(2), range(8), range(64), range(0, 64, 8)])
def test_starting_takes_as_long_as_sending_that_much(kind, ranks):
    """The way that large ones go: there is a faster one for what is small."""
    start, transfer = H100.collective_parts(kind, 2**28, ranks)
    assert costs.start_bytes(H100, kind, ranks) * transfer / 2**28 == pytest.approx(start, rel=1e-6)
    assert costs.start_bytes(H100, kind, range(1)) == 0


def test_starts_in_bytes_of_whole_weights():
    """Over the axis where they are most."""
    kinds = {"shard": "reduce_scatter", "replicate": "all_reduce"}
    shard = costs.start_bytes(H100, "reduce_scatter", range(8)) * 8 / 7
    replicate = costs.start_bytes(H100, "all_reduce", range(0, 32, 8)) * 8 * 4 / 6
    found = costs.weight_start_bytes(H100, "reduce_scatter", kinds, shards=8, replicas=4)
    assert found == pytest.approx(max(shard, replicate), rel=1e-6)
    apart = costs.weight_start_bytes(H100, "all_gather", {"shard": "all_gather"}, shards=8, replicas=1, apart=4)
    assert apart == pytest.approx(costs.start_bytes(H100, "all_gather", range(0, 32, 4)) * 8 / 7, rel=1e-6)
    assert costs.weight_start_bytes(H100, "all_gather", kinds, shards=1, replicas=1) == 0
