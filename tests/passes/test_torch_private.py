"""Every private torch API that is wrapped in torch_private.py: it exists and does what the wrapper is for.

A failure here says which API of a new torch moved, before anything that stands on it fails in a less readable way.
"""

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compile_muon.passes import torch_private as private


def moved(api, what):
    return f"torch {torch.__version__}: {api} {what}; adapt passes/torch_private.py"


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


def test_operators_on_a_subclass_of_dtensor_reach_its_rules(monkeypatch):
    """Before 2.13 torch knows none of the subclass; a rule stays ahead of DTensor's dispatch in later ones."""
    seen = []

    class Noting(DTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*(DTensor(value._local_tensor, value._spec, requires_grad=False) for value in args))

    monkeypatch.setattr(private, "BEFORE_2_13", True)
    private.dispatch_through_python(Noting)
    del Noting.__torch_dispatch__
    with private.fake_group(0, 2):
        value = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        value.__class__ = Noting
        assert type(value + value) is DTensor
    assert seen == [torch.ops.aten.add.Tensor], moved("torch_dispatch_rules", "is passed by")


def test_what_is_made_of_a_partial_value_and_a_whole_one_is_partial(monkeypatch):
    """Each of two ranks adds half of a whole number."""
    monkeypatch.setattr(private, "BEFORE_2_13", True)
    with private.fake_group(0, 2):
        mesh, two = init_device_mesh("cpu", (2,)), torch.tensor(2.0)
        part = DTensor.from_local(torch.tensor(3.0), mesh, [Partial()], run_check=False)
        whole = DTensor.from_local(two, mesh, [Replicate()], run_check=False)
        for name, first, last in [("add", 4, 4), ("sub", -2, 2), ("mul", 6, 6)]:
            operator = getattr(torch.ops.aten, name).Tensor
            for args, local in [((two, part), first), ((whole, part), first), ((part, two), last)]:
                operator_of, ordered = private.partial_first(operator, args, {})
                made = operator_of(*ordered)
                assert made.placements == (Partial(),) and made._local_tensor == local, name
        assert private.partial_first(operator, (two, part), {"alpha": 2})[1] == (two, part)


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
