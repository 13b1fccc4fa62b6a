"""Every private torch API that is wrapped in torch_private.py: it exists and does what the wrapper is for.

A failure here says which API of a new torch moved, before anything that stands on it fails in a less readable way.
"""

from __future__ import annotations

import inspect
import logging
import math
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compile_muon.passes import torch_private as private


def moved(api, what):
    return f"torch {torch.__version__}: {api} {what}; adapt passes/torch_private.py"


def parameters(function):
    return inspect.signature(function).parameters


@pytest.mark.parametrize("trains", [False, True])
def test_compile_fx_calls_inner_compilers_and_the_partitioner(trains):
    """One partition call per frame with a backward, none without; forward, backward and inference told apart."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition

    calls = []

    def partition(gm, joint_inputs, **kwargs):
        calls.append("partition")
        assert "num_fwd_outputs" in kwargs, moved("custom_partitioner_fn", "is no longer told num_fwd_outputs")
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def inner(gm, inputs, **kwargs):
        kinds = [name for name in ("backward", "inference") if kwargs.get(f"is_{name}")]
        calls.append(*(kinds or ["forward"]))
        return make_boxed_func(gm.forward)

    def backend(gm, inputs):
        patches = {"custom_partitioner_fn": private.Partitioner(partition, b"test")}
        with private.autograd_cache_disabled():
            return private.compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)

    torch._dynamo.reset()
    weight = torch.ones(3, requires_grad=trains)
    result = torch.compile(lambda w: (w.exp() * 2).sum(), backend=backend)(weight)
    if trains:
        result.backward()
        torch.testing.assert_close(weight.grad, 2 * weight.detach().exp())
    expected = ["partition", "forward", "backward"] if trains else ["inference"]
    assert calls == expected, moved("compile_fx", f"calls {calls}")


@pytest.mark.parametrize(("sends", "device"), [(False, "cpu"), (True, "cpu"), (True, "cuda")])
def test_graphs_that_send_keep_their_order_and_on_cpus_dead_buffers_are_kept(sends, device, monkeypatch):
    """Elsewhere Inductor's reordering for peak memory is what a user of torch.compile gets."""
    import torch._inductor.compile_fx as module

    graph, seen, config = Graph(), [], torch._inductor.config
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,)) if sends else x,))
    record = lambda gm, inputs: seen.append((config.reorder_for_peak_memory, config.allow_buffer_reuse))  # noqa: E731
    monkeypatch.setattr(module, "compile_fx_inner", record)
    with FakeTensorMode():
        inputs = [3, torch.empty(2, device=device)]
    private.compile_fx_inner(GraphModule(torch.nn.Module(), graph), inputs)
    assert seen == [(not sends, device == "cpu")]


def test_each_backward_has_a_number_of_its_own():
    seen = []

    def note(grad):
        seen.append(private.current_backward())

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(note)
        x.register_hook(note)
        (y * 3).sum().backward()
    assert private.current_backward() == -1, moved("_current_graph_task_id", "is set outside of a backward")
    first, second = set(seen[:2]), set(seen[2:])
    assert len(first) == len(second) == 1 and first != second and -1 not in first | second, moved(
        "_current_graph_task_id", f"gave {seen} in two backwards of several nodes"
    )


def test_partitioner_object():
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    partitioner = private.Partitioner(lambda gm, inputs, **kwargs: (gm, inputs), b"who")
    assert isinstance(partitioner, CustomPartitionerFn)
    assert partitioner("graph", "inputs", num_fwd_outputs=1) == ("graph", "inputs")
    assert partitioner.uuid() == b"who"
    copy = pickle.loads(pickle.dumps(partitioner))  # Inductor pickles its configuration to key caches
    assert copy.uuid() == b"who"
    with pytest.raises(RuntimeError, match="only keys caches"):
        copy("graph", "inputs")


