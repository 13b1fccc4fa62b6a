"""Every torch API used here that is not public, in one place.

``tests/passes/test_torch_private.py`` says which of these moved when one does. Nothing
here patches torch beyond the ``with`` block of a documented ``config.patch``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from inspect import currentframe
from pathlib import Path
from typing import Any, cast

import torch
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InvalidCxxCompiler
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import is_sym_node

from .errors import MuonZeroError

__all__ = [
    "BEFORE_2_13",
    "NoCompilerError",
    "Partitioner",
    "SavedContext",
    "accumulators_of",
    "another_fake",
    "autograd_cache_disabled",
    "below_autograd",
    "collective_failed",
    "compile_fx",
    "compile_fx_inner",
    "compiled_as_frame",
    "compiling_alone",
    "compiled_autograd_active",
    "current_backward",
    "decomposition_table",
    "expected_size",
    "fake_group",
    "fake_mode_of",
    "flex_with_maxima",
    "flop_formula",
    "flattened",
    "fresh_context",
    "group_named",
    "in_compile_workers",
    "is_autograd_function",
    "is_flex_attention",
    "is_from_local",
    "lacks_compiler",
    "lacks_sharding",
    "mark_for_backward",
    "never_a_frame",
    "order_saved_values",
    "profiler_enabled",
    "being_compiled",
    "meets_plain_tensor",
    "of_constant_shape",
    "storage_holders",
    "unflattened",
    "store_of",
    "another_group",
    "timeout_of",
    "trace_artifact",
    "triton_cache",
    "unobserved",
    "unrecorded_op",
    "will_execute",
    "without_modes",
]

#: of torch
BEFORE_2_13 = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


class NoCompilerError(MuonZeroError, ShortenTraceback):
    """There is no C++ compiler, which Inductor writes for; told without the eighty lines of torch that lead there.

    Attributes:
        inner_exception: Inductor's own error.
    """

    def __init__(self, inner_exception: Exception) -> None:
        said = str(inner_exception).partition("\n")[0]
        remedy = "`python -m compile_muon doctor` says what to install"
        super().__init__(f"torch.compile needs a C++ compiler: {said}; {remedy}", first_useful_frame=currentframe())
        self.inner_exception = inner_exception

    def remove_dynamo_frames(self) -> NoCompilerError:
        """Without the frames below our backend, whichever made this."""
        return self.with_traceback(None)


def lacks_compiler(error: BaseException) -> Exception | None:
    """Inductor's complaint that there is no C++ compiler, if ``error`` is one."""
    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error if isinstance(error, InvalidCxxCompiler) else None


PartitionFunction = Callable[..., tuple[GraphModule, GraphModule]]


