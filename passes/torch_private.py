"""Every non-public torch API that this library uses.

``tests/passes/test_torch_private.py`` tells which of them changed in a new torch. Nothing here patches torch beyond the
``with`` block of a documented ``config.patch``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from inspect import currentframe
from pathlib import Path
from typing import Any, cast

import torch
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InvalidCxxCompiler
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from .errors import MuonZeroError

#: whether torch is older than 2.13
BEFORE_2_13 = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


class NoCompilerError(MuonZeroError, ShortenTraceback):
    """There is no C++ compiler for Inductor; raised without the 80 lines of traceback of ``inner_exception``."""

    def __init__(self, inner_exception: Exception) -> None:
        said = str(inner_exception).partition("\n")[0]
        remedy = "`python -m compile_muon doctor` says what to install"
        super().__init__(f"torch.compile needs a C++ compiler: {said}; {remedy}", first_useful_frame=currentframe())
        self.inner_exception = inner_exception

    def remove_dynamo_frames(self) -> NoCompilerError:
        """Drop the traceback. ``ShortenTraceback`` would keep the frames of the backend."""
        return self.with_traceback(None)


def lacks_compiler(error: BaseException) -> Exception | None:
    """Return Inductor's error for a missing C++ compiler, if ``error`` is or wraps one."""
    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error if isinstance(error, InvalidCxxCompiler) else None


