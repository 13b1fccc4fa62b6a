"""Trace a model once; every stage, mesh and algorithm is lowered from that one trace.

Tracing takes most of the time of a capture, and its result hardly depends on the ranks: a parameter stands in the
graphs as a shard, a state and the specs of its markers. So the model is traced sharded over two ranks at stage 1, where
a marker has every input that any stage has. Then the specs of another sharding replace those of the markers, the shapes
of its shards those of the inputs, and the lowering passes run. The result equals that of
:func:`~.capture.capture_step`. The number of ranks that share a sequence is part of every shape in a graph, so each
such number needs its own trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from compile_muon.config import Config, FrameOptions, SequenceParallelConfig
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.memory import BudgetError
from compile_muon.optimizer import MuonZero
from compile_muon.passes import LOWERING_PASSES, BackwardRequest, Purpose, run_passes
from compile_muon.passes.collectives import collectives
from compile_muon.passes.costs import Costs, owned_work
from compile_muon.passes.exchange.owner import assign_owners
from compile_muon.passes.exchange.shares import by_parameter, shares
from compile_muon.passes.language.spec import ParamSpec
from compile_muon.passes.lowering.buckets import bucket_matrices
from compile_muon.passes.markers import ReduceGrad, Unshard
from compile_muon.passes.pipeline import tensor_value
from compile_muon.passes.torch_private import fake_mode_of, fresh_context
from compile_muon.planning.capture import Captured, capture_step, captured, run_micro_batches, shard, simulated_job
from compile_muon.planning.recorder import Visit
from compile_muon.simulate import SimulatedGraph


@dataclass(frozen=True)
class Target:
    """The sharding that a trace is lowered for."""

    world: int  # ranks of the job
    # differs from the traced one in stage, mesh and algorithm only; the same number of ranks share a sequence
    config: Config
    axes: Mapping[str, int]  # sizes of mesh dimensions, as for :func:`~.capture.capture_step`
    backend: str  # that the ranks communicate by


@dataclass(frozen=True)
class Trace:
    """The graphs of a step ahead of lowering, and how to build the model again; made by :func:`trace_step`."""

    model_factory: Callable[[], nn.Module]
    batch: Sequence[Any] | Mapping[str, Any]
    options: FrameOptions
    visits: tuple[Visit, ...]  # forward and backward graphs, in order
    trained: frozenset[str]  # names of the parameters that get a gradient
    group: str = ""  # process group that shares a sequence, as these graphs name it; "" where none does

    def captured(self, target: Target, *, rank: int = 0) -> Captured:
        """Return the step of one rank under the sharding of `target`."""
        # Without reshard_after_forward, or with a budget, the partitioner saves other values: no trace serves.
        gathers_once = target.config.zero.stage == 3 and not self.options.reshard_after_forward
        if gathers_once or self.options.memory is not None:
            capture = partial(
                capture_step, self.model_factory, self.batch, world=target.world, rank=rank, config=target.config,
                axes=target.axes, backend=target.backend,
            )  # fmt: skip
            try:
                return capture(options=self.options)
            except BudgetError as error:
                return replace(capture(options=replace(self.options, memory=None)), kept={"does not fit": str(error)})
        with simulated_job(target.world, rank):
            optimizer = shard(self.model_factory(), target.config, axes=target.axes, backend=target.backend)
            named = {sharded.name: sharded for sharded in optimizer.engine.params}
            lowered_graphs: dict[tuple[int, BackwardRequest | None], SimulatedGraph] = {}
            graphs, ready = [], set()
            for visit in self.visits:
                request = _request(visit, named)
                key = (id(visit.source), request)
                if key not in lowered_graphs:
                    lowered_graphs[key] = self._lowered(visit, request, named, optimizer)
                graphs.append((lowered_graphs[key], visit.states))
                ready |= {name for name, purpose in _purposes(visit, request) if purpose is Purpose.SPECULATE}
            trained = [sharded for sharded in named.values() if sharded.name in self.trained]
            return captured(optimizer, graphs, trained, ready, self.options)

    def _lowered(
        self, visit: Visit, request: BackwardRequest | None, named: Mapping[str, ShardedParam], optimizer: MuonZero
    ) -> SimulatedGraph:
        """Lower a copy of the graph of `visit` with the shard shapes, specs and process groups of `optimizer`."""
        gm = copy.deepcopy(visit.source)
        groups = {self.group: _sharing(optimizer)}
        for node, _ in collectives(gm):  # what the model itself sends
            node.update_arg(len(node.args) - 1, groups[node.args[-1]])
        inputs = gm.graph.find_nodes(op="placeholder")
        states = {inputs[i]: named[name] for i, name in visit.states.items()}
        for state, sharded in states.items():
            _reshape(state, sharded.momentum)
        for unshard in Unshard.all(gm):
            sharded = states[unshard.state]
            _reshape(unshard.shard, sharded.local)
            if sharded.resident is not None and unshard.resident is not None:
                _reshape(unshard.resident, sharded.resident)
            resident = None if sharded.resident is None else unshard.resident
            unshard.node.args = (unshard.shard, unshard.state, unshard.graph_scalars, resident, sharded.text)
        for reduction in ReduceGrad.all(gm):
            sharded = states[reduction.state]
            _reshape(reduction.node, sharded.local)
            reduction.node.args = (reduction.grad, reduction.state, reduction.graph_scalars, sharded.text)
        ctx = replace(visit.ctx, options=self.options, costs=optimizer.engine.ledger.costs, request=request, timings={})
        values = [node.meta["val"] for node in gm.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        with fresh_context(fake_mode_of(values[:1])):
            return SimulatedGraph.of(run_passes(gm, LOWERING_PASSES, ctx), ctx)

    def owner_work(self, target: Target) -> list[float]:
        """Return the nanoseconds of Newton-Schulz that each rank computes in a step, by formula."""
        return [sum(of_rank) for of_rank in zip(*self.bucket_work(target), strict=True)] or [0.0] * target.world

    def bucket_work(self, target: Target) -> list[list[float]]:
        """Return these nanoseconds for each exchange, by rank, in the order of the ranks."""
        with simulated_job(target.world, 0):
            ledger = shard(self.model_factory(), target.config, axes=target.axes, backend=target.backend).engine.ledger
            late = {a.name: a for a in ledger.sharded_params if a.name in self.trained and a.spec.muon is not None}
            named, graphs = {sharded.name: sharded for sharded in ledger.sharded_params}, []
            for visit in self.visits:
                speculated = [name for name, p in _purposes(visit, _request(visit, named)) if p is Purpose.SPECULATE]
                graphs.append([named[name].spec for name in speculated])
                late = {name: sharded for name, sharded in late.items() if name not in speculated}
            graphs.append([sharded.spec for sharded in late.values()])
            return [work for specs in graphs for work in self._work(specs, target.world, ledger.costs)]

    def _work(self, specs: Sequence[ParamSpec], world: int, costs: Costs) -> Iterator[list[float]]:
        """Yield each rank's work of each bucket of the directions that one graph makes."""
        buckets = bucket_matrices(specs, costs, self.options.bucket_bytes)
        owners = by_parameter(specs, assign_owners(specs, costs, buckets))
        for bucket in buckets:
            work = [0.0] * world
            for share, owner in (pair for i in bucket for pair in zip(shares(specs[i]), owners[i], strict=True)):
                muon = share.spec.muon_settings
                nanoseconds = owned_work(muon, costs, share.matrices)
                if muon.exchange == "owner":
                    for rank in share.spec.layout.owner_ranks(owner):
                        work[rank] += nanoseconds
                else:
                    work = [one + nanoseconds / world for one in work]
            yield work


