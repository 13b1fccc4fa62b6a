"""Which buckets of offloaded state the graphs of a step ask for, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import StateProvider, StateRequest
from compile_muon.offload.state import OffloadedStates
from compile_muon.optimizer import MuonZero
from compile_muon.passes.language.holder import FETCH
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.planning.eager_graph import EagerGraph
from compile_muon.planning.simulate.offload_transfers import Move, Moves, OnHost

__all__ = ["fetches", "noting_moves"]


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
def noting_moves(optimizer: MuonZero, graph: EagerGraph) -> Iterator[None]:
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
