"""Capture the lowered graphs of one rank's training step, without the other ranks and without running them.

The model is sharded and compiled as in training, under a fake process group that sends nothing. In place of generated
code a stand-in records the graph and returns zeros, so the code between graphs, and outside them in the model, runs as
in training except for values. ``optimizer.step()`` itself is not called, since it communicates; its checks, writes and
refresh are, and :mod:`.recorder` records them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from compile_muon.backend import compile_frame
from compile_muon.config import Config, FrameOptions, OffloadConfig
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.resident import gathers
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import states_of_owners
from compile_muon.errors import MuonZeroError
from compile_muon.memory import mesh_axes, resident_bytes
from compile_muon.mesh import Mesh
from compile_muon.offload import keeps_momentum_alone
from compile_muon.optimizer import MuonZero
from compile_muon.passes.language.layout import Axis
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.lowering.refresh import AWAIT_REFRESH_OP
from compile_muon.passes.methods import matrix_method
from compile_muon.passes.torch_private import fake_group, fake_mode_of
from compile_muon.planning.recorder import Recorder, Visit
from compile_muon.planning.step import fetches, step_graphs
from compile_muon.simulate import SimulatedGraph, Timeline, simulate
from compile_muon.simulate.machine import Machine
from compile_muon.simulate.offload_transfers import OffloadTransfers
from compile_muon.simulate.played import groups_of


@dataclass(frozen=True)
class Captured:
    """A training step of one rank as lowered graphs."""

    graphs: tuple[SimulatedGraph, ...]  # in the order they run
    groups: Mapping[Axis, tuple[int, ...]]  # ranks of each process group that a collective names
    ranks: int  # of the job
    resident: Mapping[str, int]  # bytes live all the time: "parameters" and "optimizer"
    codegen: str  # that the graphs were lowered for
    # Bytes that offload can move: "momenta", "moments" (all other per-element states), "masters" (weights that
    # graphs read in a lower dtype). "rounded" stays on the device in place of offloaded masters. "momentum", "moment"
    # and "master" are the most of each that one parameter has and that is provided at a time; "momentum by rows" is
    # the same of momenta that are provided by rows unless masters are offloaded too.
    states: Mapping[str, int]
    offload: OffloadConfig | None = None
    kept: Mapping[str, str] = field(default_factory=dict)  # of frames with a budget of memory, in words
    on_host: int = 0  # bytes of "parameters" that a GPU reads from host memory

    def simulated(
        self, machine: Machine, *, others: Mapping[tuple[int, ...], Sequence[float]] | None = None
    ) -> Timeline:
        """See :func:`~compile_muon.simulate.simulate`."""
        host_bytes = self.on_host if machine.device == "cuda" else 0
        resident = {**self.resident, "parameters": self.resident["parameters"] - host_bytes}
        play = partial(
            simulate, self.graphs, machine, groups=self.groups, ranks=self.ranks, resident=resident,
            codegen=self.codegen, others=others,
        )  # fmt: skip
        if self.offload is None:
            return play()
        device = machine.shared_by(self.ranks)
        transfers = OffloadTransfers(
            [move for played in self.graphs for node in played.gm.graph.nodes for move in played.moves.get(node, ())],
            buffers=self.offload.buffer_count,
            host=device.host_bandwidth,
            disk=(device.disk_bandwidth or math.inf) if self.offload.device == "nvme" else 0.0,
            memory=device.host_memory_bandwidth,
        )
        # The first simulation finds what is still in flight at the end of a step, as it is when the next one begins.
        transfers.next_step(play(transfers=transfers).seconds)
        return play(transfers=transfers)


def capture_step(
    model_factory: Callable[[], nn.Module],
    batch: Sequence[Any] | Mapping[str, Any],
    *,
    world: int,
    rank: int = 0,
    config: Config | None = None,
    options: FrameOptions | None = None,
    axes: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> Captured:
    """Return the graphs that `rank` of `world` runs in one step: micro-batches, late directions, the update.

    Calls ``torch.compiler.reset``, and `model_factory`, which may draw random numbers and return a model with values,
    on the meta device, or of fake tensors (:mod:`.models`). `batch`: arguments of ``model(...)``, by position or name;
    the loss is the sum of all floating tensors of the result. Codegen "inductor" gives the graphs that Inductor gets.
    `axes`: sizes of the mesh dimensions by name, in order; default: "shard", of all ranks. `backend`: of the simulated
    process groups; default: "gloo" for models on CPUs, else "nccl".

    Raises a MuonZeroError if this process has a process group, else as :class:`MuonZero`.
    """
    config = Config() if config is None else config
    options = FrameOptions() if options is None else options
    with simulated_job(world, rank):
        optimizer = shard(model_factory(), config, axes=axes, backend=backend)
        graphs = [(visit.played, visit.states) for visit in run_micro_batches(optimizer, batch, options)]
        trained = [sharded for sharded in optimizer.engine.params if sharded.param.grad is not None]
        ready = {sharded.name for sharded in trained if sharded.speculations.current is not None}
        return captured(optimizer, graphs, trained, ready, options)


def shard(model: nn.Module, config: Config, *, axes: Mapping[str, int] | None, backend: str | None) -> MuonZero:
    """Return an optimizer of `model`, sharded in place over the ranks of a :func:`simulated_job`."""
    device = next(model.parameters()).device.type
    device = "cpu" if device == "meta" else device
    shape = {"shard": dist.get_world_size()} if axes is None else axes
    device_mesh = init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))
    mesh = Mesh.of(device_mesh)
    if mesh is not None:
        mesh = replace(mesh, backend=backend or ("gloo" if device == "cpu" else "nccl"))
    return MuonZero.from_config(model, config, mesh=mesh or device_mesh)


@contextmanager
def simulated_job(world: int, rank: int) -> Iterator[None]:
    """Inside this block, be `rank` of `world` ranks, of which the others do not exist.

    Raises a MuonZeroError if there is a process group already.
    """
    if dist.is_initialized():
        raise MuonZeroError("a plan simulates a process group, and this process has one; make it ahead of that")
    with fake_group(rank, world):
        yield


def run_micro_batches(
    optimizer: MuonZero, batch: Sequence[Any] | Mapping[str, Any], options: FrameOptions
) -> list[Visit]:
    """Trace forward and backward of every micro-batch of a step without running their graphs; drops compiled code."""
    model = optimizer.engine.model
    recorder = Recorder(fake_mode_of([sharded.local for sharded in optimizer.engine.params]))
    torch.compiler.reset()
    try:
        compiled = torch.compile(model, backend=lambda gm, inputs: compile_frame(gm, inputs, options, recorder))
        for _ in range(optimizer.config.zero.micro_batches):
            result = compiled(**batch) if isinstance(batch, Mapping) else compiled(*batch)
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
            loss, *rest = filter(torch.is_floating_point, outputs)
            sum((value.sum() for value in rest), loss.sum()).backward()
    finally:
        torch.compiler.reset()
    return recorder.visits


def captured(
    optimizer: MuonZero,
    graphs: Sequence[tuple[SimulatedGraph, Mapping[int, str]]],
    trained: Sequence[ShardedParam],
    ready: Collection[str],
    options: FrameOptions,
) -> Captured:
    """Return the step of these forward and backward graphs, with the graphs of ``optimizer.step()`` behind them.

    `graphs` come with the name of the parameter by the position of its state among the inputs; `trained` have a
    gradient; `ready` are the names of those whose directions the graphs make.
    """
    number = {sharded.name: i for i, gather in enumerate(gathers(trained)) for sharded in gather.sharded_params}
    all_graphs = [
        replace(
            graph, awaits=_awaits(graph, states, number), parameters=len(set(states.values())),
            replayed=options.cuda_graphs, moves=fetches(graph.gm, states, optimizer),
        )
        for graph, states in graphs
    ]  # fmt: skip
    all_graphs += step_graphs(optimizer, trained, ready, options)
    sharded_params, mesh, provider = optimizer.engine.params, optimizer.engine.mesh, optimizer.engine.state_provider
    resident = resident_bytes(sharded_params, optimizer.state, provider)
    return Captured(
        tuple(all_graphs), groups_of(mesh_axes(sharded_params), all_graphs), 1 if mesh is None else mesh.size, resident,
        options.codegen, _states(optimizer, trained), optimizer.config.zero.offload,
        {frame: str(choice) for frame, choice in optimizer.engine.ledger.memory.chosen.items()},
        on_host=sum(sharded.local.nbytes for sharded in sharded_params if sharded.spec.on_host),
    )  # fmt: skip


def _states(optimizer: MuonZero, trained: Sequence[ShardedParam]) -> dict[str, int]:
    """Return the bytes that offload can move, see :attr:`Captured.states`."""
    kinds = ("momenta", "moments", "masters", "rounded", "momentum", "moment", "master", "momentum by rows")
    bytes_of, by_rows = dict.fromkeys(kinds, 0), optimizer.config.muon.momentum_dtype is None
    for sharded in trained:
        param_bytes = Counter[str]()
        local, compute = sharded.local, decode_dtype(sharded.spec.compute_dtype)
        if compute.itemsize < local.dtype.itemsize:
            param_bytes["master"] = local.nbytes
            bytes_of["rounded"] += 0 if sharded.spec.layout.resident else local.numel() * compute.itemsize
        at_owner = {state.name for state in states_of_owners(sharded)}
        for slot, state in optimizer.state[sharded.param].items():
            if slot.startswith("momentum"):
                param_bytes["momentum"] += local_tensor(state).nbytes
            elif (state.shape == sharded.param.shape and state.ndim) or slot in at_owner:
                param_bytes["moment"] += local_tensor(state).nbytes
        muon = sharded.spec.muon
        alone = muon is not None and by_rows and keeps_momentum_alone(matrix_method(muon.method))
        for all_of, one in (("momenta", "momentum"), ("moments", "moment"), ("masters", "master")):
            bytes_of[all_of] += param_bytes[one]
            most = "momentum by rows" if alone and one == "momentum" else one
            if muon is not None or one == "momentum":  # element methods get all other states by rows
                bytes_of[most] = max(bytes_of[most], param_bytes[one])
    return bytes_of


def _awaits(played: SimulatedGraph, states: Mapping[int, str], number: Mapping[str, int]) -> dict[Node, int]:
    """Return the nodes that wait for a refresh, with the number of the gather that each waits for."""
    inputs = {node: i for i, node in enumerate(played.gm.graph.find_nodes(op="placeholder"))}
    waits = played.gm.graph.find_nodes(op="call_function", target=AWAIT_REFRESH_OP)
    names = {node: states.get(inputs[node.args[1]], "") for node in waits}
    return {node: number[name] for node, name in names.items() if name in number}
