"""The graphs of ``optimizer.step()``: made of the functions that it calls, but for those that ask other ranks; and
which buckets of offloaded state the graphs of a step ask for, and where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compile_muon.config import FrameOptions
from compile_muon.engine.commit import commit
from compile_muon.engine.directions import Directions
from compile_muon.engine.dtensors import edits_of
from compile_muon.engine.facts import agreement, asked, told
from compile_muon.engine.finite import directions_not_finite
from compile_muon.engine.owner_states import states_at_owner
from compile_muon.engine.projected import Projected, project
from compile_muon.engine.recorded import Recorded
from compile_muon.engine.resident import Refresh, gathers
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.speculation import Speculation
from compile_muon.engine.state_provider import StateProvider, StateRequest
from compile_muon.engine.step_checks import StepChecks
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
from compile_muon.planning.simulate import Played
from compile_muon.planning.simulate.offload_transfers import Move, Moves, OnHost

__all__ = ["fetches", "step_graphs"]


@torch.no_grad()
def step_graphs(
    optimizer: MuonZero, trained: Sequence[ShardedParam], ready: Collection[str], options: FrameOptions
) -> list[Played]:
    """The checks, directions that backward has not made, the writes, and the refresh.

    Args:
        trained: the parameters that have a gradient.
        ready: names of those whose directions backward has made.
        options: of torch.compile.
    """
    # Of methods with several graphs an ordinary one: not the first step, which may begin something.
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
        found = [first]
        late = [sharded for sharded in muon if sharded.name not in ready]
        projected: dict[str, Projected] = {}
        if late:
            grads = [sharded.local_grad for sharded in late]
            with EagerGraph() as graph, _noting_moves(optimizer, graph):
                projected = project(optimizer.engine.step, late, grads)
            if projected:
                # The step graph and the commit read them in place of gradients.
                found.append(graph.played("projection", [each.gradient for each in projected.values()]))
            step = Recorder(fake_mode_of([sharded.local for sharded in late]))
            kept = {i: states_at_owner(a, optimizer.state[a.param]) for i, a in enumerate(late) if a.owners}
            StepGraphs(step).orthogonalize(late, [sharded.local_grad for sharded in late], kept, options)
            found += [
                replace(v.played, parameters=len(v.states), moves=fetches(v.played.gm, v.states, optimizer))
                for v in step.visits
            ]
            found.append(_late_checks(checks, late, [directions[sharded.name] for sharded in late]))
        for sharded in trained:
            state = optimizer.state[sharded.param]
            for slot, value in state.items():
                if not value.ndim:  # a count, which its method reads: fake tensors know what they are made of
                    state[slot] = torch.tensor(0.0)
        made = Directions(directions, projected=projected)
        with EagerGraph() as graph, _noting_moves(optimizer, graph):
            commit(optimizer.engine.step, made, {})
        found.append(graph.played("commit", parameters=len(trained), fused=_fused(optimizer)))
        recorded = options.cuda_graphs and Recorded().left_out(optimizer.engine.step) is None
        return [replace(played, replayed=recorded) for played in (*found, _refresh(trained))]


def _fused(optimizer: MuonZero) -> bool:
    """Whether GPUs write with one kernel: AdamW's, and Muon's of momenta and weights."""
    groups = optimizer.param_groups
    methods = {optimizer.engine.step.method(group) for group in groups}
    return methods <= {MUON, ADAMW} and not any(group.get("cautious_decay") for group in groups)


def _first_checks(optimizer: MuonZero, ready: dict[str, Tensor]) -> tuple[StepChecks, Played]:
    sharded_params = [sharded for sharded in optimizer.engine.params if sharded.name in ready]
    rows = fingerprint([sharded.local_grad for sharded in sharded_params]) if ready else ()
    made = {
        sharded.name: Speculation(ready[sharded.name], row, edits_of(sharded.momentum_buffer), sharded.rates)
        for sharded, row in zip(sharded_params, rows, strict=True)
    }
    steps = optimizer.engine.step
    with EagerGraph() as graph, graph.noting(Work(Category.CHECKS, 0)):
        rates = steps.rates()
        agreed = agreement(steps, rates) if steps.compares else None
        checks = told(steps, agreed, rates, made)
        asked(steps, checks, agreed, made)
        checks.reduce()
    return checks, graph.played("checks", counted=False, waits=not optimizer.engine.ledger.checks_later)


def _late_checks(checks: StepChecks, late: Sequence[ShardedParam], directions: Sequence[Tensor]) -> Played:
    """What a step asks of the directions that it has made itself."""
    with EagerGraph() as graph, graph.noting(Work(Category.CHECKS, 1)):
        wrong = directions_not_finite([sharded.spec for sharded in late], directions)
        checks.add("direction", [sharded.name for sharded in late], wrong)
        checks.reduce()
    return graph.played("checks", counted=False)


def _refresh(sharded_params: Sequence[ShardedParam]) -> Played:
    """What a step gathers, and behind all that, how each gather is finished by whoever reads a weight."""
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
    """The moves of the momenta that this graph fetches.

    Args:
        states: name of the parameter by the position of its state among the inputs.
    """
    provider = optimizer.engine.state_provider
    if not isinstance(provider, OffloadedStates):
        return {}
    done = Move.CLOSE if _writes(optimizer) else Move.LEAVE
    sharded_params = {sharded.name: sharded for sharded in optimizer.engine.params}
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    found: dict[Node, Moves] = {}
    for node in gm.graph.find_nodes(op="call_function", target=FETCH):
        sharded = sharded_params[states[inputs[node.args[0]]]]
        if moves := [
            move for bucket in provider.layout.fetched(sharded.name) for move in ((Move.OPEN, bucket), (done, bucket))
        ]:
            found[node] = moves
    return found


@contextmanager
def _noting_moves(optimizer: MuonZero, graph: EagerGraph) -> Iterator[None]:
    """What the commit in this block is provided with is noted in ``graph``."""
    steps = optimizer.engine.step
    provider = steps.state_provider
    if isinstance(provider, OffloadedStates):
        # Where the device decides whether to write, no momentum has been moved for good.
        written = _writes(optimizer) and not optimizer.engine.ledger.checks_later
        graded = [sharded for sharded in steps.muon if written and sharded.param.grad is not None]
        fetched = frozenset(sharded for sharded in graded if provider.layout.fetched(sharded.name))
        steps.state_provider = cast("StateProvider", _Noted(provider, graph, fetched, on_disk=_writes(optimizer)))
    yield
    steps.state_provider = provider


def _writes(optimizer: MuonZero) -> bool:
    """Whether a momentum is written when it is fetched."""
    offload = optimizer.config.zero.offload
    return offload is not None and offload.device == "nvme"


def _on_host(sharded_params: Sequence[ShardedParam]) -> OnHost:
    """Gradients come, with weights that have no master there, and weights go back. AdamW reads four numbers of each
    element and writes three of them; what is rounded is read and written once more."""
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
    """Provides what ``provider`` does to a commit that ``graph`` records.

    Args:
        fetched: whose momentum was written when it was fetched.
        on_disk: whether states are in a file.
    """

    provider: OffloadedStates
    graph: EagerGraph
    fetched: frozenset[ShardedParam]
    on_disk: bool

    def provide(
        self, sharded_params: Sequence[ShardedParam], what: StateRequest, step: int
    ) -> Iterator[tuple[list[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`."""
        for own, states in self.provider.provide(sharded_params, what, step):
            buckets, read_only = self.provider.provided
            computed: Moves = ()
            # Until the next are provided: what the host writes is looked at and sent back there, which COMPUTE has.
            self.graph.elsewhere = any(bucket in self.provider.layout.on_host for bucket in buckets)
            if self.graph.elsewhere:
                # States of a file cross no link, and count as if they did.
                buckets, computed = buckets if self.on_disk else [], [(Move.COMPUTE, _on_host(own))]
            self.graph.move([*((Move.OPEN, bucket) for bucket in buckets), *computed])
            yield own, states
            self.graph.move([(Move.LEAVE if each in read_only else Move.CLOSE, each) for each in buckets])
        self.graph.elsewhere = False

    @contextmanager
    def writing(self, fetches: Mapping[ShardedParam, int], found_inf: Tensor | None) -> Iterator[Callable[[], None]]:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`."""
        with self.provider.writing(fetches, found_inf) as confirm:
            self.provider.moved = self.fetched if found_inf is None else frozenset()
            yield confirm
        self.graph.move([(Move.COMMIT, None)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)
