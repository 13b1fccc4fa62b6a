"""The pass that orders a lowered graph: where collectives start and are waited for, the same on every rank.

Lowering puts each bucket (:class:`~..work.Work`) in one piece where it is due. This pass cuts it at its waits into
*legs*, and places the legs among the model's own nodes:

========== ============================================= ===========================================
category   the leg that stays where lowering put it      the others
========== ============================================= ===========================================
gather     the last, ahead of the first reader           start ahead of that of a gather before it; the copy from
                                                         host memory starts with the gather before it
reduce     the first, at the bucket's last gradient      wait until the next bucket has started
exchange   none                                          see below
========== ============================================= ===========================================

- An exchange starts once the reductions that it reads are done, and overlaps with the rest of backward. Newton-Schulz
  runs after the last gradient and overlaps with the last reductions and exchanges; directions of one bucket return
  during Newton-Schulz of the next. Buffers of running exchanges are bounded: where the next would not fit, the oldest
  proceeds first.
- Directions for the replica group are most of the bytes that Newton-Schulz sends, over the slowest links. They overlap
  with backward too: such buckets proceed, to Newton-Schulz and on, whenever others start. Buckets that started together
  proceed together, one reduction later: an owner reaches the way back after its Newton-Schulz, and the rest of its
  owner group would wait for it. The last bucket remains for the end.
- Work without a collective comes last, except with offloaded momenta: there directions follow their gradients at once,
  so that the copies of momenta overlap with backward.

Places follow from the order of buckets and legs alone, never from a rank's node counts or from what it owns. So ranks
run collectives in the same order.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from ..collectives import is_wait
from ..exchange.packing import LIFT
from ..language.holder import FETCH
from ..language.work import Category, Work, work_of
from ..pipeline import LOWERED, GraphPass, PassContext
from .buckets import largest_bucket


@dataclass(eq=False)
class _Leg:
    """Nodes of one bucket from a wait, or its beginning, up to the start of the next collective, or its end."""

    work: Work
    level: int  # number of legs ahead of it in the bucket's chain
    nodes: list[Node] = field(default_factory=list)

    @property
    def fetches(self) -> bool:
        """Whether the leg waits for offloaded momenta."""
        return any(node.target is FETCH for node in self.nodes)

    @property
    def lifts(self) -> bool:
        """Whether the leg only starts copies of shards from host memory."""
        return self.nodes[-1].target is LIFT

    @cached_property
    def sources(self) -> list[Node]:
        """Nodes outside the leg that its nodes read."""
        leg_nodes = set(self.nodes)
        return [source for node in self.nodes for source in node.all_input_nodes if source not in leg_nodes]


_Chain = list[_Leg]


@dataclass
class _Plan:
    """Places of legs: around legs that stay, and at the end of the graph."""

    before: dict[_Leg, list[_Leg]] = field(default_factory=lambda: defaultdict(list))
    after: dict[_Leg, list[_Leg]] = field(default_factory=lambda: defaultdict(list))
    ready: list[_Leg] = field(default_factory=list)  # as soon as their inputs exist
    end: list[_Leg] = field(default_factory=list)  # after all nodes of the model that read none of our late results
    waits: list[_Leg] = field(default_factory=list)  # after model nodes that read what exists by then


def _chains(gm: GraphModule) -> dict[Category, list[_Chain]]:
    """Return each bucket's legs, by category, in the order of buckets."""
    chain_of: dict[Work, _Chain] = {}
    for node in gm.graph.nodes:
        work = work_of(node)
        if work is None:
            continue
        chain = chain_of.setdefault(work, [])
        if not chain or is_wait(node) or (chain[-1].lifts and node.target is not LIFT):
            chain.append(_Leg(work, len(chain)))
        chain[-1].nodes.append(node)
    for work, chain in chain_of.items():
        # An owner group that owns nothing of a bucket skips its all-to-alls and has only the last legs, which receive
        # directions of other replicas. Empty legs keep the levels, hence the places, equal on all ranks.
        missing = work.hops + 1 - len(chain)
        if missing > 0 and work.category is Category.EXCHANGE:
            chain_of[work] = [_Leg(work, level) for level in range(missing)] + chain
            for leg in chain:
                leg.level += missing
    ordered = sorted(chain_of.items(), key=lambda item: item[0].bucket)
    return {category: [chain for work, chain in ordered if work.category is category] for category in Category}


# --- preferences ------------------------------------------------------------------------------------------------------