def compile_fx(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Run Inductor's graph compiler, joint passes and AOTAutograd included."""
    from torch._inductor.compile_fx import compile_fx as implementation

    return cast("Callable[..., Any]", implementation(gm, inputs, **kwargs))


def compile_fx_inner(
    gm: GraphModule, inputs: Sequence[Any], *, cuda_graphs: bool = False, **kwargs: Any
) -> Callable[..., Any]:
    """Run Inductor's code generation for one graph; without ``cuda_graphs`` its own configuration decides on them."""
    from torch._inductor.compile_fx import compile_fx_inner as implementation

    # Inductor's reordering for peak memory moves the start of every collective down to its wait, and waits for a
    # refresh anywhere, so that nothing overlaps.
    config = torch._inductor.config
    ours = ("_c10d_functional", "muon_zero")
    sends = any(getattr(node.target, "namespace", "") in ours for node in gm.graph.nodes)
    # Inductor's buffer reuse keeps dead buffers for later ones of the same size. Its estimate of the peak counts too
    # much for collectives and their copies, which costs 2 to 5 percent above live memory. Allocation is almost free on
    # GPUs; on CPUs it maps new pages, so buffers are reused there.
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    patches = {
        "allow_buffer_reuse": config.allow_buffer_reuse and not on_gpu,
        "reorder_for_peak_memory": config.reorder_for_peak_memory and not sends,
        "triton.cudagraphs": cuda_graphs or config.triton.cudagraphs,
    }
    with config.patch(patches):
        return implementation(gm, inputs, **kwargs)


def below_autograd(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a compiled graph, boxed, whose operators are dispatched below autograd, which has traced them already."""

    def call(args: list[Any]) -> Any:
        # In torch 2.13 the autograd kernels of functional collectives are in Python: 30 to 50 microseconds a call.
        with torch._C._AutoDispatchBelowAutograd():
            return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def in_compile_workers(function: Callable[[Any], Any] | None, arguments: Sequence[Any]) -> list[Future[Any]]:
    """Run ``function`` for each argument in Inductor's worker processes (by pickle); no futures without workers."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if function is None or not arguments or get_compile_threads() <= 1:
        return []
    try:
        AsyncCompile.use_process_pool()  # starts it
        pool = AsyncCompile.process_pool()
        return [pool.submit(function, argument) for argument in arguments]
    except RuntimeError:  # daemonic processes may not start workers, and the pool may be shut down
        return []


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context outside of all dispatch modes, for tensors that are not traced or compiled."""
    return _disable_current_modes()


def triton_cache(device: torch.device) -> Path:
    """Return the folder of Triton's cache for ``device``, as Inductor sets it when it loads a kernel."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return Path(triton_cache_dir(device.index or 0))


def autograd_cache_disabled() -> contextlib.AbstractContextManager[None]:
    """Disable the AOTAutograd cache: a hit would skip the partition function and the inner compiler."""
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)


def activation_budget(part: float) -> contextlib.AbstractContextManager[None]:
    """Let the partitioner save this part of what it saves by default; 1 for what its configuration says."""
    from torch._functorch import config

    return contextlib.nullcontext() if part == 1 else config.patch(activation_memory_budget=part)


def compiling_alone() -> contextlib.AbstractContextManager[Any]:
    """Return Dynamo's lock: while it traces, PyTorch patches nn.Module, which frames of other threads would see."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions: nodes added after AOTAutograd must already be decomposed."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


class Partitioner(CustomPartitionerFn):
    """A partition function for ``config.custom_partitioner_fn``; ``identity`` keys Inductor's caches."""

    def __init__(self, function: Callable[..., tuple[GraphModule, GraphModule]] | None, identity: bytes) -> None:
        self._function = function
        self._identity = identity

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        if self._function is None:
            raise RuntimeError("an unpickled partition function cannot run; it only keys caches")
        return self._function(gm, joint_inputs, **kwargs)

    def uuid(self) -> bytes:
        return self._identity

    def __reduce__(self) -> tuple[Any, ...]:
        # Inductor hashes its configuration by pickling it; the graphs contain what the function did.
        return type(self), (None, self._identity)


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return the timeout of collectives of ``group`` on ``device``; None if the backend does not tell."""
    try:
        return cast("timedelta", group._get_backend(device).options._timeout)
    except (AttributeError, RuntimeError):
        return None


def store_of(group: Any) -> torch.distributed.Store | None:
    """Return a new connection to the store of ``group``, with its prefix; None if the store cannot be cloned."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    try:
        store: Any = _get_process_group_store(group)
        return cast("torch.distributed.Store", store.clone())
    except (AttributeError, KeyError, RuntimeError):  # stores in Python, and the fake group's, have no clone
        return None


def group_named(name: str) -> torch.distributed.ProcessGroup:
    """Return the process group that functional collectives know by ``name``."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    resolve: Any = _resolve_process_group
    return cast("torch.distributed.ProcessGroup", resolve(name))


def another_group(group: Any, description: str, device: torch.device) -> torch.distributed.ProcessGroup:
    """Return a process group of the same ranks, backend and timeout, one for each ``description``. Every rank of
    ``group`` has to call this, and no other."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    ranks = dist.get_process_group_ranks(group)
    for existing in _world.pg_map:
        if existing.group_desc == description and dist.get_process_group_ranks(existing) == ranks:
            return existing
    return dist.new_group(
        ranks,
        timeout=timeout_of(group, device),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
        group_desc=description,
    )


@contextlib.contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Make the default process group a fake one of ``world`` ranks within the block; its collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # init_process_group installs a hook that prefixes tracebacks with "[rank0]: ", and never removes it.
    hook = sys.excepthook
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = hook


def flattened(mesh: DeviceMesh) -> torch.distributed.ProcessGroup:
    """Return the group of all ranks of a mesh of several dimensions, row-major; DeviceMesh caches it."""
    return mesh._flatten().get_group()


def unflattened(mesh: DeviceMesh, dim: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of the same ranks with dimension ``dim`` as several."""
    if mesh.mesh_dim_names is None:  # _unflatten drops ``names`` if the mesh has none
        mesh = DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=("shard",))
    return mesh._unflatten(dim, sizes, names)


def expected_size(size: int | torch.SymInt) -> int:
    """Return a size as a number, as it was in tracing; 0 for a data-dependent one."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental import symbolic_shapes

    # torch 2.11 calls it hint_int
    hint: Any = getattr(symbolic_shapes, "optimization_hint", None) or symbolic_shapes.hint_int  # type: ignore[attr-defined]
    return int(hint(size, 0))


def flop_formula(target: Any) -> Callable[..., Any] | None:
    """Return the formula of ``torch.utils.flop_counter`` for ``target``, of the arguments' values and ``out_val``."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(getattr(target, "overloadpacket", target))


#: index of the kernel options among FlexAttention's arguments in Dynamo's graph
_FLEX_OPTIONS = 6


def is_flex_attention(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is FlexAttention, called with ``(query, key, value, ...)``."""
    return node.target is torch.ops.higher_order.flex_attention


def flex_with_maxima(node: torch.fx.Node) -> bool:
    """Let FlexAttention's kernel return its third output, each row's largest logit in base 2; False if it cannot."""
    options: Any = node.args[_FLEX_OPTIONS]
    if options["BACKEND"] == "FLASH":  # FlashAttention's kernel has no such output
        return False
    node.update_arg(_FLEX_OPTIONS, {**options, "OUTPUT_MAX": True})
    return True


def is_autograd_function(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is a ``torch.autograd.Function``."""
    return node.target is torch.ops.higher_order.autograd_function_apply


def is_from_local(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is ``DTensor.from_local``: a method in torch 2.13, Dynamo's function before."""
    return "from_local" in str(node.target)


def collective_failed(error: BaseException) -> bool:
    """Whether ``error`` is torch's error for a collective that did not finish or could not start."""
    if isinstance(error, torch.distributed.DistError):
        return True
    # Gloo raises plain RuntimeErrors, whose text names its source file or operation.
    return type(error) is RuntimeError and any(word in str(error) for word in ("gloo/", "Gloo", "NCCL"))


def mark_for_backward(node: torch.fx.Node, *, save: bool) -> None:
    """Let the partitioner recompute ``node`` in backward, or with ``save`` keep it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE
    # With a checkpoint region's id, the partitioner would also save it for later regions that read it.
    node.meta.pop("ac_graph_id", None)


def keep_undonated(places: Collection[int]) -> None:
    """Forbid Inductor to reuse the memory of these inputs of the backward graph that is being compiled."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        donated = context.fw_metadata.bw_donated_idxs or ()
        context.fw_metadata.bw_donated_idxs = [place for place in donated if place not in places]


def order_saved_values(forward: GraphModule, backward: GraphModule, user_outputs: int) -> None:
    """Order the values that forward saves for backward as AOTAutograd slices them: tensors, opaque objects, symints.

    With activation checkpointing around an op that draws random numbers (scaled_dot_product_attention counts as one),
    the partitioner appends the generator's states behind the opaque objects among the saved values: behind the device
    mesh of DTensor parameters, from torch 2.12 or 2.13 on (to 2.11 a mesh is no value of a graph). AOTAutograd then
    takes the mesh for a tensor: "expected all tensors_saved_with_vc_check to be Tensors". Where nothing is out of
    place, nothing changes. Delete this, its call and its test once ``functionalize_rng_ops`` in
    ``torch/_functorch/partitioners.py`` puts its states before the opaque objects; in 2.15 it does not.

    ``forward`` returns ``user_outputs`` outputs of the user, then saved values. ``backward`` takes saved symints, then
    the other saved values in the same order, then tangents. Both are changed in place.
    """
    output = forward.graph.output_node()
    outputs = list(output.args[0])
    saved = sorted(outputs[user_outputs:], key=_place_among_saved)
    if saved == outputs[user_outputs:]:
        return
    output.args = (tuple(outputs[:user_outputs] + saved),)
    saved_inputs = backward.graph.find_nodes(op="placeholder")[: len(saved)]
    tangents = saved_inputs[-1].next
    for node in sorted(saved_inputs, key=lambda node: (not is_sym_node(node), _place_among_saved(node))):
        tangents.prepend(node)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


def _place_among_saved(node: torch.fx.Node) -> int:
    """Rank of a saved value: tensors whose version is checked, other tensors, opaque objects, symints."""
    if is_sym_node(node):
        return 3
    if "val" in node.meta and not isinstance(node.meta["val"], torch.Tensor):
        return 2
    return int(node.meta.get("saved_tensor_with_no_vc_check", False))


def fake_mode_of(values: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return the fake mode of these fake tensors, as a context in which new tensors are fake too."""
    return detect_fake_mode(list(values)) or contextlib.nullcontext()


def another_fake(
    value: torch.Tensor, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a fake tensor like ``value``, contiguous where ``shape`` is given, with memory of its own."""
    # A fifth of the time of ``torch.empty_strided`` in the mode of ``value``.
    fake, dtype = cast(FakeTensor, value), dtype or value.dtype
    with without_modes():
        if shape is None:
            meta = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
        else:
            meta = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(fake.fake_mode, meta, value.device)


def of_constant_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Return, inside a backend, a stand-in for a tensor new to Dynamo, whose shape would otherwise be dynamic."""
    context = TracingContext.try_get()
    if isinstance(tensor, FakeTensor) or context is None or context.fake_mode is None:
        return tensor
    return context.fake_mode.from_tensor(tensor, static_shapes=True)


def without_numbers() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors have shapes but neither values nor memory; reading a value raises."""
    # Unlike meta tensors these can be told apart (``isinstance(x, FakeTensor)``), so that Transformers reads no values.
    return FakeTensorMode(allow_non_fake_inputs=True)


def accumulators_of(params: Iterable[torch.Tensor]) -> list[Any]:
    """Return the autograd nodes that write ``.grad`` of leaves; a node stays the same while somebody holds it.

    None for a tensor that does not train: torch 2.11 compiles no other frame for a weight that was frozen later.

    Inside the backward of a function that read a leaf, or its shard, the node is among the next ones: 1 microsecond.
    Others are found as :func:`torch.autograd.graph.get_gradient_edge` does, in 3 microseconds in place of 9.
    """
    current_node = torch._C._current_autograd_node()  # None outside of a backward, unlike its annotation
    nodes = [] if current_node is None else _next_of(current_node)
    nodes += [further for node in nodes if not hasattr(node, "variable") for further in _next_of(node)]
    node_of_leaf = {id(node.variable): node for node in nodes if hasattr(node, "variable")}
    return [node_of_leaf.get(id(param)) or _accumulator(param) for param in params]


def _next_of(node: Any) -> list[Any]:
    return list(dict.fromkeys(further for further, _ in node.next_functions if further is not None))


def _accumulator(param: torch.Tensor) -> Any:
    # Through a view; without dispatch, which takes a DTensor 26 microseconds.
    with torch.enable_grad(), torch._C._DisableTorchDispatch():
        view: Any = param.view_as(param).grad_fn
    return None if view is None else view.next_functions[0][0]


def will_execute(node: Any) -> bool:
    """Whether the engine will run ``node`` in the current backward."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad() for this leaf: its gradient goes to the caller and is not accumulated
        return False


def storage_holders(tensor: torch.Tensor) -> int:
    """Reference count of the tensor's storage, with an unknown offset: only differences mean anything."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide computations in the block from dispatch modes, tensor subclasses and autograd."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Return a context that hides computations from ``torch.func`` transforms: results are constants to them."""
    if torch._C._functorch.peek_interpreter_stack() is None:  # none is active
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return cast("contextlib.AbstractContextManager[object]", temporarily_clear_interpreter_stack())


def profiler_enabled() -> bool:
    """Whether torch.profiler records on this thread: 0.1 microseconds, while a ``record_function`` takes several."""
    return bool(torch.autograd._profiler_enabled())


#: operators are unregistered when this object is freed
_PROFILER = torch.library.Library("profiler", "FRAGMENT")


def unrecorded_op(overload: str, arguments: str, function: Callable[..., None]) -> torch._ops.OpOverload:
    """Register an op without results that torch.profiler does not record, and that runs between CUDA graphs.

    A range that one op opens and another closes would overlap the events of both ops, and viewers drop events that
    overlap without nesting. PyTorch records no overloads of the names in its list of unobserved ones, such as
    ``profiler::_record_function_enter``. ``arguments`` are those of the schema. ``function`` runs on every device, not
    for fake tensors.
    """
    name = f"_record_function_enter.{overload}"
    _PROFILER.define(f"{name}({arguments}) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
    _PROFILER.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"profiler::{name}", lambda *args: None, lib=_PROFILER)
    return cast("torch._ops.OpOverload", getattr(torch.ops.profiler._record_function_enter, overload))


def current_backward() -> int:
    """Return the id of the current backward call on this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def never_a_frame(function: Any, *, below: bool = True) -> None:
    """Keep Dynamo from compiling ``function``, and with ``below`` all it calls, as a frame. Compiled frames still
    inline it, where ``torch.compiler.disable`` would break their graphs."""
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    beneath = FrameAction.SKIP if below else FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, beneath))


def compiled_as_frame(function: Any) -> bool:
    """Whether Dynamo compiles ``function`` as a frame when uncompiled code calls it; false for torch.nn's own."""
    from torch._dynamo import trace_rules

    return not trace_rules.check(function)


def compiled_autograd_active() -> bool:
    """Whether compiled autograd would capture backward, and so bypass the compiled backward callables."""
    from torch._dynamo import compiled_autograd

    return bool(
        getattr(compiled_autograd, "compiled_autograd_enabled", False)
        or getattr(torch._dynamo.config, "compiled_autograd", False)
    )


def inductor_cache() -> str:
    """The folder of what Inductor has compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def lacks_sharding(error: Exception) -> bool:
    """Whether an operator has no sharding rule for these DTensors."""
    return isinstance(error, NotImplementedError) or any(x in str(error) for x in ("DTensor", "Sharding propagation"))


def meets_plain_tensor(error: Exception) -> bool:
    """Whether an operator refuses to mix a DTensor and a plain tensor."""
    return "mixed torch.Tensor and DTensor" in str(error)


def dispatch_through_python(subclass: Any) -> None:
    """Pass operators on a subclass of DTensor to its ``__torch_dispatch__``, which torch before 2.13 does not call.

    Rules of :func:`torch.library.register_torch_dispatch` come ahead of DTensor's dispatch in C++. The registry below
    that function takes one in a third of the time.
    """
    from torch._library.simple_registry import singleton

    for name in torch._C._dispatch_get_all_op_names() if BEFORE_2_13 else ():
        singleton.find(name).torch_dispatch_rules.register(subclass, subclass.__torch_dispatch__.__func__)


def partial_first(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
    """Return an operator and arguments of the same result, with a partial DTensor ahead of a whole value.

    Before torch 2.13 the first operand of add, sub and mul places their result: a plain loss plus a partial penalty
    would differ between ranks and count as equal on them.
    """
    add, sub, mul = torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor
    if not BEFORE_2_13 or kwargs or func not in (add, sub, mul) or _partial(args[0]) or not _partial(args[1]):
        return func, args
    return (add, (-args[1], args[0])) if func is sub else (func, (args[1], args[0]))


def _partial(value: Any) -> bool:
    return isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements)


def being_compiled() -> bool:
    """Whether a frame is being compiled: then Dynamo itself reads tensors, as user code would."""
    return TracingContext.try_get() is not None


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Pass a readable graph to TORCH_TRACE / tlparse; ``text`` is called only if either listens."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


class SavedContext:
    """The ambient compile state when a graph is built, for compiling a variant of the graph later."""

    def __init__(self) -> None:
        from torch._inductor.virtualized import V

        self._tracing = TracingContext.try_get()
        fake_mode = V.get_fake_mode()
        self._fake_mode = fake_mode if isinstance(fake_mode, FakeTensorMode) else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state within the block."""
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
    """Trace and compile graphs of ``fake_mode``'s tensors separately within the block."""
    from torch._inductor.virtualized import V

    with torch._C._DisableAutocast(), tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), torch.no_grad():
        yield
