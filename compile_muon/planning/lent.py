"""Which buckets of offloaded state the graphs of a step ask for, and where."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from compile_muon.offload.state import OffloadedStates
from compile_muon.offload.store import Bucket, Slot
from compile_muon.optimizer import MuonZero
from compile_muon.passes.holder import FETCH
from compile_muon.planning.eager_graph import EagerGraph
from compile_muon.planning.simulate.lending import Move, Moves
from compile_muon.runtime.lender import Lender, Lent
from compile_muon.runtime.sharded_param import ShardedParam

__all__ = ["fetches", "noting_lends"]


def fetches(gm: GraphModule, states: Mapping[int, str], optimizer: MuonZero) -> dict[Node, Moves]:
    """The moves of the momenta that this graph fetches.

    Args:
        states: name of the parameter by the position of its state among the inputs.
    """
    lender = optimizer.engine.lender
    if not isinstance(lender, OffloadedStates):
        return {}
    done = Move.CLOSE if _writes(optimizer) else Move.LEAVE
    sharded_params = {sharded.name: sharded for sharded in optimizer.engine.params}
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    found: dict[Node, Moves] = {}
    for node in gm.graph.find_nodes(op="call_function", target=FETCH):
        sharded = sharded_params[states[inputs[node.args[0]]]]
        if moves := [move for bucket in lender.fetched(sharded) for move in ((Move.OPEN, bucket), (done, bucket))]:
            found[node] = moves
    return found


@contextmanager
def noting_lends(optimizer: MuonZero, graph: EagerGraph) -> Iterator[None]:
    """What the commit in this block is lent is noted in ``graph``."""
    steps = optimizer.engine.step
    lender = steps.lender
    if isinstance(lender, OffloadedStates):
        # Where the device decides whether to write, no momentum has been moved for good.
        written = _writes(optimizer) and not optimizer.engine.ledger.checks_later
        fetched = frozenset(a for a in steps.muon if written and a.param.grad is not None and lender.fetched(a))
        steps.lender = cast("Lender", _Noted(lender, graph, fetched, on_disk=_writes(optimizer)))
    yield
    steps.lender = lender


def _writes(optimizer: MuonZero) -> bool:
    """Whether a momentum is written when it is fetched."""
    offload = optimizer.config.zero.offload
    return offload is not None and offload.device == "nvme"


class _Noted:
    """Lends what ``lender`` does to a commit that ``graph`` records.

    Args:
        fetched: whose momentum was written when it was fetched.
        on_disk: whether states are in a file.
    """

    def __init__(
        self, lender: OffloadedStates, graph: EagerGraph, fetched: frozenset[ShardedParam], *, on_disk: bool
    ) -> None:
        self._on_disk = on_disk
        self._lender, self._graph, self._fetched = lender, graph, fetched
        self._crossed: dict[str, Bucket] = {}

    def moved(self, fetches: Mapping[ShardedParam, int]) -> frozenset[ShardedParam]:
        """See :class:`~compile_muon.runtime.lender.Lender`."""
        return self._fetched

    def lend(
        self, sharded_params: Sequence[ShardedParam], what: Lent, step: int, *, moved: Collection[ShardedParam] = ()
    ) -> Iterator[tuple[list[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]:
        """See :class:`~compile_muon.runtime.lender.Lender`."""
        for own, states in self._lender.lend(sharded_params, what, step, moved=moved):
            buckets, read_only = self._lender.lent
            if self._lender.computes(own[0]):
                buckets = self._crossing(own, buckets)
            self._graph.move([(Move.OPEN, bucket) for bucket in buckets])
            yield own, states
            self._graph.move([(Move.LEAVE if each in read_only else Move.CLOSE, each) for each in buckets])

    def _crossing(self, own: Sequence[ShardedParam], buckets: list[Bucket]) -> list[Bucket]:
        """What travels where the host computes: gradients, and weights as large; of a file its states, too, which cross
        no link and count as if they did."""
        numels = [sharded.local.numel() for sharded in own]
        slots = [Slot(a.name, (n,), a.local_grad.dtype) for a, n in zip(own, numels, strict=True)]
        return [self._crossed.setdefault(own[0].name, Bucket(slots)), *(buckets if self._on_disk else ())]

    @contextmanager
    def writing(self, found_inf: Tensor | None) -> Iterator[None]:
        """See :class:`~compile_muon.runtime.lender.Lender`."""
        with self._lender.writing(found_inf):
            yield
        self._graph.move([(Move.COMMIT, None)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lender, name)