def saved_halves(saved):
    """A forward that returns its input and saves what is named, and the backward that takes it and a tangent."""
    values = {"s0": ShapeEnv().create_unbacked_symint(), "mesh": object()}
    halves = []
    for names in (["x", *saved], [*(n for n in saved if n == "s0"), *(n for n in saved if n != "s0"), "tangent"]):
        graph = Graph()
        nodes = [graph.placeholder(name) for name in names]
        for node in nodes:
            node.meta["val"] = values.get(node.name, torch.ones(1))
            node.meta["saved_tensor_with_no_vc_check"] = node.name == "unchecked"
        graph.output(tuple(nodes))
        halves.append(GraphModule(torch.nn.Module(), graph))
    return halves


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (["a", "mesh", "rng0", "rng1", "s0"], ["a", "rng0", "rng1", "mesh", "s0"]),
        (["a", "unchecked", "mesh", "rng0"], ["a", "rng0", "unchecked", "mesh"]),
        (["mesh", "rng0"], ["rng0", "mesh"]),
        (["a", "mesh", "s0"], ["a", "mesh", "s0"]),
        ([], []),
    ],
)
def test_saved_values_are_ordered_as_they_are_sliced(saved, expected):
    forward, backward = saved_halves(saved)
    private.order_saved_values(forward, backward, 1)
    assert [node.name for node in forward.graph.output_node().args[0]] == ["x", *expected]
    taken = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert taken == [*(n for n in expected if n == "s0"), *(n for n in expected if n != "s0"), "tangent"]
    # The generated code goes by the new order too, and each value still arrives under its own name.
    assert forward(*["x", *saved]) == ("x", *expected)
    assert dict(zip([n.name for n in backward.graph.output_node().args[0]], backward(*taken), strict=True)) == {
        name: name for name in taken
    }


def test_fake_mode_of():
    fake = FakeTensorMode()
    x = fake.from_tensor(torch.zeros(2))
    assert private.fake_mode_of([x]) is fake
    with private.fake_mode_of([torch.zeros(2)]):
        assert type(torch.zeros(1)) is torch.Tensor


def test_an_accumulator_is_found_among_the_nodes_that_come_next(monkeypatch):
    seen, looked_for = [], []
    param, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    slowly = private._accumulator
    monkeypatch.setattr(private, "_accumulator", lambda leaf: looked_for.append(leaf) or slowly(leaf))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            seen.extend(private.accumulators_of([param, other]))
            return 2 * grad, None

    Twice.apply(param, other.detach() * 3).sum().backward()
    why = moved("_current_autograd_node", "does not lead to the nodes that write .grad")
    assert [node.variable is leaf for node, leaf in zip(seen, (param, other), strict=True)] == [True, True], why
    assert len(looked_for) == 1 and looked_for[0] is other, why  # the function has not read it


def test_compiled_autograd_is_noticed():
    assert not private.compiled_autograd_active()
    assert hasattr(torch._dynamo.config, "compiled_autograd"), moved("dynamo config compiled_autograd", "is gone")
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert private.compiled_autograd_active()
    seen = []
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        seen.append(private.compiled_autograd_active())
    assert seen == [True], moved("compiled_autograd._enable", "is no longer noticed")


def test_a_plain_tensor_beside_a_dtensor_is_noticed():
    with private.fake_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(RuntimeError) as caught:
            torch.mm(torch.ones(2, 4), sharded)
    assert private.meets_plain_tensor(caught.value) and not private.meets_plain_tensor(RuntimeError("else"))


def test_a_frame_that_is_compiled_is_noticed():
    seen = []

    def backend(gm, inputs):
        seen.append(private.being_compiled())
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == [True] and not private.being_compiled()


def test_trace_artifact_reaches_the_structured_trace():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    trace = logging.getLogger("torch.__trace")
    trace.addHandler(handler)
    try:
        private.trace_artifact("muon_zero.test", lambda: "a readable graph")
    finally:
        trace.removeHandler(handler)
    # A process's first records also intern the names of files.
    found = [record for record in records if "artifact" in getattr(record, "metadata", {})]
    names = [record.metadata["artifact"].get("name") for record in found]
    assert names == ["muon_zero.test"], moved("trace_structured", f"recorded {names}")
    assert found[0].payload == "a readable graph"


