"""Record the graphs of ``optimizer.step()`` by calling its functions, except those that communicate; and note where
these graphs, forward and backward open and close buckets of offloaded state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compile_muon.config import FrameOptions
from compile_muon.engine.commit import commit
from compile_muon.engine.directions import Directions, ProjectedGrad, project
from compile_muon.engine.dtensors import edits_of
from compile_muon.engine.gradient import Speculation
from compile_muon.engine.hooks import StateProvider, StateRequest
from compile_muon.engine.recorded import StepGraphCache
from compile_muon.engine.resident import Refresh, gathers
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import states_at_owner
from compile_muon.engine.step import Step
from compile_muon.engine.step_checks import StepChecks, directions_not_finite
from compile_muon.engine.step_graph import StepGraphs
from compile_muon.offload.state import OffloadedStates
from compile_muon.optimizer import MuonZero
from compile_muon.passes.fingerprint import fingerprint
from compile_muon.passes.language.holder import FETCH
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.language.work import Category, Work
from compile_muon.passes.methods.adamw import ADAMW
from compile_muon.passes.methods.muon import MUON
from compile_muon.passes.torch_private import fake_mode_of
from compile_muon.planning.recorder import EagerGraph, Recorder
from compile_muon.simulate import SimulatedGraph
from compile_muon.simulate.offload_transfers import Move, Moves, OnHost


@torch.no_grad()
def step_graphs(
    optimizer: MuonZero, trained: Sequence[ShardedParam], ready: Collection[str], options: FrameOptions
) -> list[SimulatedGraph]:
    """Return the graphs of a step: checks, the directions that backward did not make, the writes, the refresh.

    `trained` are the parameters with a gradient, `ready` the names of those whose directions backward has made.
    """
    # Methods with several graphs: take that of an ordinary step, not the first one, which may initialize state.
    optimizer.engine.step.count_step(2)
    optimizer.engine.step.sync_momentum()
    with fake_mode_of([sharded.local for sharded in trained]):
        for sharded in trained:
            if sharded.param.grad is None:
                sharded.add_gradient(torch.zeros_like(sharded.local))
        muon = [sharded for sharded in trained if sharded.spec.muon is not None]
        directions = {
            sharded.name: torch.zeros_like(sharded.local, dtype=decode_dtype(sharded.spec.muon_settings.dtype))
            for sharded in muon
        }
        checks, first = _first_checks(optimizer, {name: directions[name] for name in ready})
        graphs = [first]
        late = [sharded for sharded in muon if sharded.name not in ready]
        projected: dict[str, ProjectedGrad] = {}
        if late:
            grads = [sharded.local_grad for sharded in late]
            with EagerGraph() as graph:
                projected = project(_noting_moves(optimizer, graph), late, grads)
            if projected:
                # The step graph and the commit read them in place of gradients.
                graphs.append(graph.played("projection", [each.gradient for each in projected.values()]))
            step = Recorder(fake_mode_of([sharded.local for sharded in late]))
            owner_states = {i: states_at_owner(a, optimizer.state[a.param]) for i, a in enumerate(late) if a.owners}
            StepGraphs(step).orthogonalize(late, [sharded.local_grad for sharded in late], owner_states, options)
            graphs += [
                replace(v.played, parameters=len(v.states), moves=fetches(v.played.gm, v.states, optimizer))
                for v in step.visits
            ]
            graphs.append(_late_checks(checks, late, [directions[sharded.name] for sharded in late]))
        for state in (optimizer.state[sharded.param] for sharded in trained):
            # A step count that the method reads as a number: a fake tensor has no value.
            state.update({slot: torch.tensor(0.0) for slot, value in state.items() if not value.ndim})
        with EagerGraph() as graph:
            commit(_noting_moves(optimizer, graph), Directions(directions, projected=projected))
        graphs.append(graph.played("commit", parameters=len(trained), fused=_fused(optimizer)))
        recorded = options.cuda_graphs and StepGraphCache().left_out(optimizer.engine.step) is None
        return [replace(played, replayed=recorded) for played in (*graphs, _refresh(trained))]


def _fused(optimizer: MuonZero) -> bool:
    """Return whether GPUs write with one kernel: AdamW's, and Muon's of momenta and weights."""
    groups = optimizer.param_groups
    methods = {optimizer.engine.step.method(group) for group in groups}
    return methods <= {MUON, ADAMW} and not any(group.get("cautious_decay") for group in groups)


def _first_checks(optimizer: MuonZero, ready: dict[str, Tensor]) -> tuple[StepChecks, SimulatedGraph]:
    """Record the checks ahead of the first write; `ready` maps names to directions that backward made."""
    steps = optimizer.engine.step
    early = [sharded for sharded in optimizer.engine.params if sharded.name in ready]
    rows = fingerprint([sharded.local_grad for sharded in early]) if ready else ()
    speculations = {
        a.name: Speculation(ready[a.name], row, edits_of(a.momentum_buffer), a.rates)
        for a, row in zip(early, rows, strict=True)
    }
    with EagerGraph() as graph, graph.noting(Work(Category.CHECKS, 0)):
        checks = StepChecks(steps, speculations)
        checks.add_device_numbers()
        checks.reduce()
    return checks, graph.played("checks", counted=False, waits=not optimizer.engine.ledger.checks_later)


def _late_checks(checks: StepChecks, late: Sequence[ShardedParam], directions: Sequence[Tensor]) -> SimulatedGraph:
    """Record the finiteness check of directions that the step itself makes."""
    with EagerGraph() as graph, graph.noting(Work(Category.CHECKS, 1)):
        wrong = directions_not_finite([sharded.spec for sharded in late], directions)
        checks.add("direction", [sharded.name for sharded in late], wrong)
        checks.reduce()
    return graph.played("checks", counted=False)


def _refresh(sharded_params: Sequence[ShardedParam]) -> SimulatedGraph:
    """Record the gathers that a step starts, then how the next forward waits for and finishes each."""
    under_way = []
    with EagerGraph() as graph:
        for number, gather in enumerate(gathers(sharded_params)):
            with graph.noting(Work(Category.REFRESH, number)):
                under_way.append(Refresh.start(gather, "refresh"))
        for number, refresh in enumerate(under_way):
            with graph.noting(Work(Category.REFRESH, number)):
                graph.wait(refresh.received)
                refresh.finish()
    return graph.played("refresh", drops=("exchange",), finished_by_forward=True)


# --------------------------------------------------------------------------------------------------- offloaded state


def fetches(gm: GraphModule, states: Mapping[int, str], optimizer: MuonZero) -> dict[Node, Moves]:
    """Return the bucket moves ahead of each node that fetches a momentum.

    `states` maps the position of a state tensor among the inputs to the name of its parameter.
    """
    provider = optimizer.engine.state_provider
    if not isinstance(provider, OffloadedStates):
        return {}
    closing = Move.CLOSE if _writes(optimizer) else Move.LEAVE
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    moves_by_node: dict[Node, Moves] = {}
    for node in gm.graph.find_nodes(op="call_function", target=FETCH):
        buckets = provider.layout.fetched(states[inputs[node.args[0]]])
        if moves := [move for bucket in buckets for move in ((Move.OPEN, bucket), (closing, bucket))]:
            moves_by_node[node] = moves
    return moves_by_node


def _noting_moves(optimizer: MuonZero, graph: EagerGraph) -> Step:
    """Return a copy of the optimizer's step that records in `graph` the buckets its state provider opens and closes."""
    steps = copy(optimizer.engine.step)
    provider = steps.state_provider
    if isinstance(provider, OffloadedStates):
        # Where found_inf is only known on the device, a momentum written at its fetch may yet be rolled back.
        on_disk = _writes(optimizer)
        written = steps.muon if on_disk and not optimizer.engine.ledger.checks_later else ()
        fetched = frozenset(a for a in written if a.param.grad is not None and provider.layout.fetched(a.name))
        steps.state_provider = cast("StateProvider", _Noted(provider, graph, fetched, on_disk))
    return steps


