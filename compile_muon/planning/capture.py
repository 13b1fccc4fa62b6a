"""The lowered graphs of one rank's training step, without the other ranks and without running them.

The model is sharded and compiled as in training, under a process group that sends nothing. Where generated code would
run, a stand-in notes the graph and returns zeros; so what is between the graphs, and outside of them in the model,
happens as in training, but for its values. ``optimizer.step()`` is not called: it would ask the other ranks. What it
does is the graph of :mod:`.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from compile_muon.backend import compile_frame
from compile_muon.config import Config, FrameOptions
from compile_muon.errors import MuonZeroError
from compile_muon.model.mesh import Mesh
from compile_muon.optimizer import MuonZero
from compile_muon.passes import PassContext
from compile_muon.passes.collectives import collectives
from compile_muon.passes.half.refresh import AWAIT_REFRESH_OP
from compile_muon.passes.layout import Axis
from compile_muon.passes.machine import Machine
from compile_muon.passes.simulate import Played, Timeline, simulate
from compile_muon.passes.torch_private import expected_size, fake_group, group_named
from compile_muon.passes.work import Category
from compile_muon.planning.update import commit_graph, refresh_graph, survey_graph
from compile_muon.runtime.account import Account, account_of
from compile_muon.runtime.replicas import gathers
from compile_muon.runtime.step_graph import StepGraphs

__all__ = ["Captured", "capture_step"]


@dataclass(frozen=True)
class Captured:
    """One rank's training step.

    Args:
        graphs: in the order they run in.
        groups: the process groups of their collectives, and the ranks in each.
        ranks: of the job.
        resident: bytes that are live all the time: "parameters" and "optimizer".
        codegen: that graphs were made for.
    """

    graphs: tuple[Played, ...]
    groups: Mapping[Axis, tuple[int, ...]]
    ranks: int
    resident: Mapping[str, int]
    codegen: str

    def simulated(self, machine: Machine, *, one_stream: bool = False) -> Timeline:
        """See :func:`~compile_muon.passes.simulate.simulate`."""
        return simulate(
            self.graphs,
            machine,
            groups=self.groups,
            ranks=self.ranks,
            resident=self.resident,
            codegen=self.codegen,
            one_stream=one_stream,
        )


@dataclass
class _Recorder:
    """Stands in for generated code, see :attr:`PassOptions.stand_in`."""

    graphs: list[tuple[Played, Mapping[Node, Account | None]]] = field(default_factory=list)

    def __call__(self, gm: GraphModule, ctx: PassContext) -> Callable[[list[Any]], Any]:
        inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        (outputs,) = gm.graph.output_node().args
        played = Played.of(gm, ctx)
        states = {
            node: inputs[node.args[1]] for node in gm.graph.find_nodes(op="call_function", target=AWAIT_REFRESH_OP)
        }

        def run(args: list[Any]) -> list[Any]:
            accounts = {node: account_of(args[place]) for node, place in states.items()}
            self.graphs.append((played, accounts))
            given, results = list(args), []
            for node in outputs:
                if isinstance(node, Node):
                    results.append(given[inputs[node]] if node in inputs else _zeros(node.meta["val"]))
                else:
                    results.append(node)
            args.clear()
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes, strides = map(expected_size, value.shape), map(expected_size, value.stride())
        made = torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype, device=value.device)
        return made.zero_()
    return expected_size(value)


def capture_step(
    model_factory: Callable[[], nn.Module],
    batch: Sequence[Any],
    *,
    world: int,
    rank: int = 0,
    config: Config | None = None,
    options: FrameOptions | None = None,
    axes: Mapping[str, int] | None = None,
    backend: str | None = None,
    init: Callable[..., Any] | None = None,
) -> Captured:
    """The graphs that ``rank`` of ``world`` runs in one step: its micro-batches, the step's directions, the update.

    Compiled code of this process is dropped (``torch.compiler.reset``), and its random numbers move on as far as the
    factory draws them.

    Args:
        model_factory: makes the model, on the meta device or with values.
        batch: arguments of ``model(...)``, whose result, or the sum of all floating tensors in it, is the loss.
        config: of the optimizer; its micro-batches are ``gradient_accumulation_steps``, 1 where unknown.
        options: of torch.compile; "inductor" gives the graphs that Inductor gets.
        axes: sizes of the axes of the mesh, in order: ``{"replicate": 2, "shard": 4}``; default: one, of all ranks.
        backend: that the ranks will communicate by; default: "gloo" for models on CPUs.
        init: see :class:`MuonZero`; for models on the meta device.
    Raises:
        MuonZeroError: there is a process group already.
        ConfigError, UnsupportedModelError: as :class:`MuonZero`.
    """
    if dist.is_initialized():
        raise MuonZeroError("capture_step simulates a process group, and this process has one; call it ahead of that")
    config = Config() if config is None else config
    recorder = _Recorder()
    options = replace(FrameOptions() if options is None else options, stand_in=recorder)
    torch.compiler.reset()
    try:
        with fake_group(rank, world):
            return _capture(model_factory(), batch, world, config, options, recorder, axes, backend, init)
    finally:
        torch.compiler.reset()


def _capture(
    model: nn.Module,
    batch: Sequence[Any],
    world: int,
    config: Config,
    options: FrameOptions,
    recorder: _Recorder,
    axes: Mapping[str, int] | None,
    backend: str | None,
    init: Callable[..., Any] | None,
) -> Captured:
    device = next(model.parameters()).device.type
    device = "cpu" if device == "meta" else device
    shape = {"shard": world} if axes is None else axes
    given = init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))
    mesh = Mesh.of(given)
    if mesh is not None:
        mesh = replace(mesh, backend=backend or ("gloo" if device == "cpu" else "nccl"))
    optimizer = MuonZero.from_config(model, config, mesh=mesh or given, init=init)
    compiled = torch.compile(model, backend=lambda gm, inputs: compile_frame(gm, inputs, options))
    for _ in range(config.zero.gradient_accumulation_steps or 1):
        _loss(compiled(*batch)).backward()
    accounts = optimizer._ledger.accounts
    trained = [account for account in accounts if account.param.grad is not None]
    muon = [account for account in trained if account.spec.muon is not None]
    adamw = [account for account in trained if account.spec.muon is None]
    everyone = None if mesh is None else mesh.everyone.group_name
    late = [account for account in muon if account.speculations.current is None]
    micro_batches = len(recorder.graphs)
    if late:
        StepGraphs().orthogonalize(late, [account.local_grad for account in late], options)
    number = {account: number for number, bucket in enumerate(gathers(trained)) for account in bucket}
    graphs = [
        replace(played, awaits={node: number[a] for node, a in read.items() if a is not None and a in number})
        for played, read in recorder.graphs
    ]
    graphs.insert(micro_batches, survey_graph(muon, adamw, everyone))
    graphs += [commit_graph(muon, adamw), refresh_graph(trained)]
    resident = {
        "parameters": sum(_nbytes(a.local) + _nbytes(a.replica) for a in accounts),
        "optimizer": sum(_nbytes(a.momentum) for a in muon) + sum(2 * _nbytes(a.local) for a in adamw),
    }
    return Captured(tuple(graphs), _groups(accounts, graphs), world, resident, options.codegen)


def _loss(result: Any) -> Tensor:
    floating = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
    total = floating[0].sum()
    for value in floating[1:]:
        total = total + value.sum()
    return total


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _groups(accounts: Sequence[Account], graphs: Sequence[Played]) -> dict[Axis, tuple[int, ...]]:
    """Of the parameters' axes, and of what the model sends itself."""
    own = dict.fromkeys(axis for account in accounts for axis in account.spec.layout.axes)
    axes = {served.group: served for axis in own for served in map(axis.serving, Category)}
    for played in graphs:
        for node, _ in collectives(played.gm):
            name = node.args[-1]
            group = group_named(name)
            axes.setdefault(name, Axis("other", group.size(), group.rank(), name))
    return {axis: tuple(dist.get_process_group_ranks(group_named(name))) for name, axis in axes.items()}