def test_an_unrecorded_op_runs_and_leaves_no_event():
    calls = []
    arguments = "Tensor(a!)[] xs, str name"
    op = private.unrecorded_op("test_of_torch_private", arguments, lambda xs, name: calls.append(name))
    x = torch.ones(2)
    with torch.profiler.profile() as recorded:
        op([x], "real")
        torch.neg(x)
    names = [event.name for event in recorded.events()]
    assert "aten::neg" in names
    assert not [name for name in names if "record_function" in name], moved("isObserved", "observes these ops")
    with FakeTensorMode():
        op([torch.ones(2)], "fake")
    assert calls == ["real"]
    # The op whose name it shares is what it was.
    handle = torch.ops.profiler._record_function_enter("outer")
    torch.ops.profiler._record_function_exit(handle)


def test_saved_context_restores_what_compilation_sees():
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    fake = FakeTensorMode()
    with tracing(TracingContext(fake)), V.set_fake_mode(fake):
        saved = private.SavedContext()
        inside = TracingContext.try_get()
    assert TracingContext.try_get() is None
    with torch.autocast("cpu", dtype=torch.bfloat16), saved.restored():
        assert TracingContext.try_get() is inside
        assert V.get_fake_mode() is fake
        assert not torch.is_autocast_enabled("cpu")
    assert TracingContext.try_get() is None


def test_groups_say_their_timeout_and_store_and_another_of_the_same_ranks_is_made_once(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=33))
    try:
        world, device = dist.group.WORLD, torch.device("cpu")
        first, again, other = (private.another_group(world, name, device) for name in ("a", "a", "b"))
        assert first is again, moved("distributed_c10d._world.pg_map", "does not list groups with their descriptions")
        assert len({world.group_name, first.group_name, other.group_name}) == 3
        timeouts = {private.timeout_of(group, device) for group in (world, first)}
        assert timeouts == {timedelta(seconds=33)}, moved("ProcessGroup._get_backend().options._timeout", "is gone")
        assert dist.get_backend_config(first) == dist.get_backend_config(world)
        one, copy = (private.store_of(world) for _ in range(2))
        assert one is not None and copy is not None and one is not copy, moved("Store.clone", "is not there")
        one.set("key", "value")
        assert copy.get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_flex_attention_hands_out_the_largest_logits_of_rows():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def attend(q, k, v):
        return flex_attention(Doubled.apply(q).detach(), k, v)  # a CPU has no backward of it

    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    torch.compile(attend, backend=backend)(q.requires_grad_(), k, v)
    (gm,) = graphs
    nodes = list(gm.graph.nodes)
    (flex,) = filter(private.is_flex_attention, nodes)
    assert any(map(private.is_autograd_function, nodes)), moved("autograd_function_apply", "is called otherwise")
    assert private.flex_with_maxima(flex) and flex.args[6]["OUTPUT_MAX"], moved("flex_attention", "has other arguments")
    flex.update_arg(6, {**flex.args[6], "BACKEND": "FLASH"})
    assert not private.flex_with_maxima(flex)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu").as_tuple()
    found = torch.ops.higher_order.flex_attention(q, k, v, lambda x, *_: x, mask, 0.5, {})
    logits = (0.5 * q @ k.mT).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf).amax(-1)
    torch.testing.assert_close(
        found[2] * math.log(2), logits, msg=moved("flex_attention", "counts its maxima otherwise")
    )


def test_inductor_has_worker_processes(monkeypatch):
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    asked = []

    class Pool:
        def submit(self, function, argument):
            asked.append(function(argument))
            return asked[-1]

    for name in ("process_pool", "use_process_pool"):
        assert callable(getattr(AsyncCompile, name, None)), moved("AsyncCompile", f"lost {name}")
    monkeypatch.setattr(AsyncCompile, "process_pool", staticmethod(Pool))
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: True))
    with config.patch(compile_threads=1):
        assert private.in_compile_workers(abs, [-1]) == []
    with config.patch(compile_threads=2):
        assert private.in_compile_workers(abs, [-1, -2]) == asked == [1, 2]
        assert private.in_compile_workers(None, []) == []


def test_where_triton_keeps_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert private.triton_cache(torch.device("cuda", 1)) == tmp_path
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert private.triton_cache(torch.device("cuda", 1)) == tmp_path / "triton" / "1"


def test_no_mode_sees_what_is_made_without_them():
    with FakeTensorMode(), private.without_modes():
        assert type(torch.empty(2, device="meta")) is torch.Tensor