def gather_ahead(plan: _Plan, gathers: Sequence[_Chain], limit: int) -> None:
    """Start each gather while the bucket before it is in use, or earlier: as long as the bucket, with those before it
    that are not in use yet, takes no more than ``limit`` bytes. Its copies from host memory start with the gather
    before it."""
    sizes = [chain[0].work.nbytes for chain in gathers]
    earliest, place = 0, plan.before[gathers[0][-1]] if gathers else []
    for number, (*starts, _) in enumerate(gathers):
        while earliest < number - 1 and sum(sizes[earliest : number + 1]) > limit:
            earliest += 1
        place += [leg for leg in starts if leg.lifts]  # ``place`` is still that of the gather before
        place = plan.before[gathers[earliest][-1]]
        place += [leg for leg in starts if not leg.lifts]


def reduce_until_the_next(plan: _Plan, reductions: Sequence[_Chain]) -> None:
    """Wait for each reduction when the next has started; its reduction over a second axis starts there."""
    last_legs = []
    for number, (_, *others) in enumerate(reductions):
        for leg in others:
            if number + leg.level < len(reductions):
                plan.after[reductions[number + leg.level][0]].append(leg)
            else:
                last_legs.append(leg)
    plan.end += sorted(last_legs, key=lambda leg: (leg.work.bucket + leg.level, leg.work.bucket))


def exchange_when_reduced(plan: _Plan, reductions: Sequence[_Chain], exchanges: Sequence[_Chain], limit: int) -> None:
    """Start each exchange after the last reduction it reads; its Newton-Schulz and the way back come at the end."""
    waiting = list(exchanges)
    reduced_buckets: set[int] = set()
    under_way = _UnderWay(limit)

    def ready(*, travels: bool) -> list[_Chain]:
        return [
            c for c in waiting if len(c) > 1 and c[0].work.travels is travels and c[0].work.needs <= reduced_buckets
        ]

    def started(chains: Sequence[_Chain]) -> Iterator[_Leg]:
        for chain in chains:
            waiting.remove(chain)
            yield from under_way.start(chain)

    def reduced(leg: _Leg, *, under_backward: bool) -> Iterator[_Leg]:
        """Yield ``leg`` of a reduction, then the exchanges that become ready by it."""
        yield leg
        if leg not in ends:
            return
        reduced_buckets.add(leg.work.bucket)
        travelling = [chain for chain in ready(travels=True) if chain[0].work.needs]
        # One bucket that only sends directions is left, to overlap with the last reductions.
        local = [chain for chain in ready(travels=False) if chain[0].work.needs][:-1]
        if under_backward and (travelling or local):
            yield from under_way.hand_round()
        yield from started(travelling)
        yield from started(local)

    ends = {chain[-1] for chain in reductions}
    for start, *_ in reductions:
        legs = (start, *plan.after[start])
        _, *plan.after[start] = (placed_leg for leg in legs for placed_leg in reduced(leg, under_backward=True))
    last_legs, plan.end = plan.end, []
    for leg in last_legs:  # Newton-Schulz of the oldest exchange overlaps with the last reductions
        plan.end += under_way.advance() if under_way.works else started(ready(travels=False)[:1])
        plan.end += reduced(leg, under_backward=False)
    plan.end += started(ready(travels=True))
    plan.end += started(ready(travels=False))
    while under_way.works:
        plan.end += under_way.advance()
    local_legs = [leg for chain in waiting for leg in chain]  # without a collective
    plan.ready += [leg for leg in local_legs if leg.fetches]
    plan.end += [leg for leg in local_legs if not leg.fetches]
    plan.waits += [chain[0] for chain in under_way.chains]