def trace_step(
    model_factory: Callable[[], nn.Module],
    batch: Sequence[Any] | Mapping[str, Any],
    config: Config,
    options: FrameOptions,
    *,
    sharing: int = 1,
) -> Trace:
    """Trace the micro-batches of a step; arguments as for :func:`~.capture.capture_step`.

    `model_factory` is called again for every sharding; `sharing` ranks share a sequence.
    """
    # Stage 1: here an unshard marker has the resident weight as an input, which other stages leave out.
    zero = replace(config.zero, stage=1, shard_state_over="shard", offload=None, offload_param=None)
    config = with_sharing(replace(config, zero=zero, mesh=None), sharing)
    axes = {"shard": 2, "sequence": sharing} if sharing > 1 else {"shard": 2}
    with simulated_job(2 * sharing, 0):
        optimizer = shard(model_factory(), config, axes=axes, backend=None)
        visits = run_micro_batches(optimizer, batch, options)
        trained = frozenset(a.name for a in optimizer.engine.params if a.param.grad is not None)
        return Trace(model_factory, batch, options, tuple(visits), trained, _sharing(optimizer))


def with_sharing(config: Config, ranks: int) -> Config:
    """Return `config` with `ranks` ranks a sequence and without the check that compares them."""
    shared = replace(config.sequence_parallel, size=ranks, check=False) if ranks > 1 else SequenceParallelConfig()
    return replace(config, sequence_parallel=shared)


def _sharing(optimizer: MuonZero) -> str:
    """Return the name of the process group that shares a sequence with this rank; "" where none does."""
    mesh = optimizer.engine.mesh
    return mesh.sequence.group if mesh is not None and "sequence" in mesh.names else ""


def _purposes(visit: Visit, request: BackwardRequest | None) -> list[tuple[str, Purpose]]:
    """Return the name and purpose of each parameter in `request`, in the order of its gradients."""
    if request is None:
        return []
    inputs = {node: i for i, node in enumerate(visit.source.graph.find_nodes(op="placeholder"))}
    names = [visit.states[inputs[reduction.state]] for reduction in ReduceGrad.all(visit.source)]
    return list(zip(names, request.purposes, strict=True))


def _request(visit: Visit, named: Mapping[str, ShardedParam]) -> BackwardRequest | None:
    """Translate the request that the ledger made when traced, `visit.ctx.request`, to the sharding of `named`."""
    traced_request = visit.ctx.request
    if traced_request is None:
        return None
    specs = [named[name].spec for name, _ in _purposes(visit, traced_request)]

    def purpose(spec: ParamSpec, chosen: Purpose) -> Purpose:
        fits = {Purpose.ACCUMULATE: spec.layout.accumulates, Purpose.SPECULATE: spec.muon is not None}
        return chosen if fits.get(chosen, True) else Purpose.REDUCE

    purposes = tuple(purpose(spec, chosen) for spec, chosen in zip(specs, traced_request.purposes, strict=True))
    return BackwardRequest(
        purposes,
        tuple(flag and spec.layout.accumulates for flag, spec in zip(traced_request.unreduced, specs, strict=True)),
        tuple(flag and p is Purpose.SPECULATE for flag, p in zip(traced_request.carried, purposes, strict=True)),
    )


def _reshape(node: Node, like: torch.Tensor) -> None:
    node.meta["val"] = tensor_value(node).new_empty(like.shape, dtype=like.dtype)