def _writes(optimizer: MuonZero) -> bool:
    """Return whether fetching a momentum also writes it back, as NVMe offload does."""
    offload = optimizer.config.zero.offload
    return offload is not None and offload.device == "nvme"


def _on_host(sharded_params: Sequence[ShardedParam]) -> OnHost:
    """Return the bytes of a step that the host computes.

    Gradients go to the host, with the weights that have no master there; weights come back. AdamW reads four numbers of
    each element and writes three; a tensor in a lower dtype is read or written once more to convert it.
    """
    to_host = to_device = streamed = 0
    for sharded in sharded_params:
        numel, wide = sharded.local.numel(), decode_dtype(sharded.spec.state_dtype).itemsize
        grad, weight = (numel * x.dtype.itemsize for x in (sharded.local_grad, sharded.local))
        to_host += grad + (0 if sharded.spec.master else weight)
        to_device += weight
        streamed += 7 * numel * wide + sum(x + numel * wide for x in (grad, weight) if x != numel * wide)
    return OnHost(to_host, to_device, streamed)


@dataclass(eq=False)
class _Noted:
    """A state provider that forwards to `provider` and records the moves of buckets in `graph`."""

    provider: OffloadedStates
    graph: EagerGraph
    fetched: frozenset[ShardedParam]  # parameters whose momentum was already written back when it was fetched
    on_disk: bool  # states are in a file

    def provide(
        self, sharded_params: Sequence[ShardedParam], what: StateRequest, step: int
    ) -> Iterator[tuple[Sequence[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]:
        """See :class:`~compile_muon.engine.hooks.StateProvider`."""
        for bucket_params, states in self.provider.provide(sharded_params, what, step):
            buckets, read_only = self.provider.provided
            computed: Moves = ()
            # Until the next bucket: the time of reads, writes and copies on the host is in the COMPUTE move.
            self.graph.elsewhere = any(bucket in self.provider.layout.on_host for bucket in buckets)
            if self.graph.elsewhere:
                # States in a file go to host memory only; they count as if they crossed the link to the device.
                buckets, computed = buckets if self.on_disk else [], [(Move.COMPUTE, _on_host(bucket_params))]
            self.graph.move([*((Move.OPEN, bucket) for bucket in buckets), *computed])
            yield bucket_params, states
            self.graph.move([(Move.LEAVE if each in read_only else Move.CLOSE, each) for each in buckets])
        self.graph.elsewhere = False

    @contextmanager
    def writing(self, fetches: Mapping[ShardedParam, int], found_inf: Tensor | None) -> Iterator[Callable[[], None]]:
        """See :class:`~compile_muon.engine.hooks.StateProvider`."""
        with self.provider.writing(fetches, found_inf) as confirm:
            self.provider.moved = self.fetched if found_inf is None else frozenset()
            yield confirm
        self.graph.move([(Move.COMMIT, None)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)
