"""The torch.compile backend: ``torch.compile(model, backend="muon_zero")``.

Passes over Dynamo's graph come first, then Inductor's pipeline with three replaced parts: the partition function (joint
passes, then PyTorch's min-cut partitioner), and the inner compilers of forward and backward graphs (lowering passes,
then Inductor's code generation, or none under ``options={"codegen": "eager"}``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from compile_muon.agreement.status import holder_of_all
from compile_muon.config import FrameOptions, read_options
from compile_muon.engine.dtensor_parameter import ShardedParameter, meets_plain
from compile_muon.engine.dtensors import edits_of, local_tensor
from compile_muon.engine.forwards import written_in_forward
from compile_muon.engine.frame import BackwardGraph, ForwardGraph, Lowering, eager_codegen, lower_and_compile
from compile_muon.engine.local import locals_of
from compile_muon.engine.other_holders import refuse_stale
from compile_muon.engine.persistent import PersistentForward
from compile_muon.engine.sharded_param import ShardedParam, sharded_param_of
from compile_muon.errors import ConfigError, listed, warn_user
from compile_muon.passes import (
    DYNAMO_PASSES,
    JOINT_PASSES,
    LOWERING_PASSES,
    GraphKind,
    PassContext,
    keep_weights,
    move_activations,
    persistent_weights,
    run_passes,
    saved_by,
    torch_private,
)
from compile_muon.passes.costs import Costs
from compile_muon.passes.dynamo.local_inputs import called
from compile_muon.passes.markers import UNSHARD, ReduceGrad
from compile_muon.passes.torch_private import NoCompilerError, order_saved_values
from compile_muon.progress import compiling

#: of the partitioner in Inductor's cache keys: another list of passes makes other graphs
_IDENTITY = f"muon_zero {GraphKind.__module__} {[p.name for p in (*JOINT_PASSES, *LOWERING_PASSES)]}".encode()


_UNSHARDS = (UNSHARD, torch.ops.muon_zero.unshard)


def _has_markers(gm: GraphModule) -> bool:
    graphs = (m for m in gm.modules() if isinstance(m, GraphModule))
    return any(node.target in _UNSHARDS for sub in graphs for node in sub.graph.nodes)


def _check_writes(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Refuse a frame that writes to a gathered weight, since no parameter would see the edit. Dynamo has run the frame
    on fake tensors, whose version counters show writes."""
    name_of = {
        node: sharded.name
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False)
        if (sharded := sharded_param_of(value)) is not None
    }
    written_names: dict[str, None] = {}
    for sub in (m for m in gm.modules() if isinstance(m, GraphModule)):
        values = {n: v for n in sub.graph.nodes if isinstance(v := n.meta.get("example_value"), Tensor)}
        edited_memory = {_memory(value) for value in values.values() if edits_of(value)}
        for node in values:
            if node.target in _UNSHARDS and _memory(values[node]) in edited_memory:
                state = node.args[1]
                written_names[name_of.get(state, str(state))] = None
    if written_names:
        raise written_in_forward(list(written_names))


def _read_as_shards(gm: GraphModule, inputs: Sequence[Any]) -> list[str]:
    """Return parameters that a frame reads through ``self.parameters()`` or ``self._parameters``."""
    reads = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False)
    values = [value for node, value in reads if any("to_local" not in called(user) for user in node.users)]
    return [value.origin[0] for value in values if isinstance(value, ShardedParameter) and value.origin is not None]


def _memory(value: Tensor) -> int:
    return local_tensor(value).untyped_storage()._cdata