class _UnderWay:
    """Exchanges that have started, oldest first; together they hold at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: remaining legs of each
        self.chains: list[_Chain] = []

    @property
    def works(self) -> bool:
        """Whether any exchange has more left than a last wait."""
        return any(not self._only_waits(chain) for chain in self.chains)

    @staticmethod
    def _only_waits(chain: _Chain) -> bool:
        # Newton-Schulz follows the first wait, or where matrices do not travel, runs ahead of it.
        return len(chain) == 1 and (chain[0].level > 1 or not chain[0].work.travels)

    def start(self, chain: _Chain) -> Iterator[_Leg]:
        """Yield the first leg of ``chain``, after legs of older exchanges that make room for it."""
        while self.chains and sum(other[0].work.nbytes for other in self.chains) + chain[0].work.nbytes > self.limit:
            yield from self._go_on(self.chains[0])
        yield chain[0]
        self.chains.append(chain[1:])

    def hand_round(self) -> Iterator[_Leg]:
        """Yield the next leg of every exchange whose directions go on to the replica group."""
        for chain in list(self.chains):
            if chain[0].work.handed_round and not self._only_waits(chain):
                yield from self._go_on(chain)

    def advance(self) -> Iterator[_Leg]:
        """Yield the next leg of the oldest exchange that has more left than a last wait."""
        for chain in self.chains:
            if not self._only_waits(chain):
                yield from self._go_on(chain)
                return

    def _go_on(self, chain: _Chain) -> Iterator[_Leg]:
        self.chains.remove(chain)
        yield chain[0]
        if chain[1:]:
            self.chains.append(chain[1:])


# --- the new order ----------------------------------------------------------------------------------------------------


class _Order:
    """Nodes in their new order: inputs before their readers, the nodes of a leg together."""

    def __init__(self, legs: Iterable[_Leg]) -> None:
        self.nodes: list[Node] = []
        self.leg_of = {node: leg for leg in legs for node in leg.nodes}
        self._placed: set[Node] = set()

    def placed(self, node: Node) -> bool:
        return node in self._placed or node.op == "placeholder"

    def waits(self, node: Node) -> bool:
        """Whether ``node`` reads a node without a place."""
        return not all(self.placed(source) for source in node.all_input_nodes)

    def ready(self, leg: _Leg) -> bool:
        """Whether ``leg`` has no place yet and may be next: its inputs have places, or are sums of nodes that have."""

        def there(source: Node) -> bool:
            return self.placed(source) or (source.target is torch.ops.aten.add.Tensor and not self.waits(source))

        return not self.placed(leg.nodes[-1]) and all(map(there, leg.sources))

    def place(self, item: Node | _Leg) -> None:
        stack: list[Node | _Leg] = [item]
        while stack:
            current = stack[-1]
            nodes = current.nodes if isinstance(current, _Leg) else [current]
            if all(map(self.placed, nodes)):
                stack.pop()
                continue
            item_nodes = set(nodes)
            missing = [s for node in nodes for s in node.all_input_nodes if s not in item_nodes and not self.placed(s)]
            if missing:
                stack.append(self.leg_of.get(missing[0], missing[0]))
                continue
            self.nodes += nodes
            self._placed.update(nodes)
            stack.pop()


def _ordered(gm: GraphModule, plan: _Plan, legs: Sequence[_Leg]) -> list[Node]:
    order = _Order(legs)
    lists = (*plan.before.values(), *plan.after.values(), plan.ready, plan.end, plan.waits)
    moved = {leg for legs in lists for leg in legs}
    body = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    # Model nodes keep their order up to the last leg that stays; behind it, readers of moved legs come late.
    last = max((i for i, node in enumerate(body) if (leg := order.leg_of.get(node)) and leg not in moved), default=-1)
    late = []
    for position, node in enumerate(body):
        leg = order.leg_of.get(node)
        if leg is None:
            if position > last and order.waits(node):
                late.append(node)
            else:
                order.place(node)
        elif leg not in moved and not order.placed(node):
            for item in (*plan.before[leg], leg, *plan.after[leg]):
                order.place(item)
        for early in plan.ready:
            if order.ready(early):
                order.place(early)
    for leg in (*plan.end, *plan.ready):
        order.place(leg)
    for node in late:
        if not order.waits(node):
            order.place(node)
    for item in (*plan.waits, *late):
        order.place(item)
    return order.nodes


def _schedule(gm: GraphModule, ctx: PassContext) -> GraphModule:
    chains = _chains(gm)
    legs = [leg for each in chains.values() for chain in each for leg in chain]
    if not legs:
        return gm
    plan = _Plan()
    gathers = chains[Category.GATHER]
    largest = largest_bucket(sum(chain[0].work.nbytes for chain in gathers), ctx.options.bucket_bytes)
    gather_ahead(plan, gathers, ctx.kept.buckets * largest)  # the bucket in use and those ahead
    reduce_until_the_next(plan, chains[Category.REDUCE])
    exchange_when_reduced(plan, chains[Category.REDUCE], chains[Category.EXCHANGE], ctx.options.exchange_bytes)
    output = gm.graph.output_node()
    for node in _ordered(gm, plan, legs):
        output.prepend(node)
    return gm


SCHEDULE = GraphPass(
    "schedule", _schedule, requires=("lower",), conflicts=("await_refresh", "room", "verify"), kinds=LOWERED
)