def compile_fx(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Inductor's graph compiler, joint passes and AOTAutograd included."""
    from torch._inductor.compile_fx import compile_fx as implementation

    return cast("Callable[..., Any]", implementation(gm, inputs, **kwargs))


def compile_fx_inner(
    gm: GraphModule, inputs: Sequence[Any], *, cuda_graphs: bool = False, **kwargs: Any
) -> Callable[..., Any]:
    """Inductor's code generation for one forward or backward graph.

    Args:
        cuda_graphs: record it as CUDA graphs. Where False, Inductor's own configuration says.
    """
    from torch._inductor.compile_fx import compile_fx_inner as implementation

    # Inductor's reordering for peak memory moves the start of every collective down to its wait, and what waits for a
    # refresh anywhere: nothing overlaps.
    config = torch._inductor.config
    ours = ("_c10d_functional", "muon_zero")
    sends = any(getattr(node.target, "namespace", "") in ours for node in gm.graph.nodes)
    # It keeps a buffer that nothing reads any more until one of its size is wanted, by an estimate of the peak that
    # takes what collectives and their copies hold for more: 2 to 5 percent above what is live. The allocator of GPUs
    # gives memory again for next to nothing; on CPUs it is pages to be mapped anew.
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    patches = {
        "allow_buffer_reuse": config.allow_buffer_reuse and not on_gpu,
        "reorder_for_peak_memory": config.reorder_for_peak_memory and not sends,
        "triton.cudagraphs": cuda_graphs or config.triton.cudagraphs,
    }
    with config.patch(patches):
        return implementation(gm, inputs, **kwargs)


def below_autograd(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled graph, boxed, whose operators are dispatched past autograd, which has traced them already.

    In torch 2.13 the kernels of functional collectives for autograd are in Python: 30 to 50 microseconds a call.
    """

    def call(args: list[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def in_compile_workers(function: Callable[[Any], Any] | None, arguments: Sequence[Any]) -> list[Future[Any]]:
    """``function`` of each of ``arguments`` in Inductor's worker processes; none where it has none, with one thread.

    Args:
        function, arguments: are pickled; the result comes back.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if function is None or not arguments or get_compile_threads() <= 1:
        return []
    try:
        AsyncCompile.use_process_pool()  # starts it
        pool = AsyncCompile.process_pool()
        return [pool.submit(function, argument) for argument in arguments]
    except RuntimeError:  # daemons may have no children, and a pool may have ended
        return []


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Around tensors that are no part of what is being traced or compiled."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def triton_cache(device: torch.device) -> Path:
    """Where Triton keeps kernels of ``device`` once Inductor has loaded one of its own there."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return Path(triton_cache_dir(device.index or 0))


def autograd_cache_disabled() -> contextlib.AbstractContextManager[None]:
    """Without the AOTAutograd cache: a hit would skip the partition function and the inner compiler."""
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)


def compiling_alone() -> contextlib.AbstractContextManager[Any]:
    """Dynamo's own lock: while graphs are traced PyTorch patches nn.Module, as a frame of another thread would see."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions: nodes added after AOTAutograd must already be decomposed."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


class Partitioner(CustomPartitionerFn):
    """A partition function as ``config.custom_partitioner_fn`` wants it; ``identity`` keys Inductor's caches."""

    def __init__(self, function: PartitionFunction | None, identity: bytes) -> None:
        self._function = function
        self._identity = identity

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        if self._function is None:
            raise RuntimeError("an unpickled partition function cannot run; it only keys caches")
        return self._function(gm, joint_inputs, **kwargs)

    def uuid(self) -> bytes:
        return self._identity

    def __reduce__(self) -> tuple[Any, ...]:
        # Inductor hashes its configuration by pickling it; what the function does is in the graphs themselves.
        return type(self), (None, self._identity)


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """How long a collective of ``group`` on ``device`` may take; None if the backend does not say."""
    try:
        return cast("timedelta", group._get_backend(device).options._timeout)
    except (AttributeError, RuntimeError):
        return None


def store_of(group: Any) -> torch.distributed.Store | None:
    """A connection of one's own to the store of ``group``, under the group's prefix; None if it cannot be shared."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    try:
        store: Any = _get_process_group_store(group)
        return cast("torch.distributed.Store", store.clone())
    except (AttributeError, KeyError, RuntimeError):  # stores in Python, and the fake group's, are not cloned
        return None


def group_named(name: str) -> torch.distributed.ProcessGroup:
    """The process group that functional collectives know by ``name``."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    resolve: Any = _resolve_process_group
    return cast("torch.distributed.ProcessGroup", resolve(name))


def another_group(group: Any, description: str, device: torch.device) -> torch.distributed.ProcessGroup:
    """A process group of the same ranks, backend and timeout; one for all calls with the same description.

    Every rank of ``group`` must call it, and no other.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    ranks = dist.get_process_group_ranks(group)
    for known in _world.pg_map:
        if known.group_desc == description and dist.get_process_group_ranks(known) == ranks:
            return known
    return dist.new_group(
        ranks,
        timeout=timeout_of(group, device),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
        group_desc=description,
    )


@contextlib.contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Inside this block the default process group is one of ``world`` ranks, whose collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # each group puts "[rank0]: " in front of a traceback, also when it is gone
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = hook


def flattened(mesh: DeviceMesh) -> torch.distributed.ProcessGroup:
    """The group of all ranks of a mesh of several dimensions, row-major; one for as many calls as there are."""
    return mesh._flatten().get_group()


def unflattened(mesh: DeviceMesh, dim: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The same ranks with one dimension as several."""
    if mesh.mesh_dim_names is None:  # torch names the new dimensions only beside others with names
        mesh = DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=("shard",))
    return mesh._unflatten(dim, sizes, names)


def expected_size(size: int | torch.SymInt) -> int:
    """A size as it was when the graph was traced; 0 where only the data say."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental import symbolic_shapes

    # torch 2.11 has the other name
    hint: Any = getattr(symbolic_shapes, "optimization_hint", None) or symbolic_shapes.hint_int  # type: ignore[attr-defined]
    return int(hint(size, 0))


def flop_formula(target: Any) -> Callable[..., Any] | None:
    """What ``torch.utils.flop_counter`` has for ``target``: a function of the arguments' values and ``out_val``."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(getattr(target, "overloadpacket", target))


#: of FlexAttention's arguments in Dynamo's graph, what its kernel is told
_FLEX_OPTIONS = 6


def is_flex_attention(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is FlexAttention, of ``(query, key, value, ...)``."""
    return node.target is torch.ops.higher_order.flex_attention


def flex_with_maxima(node: torch.fx.Node) -> bool:
    """Have FlexAttention's kernel make its third output: the largest logit of each row, in powers of two.

    Returns:
        Whether it can; FlashAttention's cannot.
    """
    options: Any = node.args[_FLEX_OPTIONS]
    if options["BACKEND"] == "FLASH":
        return False
    node.update_arg(_FLEX_OPTIONS, {**options, "OUTPUT_MAX": True})
    return True


def is_autograd_function(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is a ``torch.autograd.Function``."""
    return node.target is torch.ops.higher_order.autograd_function_apply


def is_from_local(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is ``DTensor.from_local``, the method in torch 2.13, its own function before."""
    return "from_local" in str(node.target)


def collective_failed(error: BaseException) -> bool:
    """Whether ``error`` is what torch raises for a collective that did not end, or could not be started."""
    if isinstance(error, torch.distributed.DistError):
        return True
    # Gloo raises plain RuntimeErrors, which name its source file or its operation.
    return type(error) is RuntimeError and any(word in str(error) for word in ("gloo/", "Gloo", "NCCL"))


def mark_for_backward(node: torch.fx.Node, *, save: bool) -> None:
    """Ask the partitioner to recompute ``node`` in backward, or to save it, or what follows from it (``save``)."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE
    # In a region, or before all of them, it would be saved for the regions behind that use it too.
    node.meta.pop("ac_graph_id", None)


def order_saved_values(forward: GraphModule, backward: GraphModule, user_outputs: int) -> None:
    """Order what forward saves for backward as AOTAutograd slices it, in place: tensors, opaque objects, symints.

    With activation checkpointing around an op that draws random numbers (scaled_dot_product_attention counts as one),
    the partitioner appends the generator's states behind the opaque objects among the saved values: behind the device
    mesh of DTensor parameters, from torch 2.12 or 2.13 on (to 2.11 a mesh is no value of a graph). AOTAutograd then
    takes the mesh for a tensor: "expected all tensors_saved_with_vc_check to be Tensors". Where nothing is out of
    place, nothing changes. Delete this, its call and its test once ``functionalize_rng_ops`` in
    ``torch/_functorch/partitioners.py`` puts its states before the opaque objects; in 2.15 it does not.

    Args:
        forward: returns its user outputs, then what is saved.
        backward: takes the saved symints, then the other saved values in the same order, then the tangents.
        user_outputs: how many of forward's outputs are not saved values.
    """
    output = forward.graph.output_node()
    outputs = list(output.args[0])
    saved = sorted(outputs[user_outputs:], key=_place_among_saved)
    if saved == outputs[user_outputs:]:
        return
    output.args = (tuple(outputs[:user_outputs] + saved),)
    taken = backward.graph.find_nodes(op="placeholder")[: len(saved)]
    tangents = taken[-1].next
    for node in sorted(taken, key=lambda node: (not is_sym_node(node), _place_among_saved(node))):
        tangents.prepend(node)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


def _place_among_saved(node: torch.fx.Node) -> int:
    """Tensors whose version is checked, other tensors, opaque objects, symints."""
    if is_sym_node(node):
        return 3
    if "val" in node.meta and not isinstance(node.meta["val"], torch.Tensor):
        return 2
    return int(node.meta.get("saved_tensor_with_no_vc_check", False))


def fake_mode_of(values: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """The fake mode of these fake tensors, as a context in which new tensors are fake too."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(values)) or contextlib.nullcontext()


def another_fake(
    value: torch.Tensor, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A fake tensor like ``value``, contiguous where ``shape`` is given, with memory of its own.

    It takes a fifth of the time of ``torch.empty_strided`` in the mode of ``value``.
    """
    from torch._subclasses import FakeTensor

    fake, dtype = cast("FakeTensor", value), dtype or value.dtype
    with without_modes():
        if shape is None:
            meta = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
        else:
            meta = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(fake.fake_mode, meta, value.device)


def of_constant_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Inside a backend: what stands for a tensor that Dynamo has not seen, and whose shape AOTAutograd would therefore
    take for one of many."""
    from torch._subclasses import FakeTensor

    context = torch._guards.TracingContext.try_get()
    if isinstance(tensor, FakeTensor) or context is None or context.fake_mode is None:
        return tensor
    return context.fake_mode.from_tensor(tensor, static_shapes=True)


def without_numbers() -> contextlib.AbstractContextManager[Any]:
    """Inside this block tensors have shapes and no numbers, and no memory; whoever looks at a number raises.

    Unlike those of the meta device they say so (``isinstance(x, FakeTensor)``), and Transformers looks at none then.
    """
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def accumulators_of(params: Iterable[torch.Tensor]) -> list[Any]:
    """The autograd nodes that write ``.grad`` of leaves; each stays the same while somebody holds it.

    None for what does not train: of a weight that was frozen later torch 2.11 compiles no other frame.

    Inside the backward of a function that has read a leaf, or its shard, it is among the next nodes: 1 microsecond. Of
    others it is found as :func:`torch.autograd.graph.get_gradient_edge` does, in 3 microseconds in place of 9.
    """
    under_way = torch._C._current_autograd_node()  # not what is said to be typed: None outside of a backward
    nodes = [] if under_way is None else _next_of(under_way)
    nodes += [further for node in nodes if not hasattr(node, "variable") for further in _next_of(node)]
    known = {id(node.variable): node for node in nodes if hasattr(node, "variable")}
    return [known.get(id(param)) or _accumulator(param) for param in params]


def _next_of(node: Any) -> list[Any]:
    return list(dict.fromkeys(further for further, _ in node.next_functions if further is not None))


def _accumulator(param: torch.Tensor) -> Any:
    # Found through a view, which a DTensor would dispatch: 26 microseconds.
    with torch.enable_grad(), torch._C._DisableTorchDispatch():
        view: Any = param.view_as(param).grad_fn
    return None if view is None else view.next_functions[0][0]


def will_execute(node: Any) -> bool:
    """Inside a backward: whether the engine will run ``node`` in it."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad() for this very leaf: its gradient is handed to the caller, not accumulated
        return False


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors use this tensor's memory, and some more: only differences mean anything."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Inside this block no dispatch mode or tensor subclass sees what is computed, nor does autograd."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def transforming() -> bool:
    """Whether ``torch.func`` transforms what is computed: grad, jvp, vmap and their kind."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Inside this block no ``torch.func`` transform sees what is computed: it is a constant to all of them."""
    if not transforming():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return cast("contextlib.AbstractContextManager[object]", temporarily_clear_interpreter_stack())


def profiler_enabled() -> bool:
    """Whether torch.profiler records on this thread: a tenth of a microsecond, a ``record_function`` is several."""
    return bool(torch.autograd._profiler_enabled())


#: registrations end with it
_PROFILER = torch.library.Library("profiler", "FRAGMENT")


def unrecorded_op(overload: str, arguments: str, function: Callable[..., None]) -> torch._ops.OpOverload:
    """An op without results of which torch.profiler makes no event, and which is run between CUDA graphs, not in them.

    A range that one op opens and another one closes lies across both: viewers drop events that overlap and do not nest.
    PyTorch records no overload of the names in its list of unobserved ones, ``profiler::_record_function_enter`` among
    them.

    Args:
        overload: its name.
        arguments: of its schema.
        function: what it does, on every device; nothing for fake tensors.
    """
    name = f"_record_function_enter.{overload}"
    _PROFILER.define(f"{name}({arguments}) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
    _PROFILER.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"profiler::{name}", lambda *args: None, lib=_PROFILER)
    return cast("torch._ops.OpOverload", getattr(torch.ops.profiler._record_function_enter, overload))


def current_backward() -> int:
    """A number for the backward call under way on this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def never_a_frame(function: Any, *, below: bool = True) -> None:
    """Have Dynamo leave alone ``function`` where code that is not compiled calls it.

    Frames that are compiled inline it still, where ``torch.compiler.disable`` would break their graphs.

    Args:
        below: and what it calls.
    """
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    beneath = FrameAction.SKIP if below else FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, beneath))


def compiled_as_frame(function: Any) -> bool:
    """Whether Dynamo takes ``function`` for a frame where code that is not compiled calls it: not torch.nn's own."""
    from torch._dynamo import trace_rules

    return not trace_rules.check(function)


def compiled_autograd_active() -> bool:
    """Whether backward would be captured by compiled autograd, which bypasses the compiled backward callables."""
    from torch._dynamo import compiled_autograd

    return bool(
        getattr(compiled_autograd, "compiled_autograd_enabled", False)
        or getattr(torch._dynamo.config, "compiled_autograd", False)
    )


def lacks_sharding(error: RuntimeError) -> bool:
    """Whether an operator has no way to compute with these DTensors."""
    return isinstance(error, NotImplementedError) or any(x in str(error) for x in ("DTensor", "Sharding propagation"))


def meets_plain_tensor(error: RuntimeError) -> bool:
    """Whether an operator refuses a DTensor beside a tensor that is none."""
    return "mixed torch.Tensor and DTensor" in str(error)


def being_compiled() -> bool:
    """Whether a frame is being compiled: Dynamo then looks at tensors itself, as user code would."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Hand a readable graph to TORCH_TRACE / tlparse; ``text`` is called only if one of them listens."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


class SavedContext:
    """The ambient compile state, captured when a graph is built so that a variant of it can be compiled later."""

    def __init__(self) -> None:
        from torch._guards import TracingContext
        from torch._inductor.virtualized import V

        self._tracing = TracingContext.try_get()
        fake_mode = V.get_fake_mode()
        self._fake_mode = fake_mode if isinstance(fake_mode, torch._subclasses.FakeTensorMode) else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside this block, compilation sees what it saw when the object was made."""
        from torch._guards import tracing
        from torch._inductor.virtualized import V

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._DisableAutocast())
            if self._tracing is not None:
                stack.enter_context(tracing(self._tracing))
            if self._fake_mode is not None:
                stack.enter_context(V.set_fake_mode(self._fake_mode))
            yield


@contextlib.contextmanager
def fresh_context(fake_mode: Any) -> Iterator[None]:
    """Inside this block, graphs of ``fake_mode``'s tensors can be traced and compiled on their own."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    with torch._C._DisableAutocast(), tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), torch.no_grad():
        yield