class _Frame:
    """The compilation of one frame; lives as long as its compiled code."""

    def __init__(self, options: FrameOptions, name: str, costs: Costs, sharded_params: Sequence[ShardedParam]) -> None:
        self.options = options
        self.ctx = PassContext(GraphKind.JOINT, name, options, costs)
        self.sharded_params = sharded_params
        self.trained: frozenset[str] = frozenset()
        self.persistent: frozenset[str] = frozenset()  # names of saved values that outlive backward

    def partition(
        self, gm: GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Rewrite and partition the joint graph; PyTorch calls this only for a frame with a backward."""
        self.ctx.user_outputs = num_fwd_outputs

        def halves(gm: GraphModule, ctx: PassContext) -> tuple[GraphModule, GraphModule]:
            gm = run_passes(gm, JOINT_PASSES, ctx)
            self.trained = frozenset(marker.state.name for marker in ReduceGrad.all(gm))
            with torch_private.activation_budget(ctx.kept.activations):
                forward, backward = min_cut_rematerialization_partition(
                    gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
                )
            order_saved_values(forward, backward, num_fwd_outputs)
            return forward, backward

        memory = self.sharded_params[0].ledger.memory if self.sharded_params else None
        if self.options.memory is not None and memory is not None:
            self.ctx.chosen = memory.fit(gm, halves, self.ctx, self.options, self.sharded_params)
        forward, backward = halves(gm, self.ctx)
        move_activations(forward, backward, num_fwd_outputs, self.ctx.kept.moved)
        persistent = persistent_weights(forward, self.ctx)
        self.persistent = frozenset(read.node.name for read in persistent.values())
        self.ctx.saved = saved_by(forward, num_fwd_outputs, persistent)
        return forward, backward

    def forward(
        self, gm: GraphModule, inputs: Sequence[Any], lowering: Lowering, *, inference: bool = False
    ) -> Callable[[list[Any]], Any]:
        """Compile a forward or inference graph."""
        kind = GraphKind.INFERENCE if inference else GraphKind.FORWARD
        ctx = replace(self.ctx, kind=kind, timings={})
        if not inference and self.persistent:
            return PersistentForward(gm, inputs, ctx, lowering, self.options, self.trained)
        return ForwardGraph(gm, inputs, ctx, lowering, self.options, frozenset() if inference else self.trained)

    def backward(self, gm: GraphModule, inputs: Sequence[Any], lowering: Lowering) -> Callable[[list[Any]], Any]:
        """Wrap a backward graph; its lowerings are compiled when they are first needed."""
        keep_weights(gm, self.persistent)
        return BackwardGraph(gm, inputs, replace(self.ctx, kind=GraphKind.BACKWARD), lowering)


def _compile_inductor(
    gm: GraphModule, inputs: Sequence[Any], frame: _Frame, lowering: Lowering | None
) -> Callable[..., Any]:
    def inner(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[[list[Any]], Any]:
        def codegen(gm: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            code = torch_private.compile_fx_inner(gm, inputs, cuda_graphs=frame.options.cuda_graphs, **kwargs)
            return code if getattr(code, "_boxed_call", False) else make_boxed_func(code)

        lowers = lowering or partial(lower_and_compile, codegen=codegen)
        if kwargs.get("is_backward"):
            return frame.backward(gm, inputs, lowers)
        return frame.forward(gm, inputs, lowers, inference=bool(kwargs.get("is_inference")))

    # `custom_partitioner_fn` is a private setting of Inductor's.
    patches: dict[str, Any] = {"custom_partitioner_fn": torch_private.Partitioner(frame.partition, _IDENTITY)}
    if frame.options.cuda_graphs:
        patches["triton.cudagraphs"] = True
    with torch_private.autograd_cache_disabled():
        return torch_private.compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)


def _compile_eager(
    gm: GraphModule, inputs: Sequence[Any], frame: _Frame, lowering: Lowering | None
) -> Callable[..., Any]:
    lowers = lowering or partial(lower_and_compile, codegen=eager_codegen)
    forward = partial(frame.forward, lowering=lowers)
    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=partial(frame.backward, lowering=lowers),
        inference_compiler=partial(forward, inference=True),
        partition_fn=frame.partition,
        decompositions={},
    )
    with torch_private.autograd_cache_disabled():
        return compiler(gm, inputs)


def muon_zero(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo frame; the entry point behind ``backend="muon_zero"``.

    ``options``: fields of :class:`compile_muon.config.CompileOptions`. ``mode`` "reduce-overhead" stands for
    ``options={"cuda_graphs": True}``; else Inductor's own configuration applies.

    Raises:
        ConfigError: about every unknown option and bad value.
        UnsupportedModelError: the frame writes to a weight, or reads one as it was before it was sharded.
        NoCompilerError: Inductor finds no C++ compiler.
    """
    if mode not in (None, "default", "reduce-overhead"):
        problem = 'muon_zero has no mode but "reduce-overhead"; set torch._inductor.config instead'
        raise ConfigError(f"mode = {mode!r}: {problem}")
    refuse_stale(example_inputs)
    frame_options = read_options(({"cuda_graphs": True} if mode == "reduce-overhead" else {}) | dict(options or {}))
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    if frame_options.cuda_graphs and tensors and all(value.device.type == "cpu" for value in tensors):
        warn_user("cuda_graphs = True: there are none on a CPU, and nothing is recorded; leave it out")
    if not _has_markers(gm) and any(isinstance(x, nn.Parameter) for x in example_inputs):
        warn_user(
            'backend="muon_zero" compiles a model that was never sharded, as plain Inductor would; '
            "call compile_muon.MuonZero(model, ...) or compile_muon.initialize(model, config) first"
        )
    _check_writes(gm, example_inputs)
    try:
        names = [sharded.name for x in example_inputs if (sharded := sharded_param_of(x)) is not None]
        with compiling(f"a frame{holder_of_all(names)}"):
            return compile_frame(gm, example_inputs, frame_options)
    except Exception as error:  # Inductor wraps exceptions in a class of its own
        if isinstance(error, RuntimeError) and torch_private.meets_plain_tensor(error):
            raise meets_plain(listed(_read_as_shards(gm, example_inputs)), "a compiled frame") from error
        if (missing := torch_private.lacks_compiler(error)) is None:
            raise
        raise NoCompilerError(missing) from error


def compile_frame(
    gm: GraphModule, example_inputs: Sequence[Any], options: FrameOptions, lowering: Lowering | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo frame with parsed options. ``lowering`` lowers and compiles forward and backward graphs; None
    for the one that ``options.codegen`` names."""
    sharded_params = [sharded for sharded in map(sharded_param_of, example_inputs) if sharded is not None]
    ledgers = list(dict.fromkeys(sharded.ledger for sharded in sharded_params))
    costs = ledgers[0].costs if ledgers else Costs()
    ctx = PassContext(GraphKind.DYNAMO, f"frame{next(_frame_numbers):04d}", options, costs)
    # By name: a frame may have parameters of two optimizers with the same extension, whose passes run once.
    extension_passes = {graph_pass.name: graph_pass for ledger in ledgers for graph_pass in ledger.hooks.dynamo_passes}
    first, *later = DYNAMO_PASSES
    gm = run_passes(gm, (first, *extension_passes.values(), *later), ctx)
    inputs = _with_shards(example_inputs, ctx.shards) if ctx.shards else list(example_inputs)
    for place in ctx.shards:
        inputs[place] = torch_private.of_constant_shape(inputs[place])
    compile_ = _compile_eager if options.codegen == "eager" else _compile_inductor
    frame = _Frame(options, ctx.frame, costs, sharded_params)
    run = compile_(gm, inputs, frame, lowering)
    frame.sharded_params = ()  # the graphs are partitioned; Dynamo keeps the code, and would keep the model
    return (lambda *args: run(*_with_shards(args, ctx.shards))) if ctx.shards else run


def _with_shards(args: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return ``args`` with the DTensors at ``places`` replaced by their local shards."""
    inputs = list(args)
    for place, shard in zip(places, locals_of([args[place] for place in places]), strict=True):
        inputs[place] = shard
    return inputs


#: numbers of frames, in names of dumps alone
_frame_numbers = itertools.count()
