"""When collectives start and are waited for: the order of a lowered graph, the same on every rank.

Lowering puts each bucket's way through a graph (:class:`~..work.Work`) in one piece where it is due. Here it is cut at
its waits into *legs*, and the legs are placed among the model's own nodes:

========== ============================================= ===========================================
category   the leg that stays where lowering put it      the others
========== ============================================= ===========================================
gather     the last, ahead of the first reader           start ahead of that of a gather before it, and lift
                                                         from host memory when the one before it starts
reduce     the first, at the bucket's last gradient      wait until the next bucket has started
exchange   none                                          see below
========== ============================================= ===========================================

An exchange starts as soon as the reductions it needs are done, and travels under the rest of backward. Newton-Schulz
follows when all gradients are computed, while the last reductions and exchanges are still under way; the way back of a
bucket travels during Newton-Schulz of those behind it; what is waited for last is waited for last. Buffers of exchanges
under way are bounded: where the next would not fit, the oldest goes on first.

Where directions are handed round among replicas, which is most of what Newton-Schulz sends and over the slowest links,
that travels under backward too: a bucket goes on, to Newton-Schulz and further, whenever others start. Those that start
together go on together, a reduction later, since an owner begins the way back by its Newton-Schulz later than the rest
of its company, who would wait for it at once otherwise. The last bucket is left for the end.

What meets nobody comes last, but for momenta that are fetched from elsewhere: their directions are made as soon as the
gradients are there, so that momenta come and go under backward.

Places are given by the order of buckets and legs alone. How many nodes a rank has between them, or whether it owns
anything, makes no difference, so ranks meet in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from ..collectives import is_wait
from ..exchange.lift import LIFT
from ..language.holder import FETCH
from ..language.work import Category, Work, work_of
from ..pipeline import LOWERED, GraphPass, PassContext
from .buckets import largest_bucket

__all__ = ["SCHEDULE"]


@dataclass(eq=False)
class _Leg:
    """Nodes of one bucket from a wait, or its beginning, to the start of the next collective, or its end."""

    work: Work
    level: int
    nodes: list[Node] = field(default_factory=list)

    @property
    def fetches(self) -> bool:
        """Whether it waits for momenta that are elsewhere."""
        return any(node.target is FETCH for node in self.nodes)

    @property
    def lifts(self) -> bool:
        """Whether it only begins to copy shards from host memory."""
        return self.nodes[-1].target is LIFT

    @cached_property
    def sources(self) -> list[Node]:
        """What it reads of others."""
        own = set(self.nodes)
        return [source for node in self.nodes for source in node.all_input_nodes if source not in own]


_Chain = list[_Leg]


@dataclass
class _Plan:
    """Where legs go: around those that stay, and at the end of the graph.

    Args:
        ready: wherever all that they read is there.
        end: behind all nodes of the model that wait for nothing of ours.
        waits: behind those that only read what is there by then.
    """

    before: dict[_Leg, list[_Leg]] = field(default_factory=lambda: defaultdict(list))
    after: dict[_Leg, list[_Leg]] = field(default_factory=lambda: defaultdict(list))
    ready: list[_Leg] = field(default_factory=list)
    end: list[_Leg] = field(default_factory=list)
    waits: list[_Leg] = field(default_factory=list)


def _chains(gm: GraphModule) -> dict[Category, list[_Chain]]:
    """Every bucket's legs, by bucket."""
    found: dict[Work, _Chain] = {}
    for node in gm.graph.nodes:
        work = work_of(node)
        if work is None:
            continue
        chain = found.setdefault(work, [])
        if not chain or is_wait(node) or (chain[-1].lifts and node.target is not LIFT):
            chain.append(_Leg(work, len(chain)))
        chain[-1].nodes.append(node)
    for work, chain in found.items():
        # Ranks of a company that owns nothing of a bucket only take what others hand round: the last legs.
        missing = work.hops + 1 - len(chain)
        if missing > 0 and work.category is Category.EXCHANGE:
            found[work] = [_Leg(work, level) for level in range(missing)] + chain
            for leg in chain:
                leg.level += missing
    ordered = sorted(found.items(), key=lambda item: item[0].bucket)
    return {category: [chain for work, chain in ordered if work.category is category] for category in Category}


# --- preferences ------------------------------------------------------------------------------------------------------


def gather_ahead(plan: _Plan, gathers: Sequence[_Chain], limit: int) -> None:
    """A bucket is gathered while the one ahead of it is in use, or earlier, as long as it and those ahead that have
    not been used yet have no more than ``limit`` bytes. What it lifts from host memory comes while the one ahead of it
    is gathered."""
    sizes = [chain[0].work.nbytes for chain in gathers]
    earliest, place = 0, plan.before[gathers[0][-1]] if gathers else []
    for number, (*starts, _) in enumerate(gathers):
        while earliest < number - 1 and sum(sizes[earliest : number + 1]) > limit:
            earliest += 1
        place += [leg for leg in starts if leg.lifts]
        place = plan.before[gathers[earliest][-1]]
        place += [leg for leg in starts if not leg.lifts]


def reduce_until_the_next(plan: _Plan, reductions: Sequence[_Chain]) -> None:
    """A reduction is waited for when the next has started; over a second axis it goes on there."""
    left = []
    for number, (_, *others) in enumerate(reductions):
        for leg in others:
            if number + leg.level < len(reductions):
                plan.after[reductions[number + leg.level][0]].append(leg)
            else:
                left.append(leg)
    plan.end += sorted(left, key=lambda leg: (leg.work.bucket + leg.level, leg.work.bucket))


def exchange_when_reduced(plan: _Plan, reductions: Sequence[_Chain], exchanges: Sequence[_Chain], limit: int) -> None:
    """Matrices travel behind the last reduction they need; Newton-Schulz and the way back come at the end."""
    waiting = list(exchanges)
    done: set[int] = set()
    under_way = _UnderWay(limit)

    def ready(*, travels: bool) -> list[_Chain]:
        return [c for c in waiting if len(c) > 1 and c[0].work.travels is travels and c[0].work.needs <= done]

    def started(chains: Sequence[_Chain]) -> Iterator[_Leg]:
        for chain in chains:
            waiting.remove(chain)
            yield from under_way.start(chain)

    def reduced(leg: _Leg, *, under_backward: bool) -> Iterator[_Leg]:
        """``leg`` of a reduction, and the exchanges that waited for it."""
        yield leg
        if leg not in ends:
            return
        done.add(leg.work.bucket)
        travelling = [chain for chain in ready(travels=True) if chain[0].work.needs]
        local = [chain for chain in ready(travels=False) if chain[0].work.needs][:-1]
        if under_backward and (travelling or local):
            yield from under_way.hand_round()
        yield from started(travelling)
        yield from started(local)

    ends = {chain[-1] for chain in reductions}
    for start, *_ in reductions:
        legs = (start, *plan.after[start])
        _, *plan.after[start] = (found for leg in legs for found in reduced(leg, under_backward=True))
    left, plan.end = plan.end, []
    for leg in left:  # Newton-Schulz of the oldest, while the last reductions are under way
        plan.end += under_way.advance() if under_way.works else started(ready(travels=False)[:1])
        plan.end += reduced(leg, under_backward=False)
    plan.end += started(ready(travels=True))
    plan.end += started(ready(travels=False))
    while under_way.works:
        plan.end += under_way.advance()
    alone = [leg for chain in waiting for leg in chain]  # that meet nobody
    plan.ready += [leg for leg in alone if leg.fetches]
    plan.end += [leg for leg in alone if not leg.fetches]
    plan.waits += [chain[0] for chain in under_way.chains]


class _UnderWay:
    """Exchanges that have started, oldest first.

    Args:
        limit: bytes that they may hold together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: what is left of each
        self.chains: list[_Chain] = []

    @property
    def works(self) -> bool:
        """Whether any has more to do than to be waited for."""
        return any(not self._only_waits(chain) for chain in self.chains)

    @staticmethod
    def _only_waits(chain: _Chain) -> bool:
        # Newton-Schulz comes behind the first wait, or ahead of it.
        return len(chain) == 1 and (chain[0].level > 1 or not chain[0].work.travels)

    def start(self, chain: _Chain) -> Iterator[_Leg]:
        """The first leg of ``chain``, behind what makes room for it."""
        while self.chains and sum(other[0].work.nbytes for other in self.chains) + chain[0].work.nbytes > self.limit:
            yield from self._go_on(self.chains[0])
        yield chain[0]
        self.chains.append(chain[1:])

    def hand_round(self) -> Iterator[_Leg]:
        """The next leg of all whose directions are handed round, towards that."""
        for chain in list(self.chains):
            if chain[0].work.handed_round and not self._only_waits(chain):
                yield from self._go_on(chain)

    def advance(self) -> Iterator[_Leg]:
        """The next leg of the oldest that has more to do than to be waited for, if any."""
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
    """Nodes in their new order, each behind what it reads; a leg comes in one piece."""

    def __init__(self, legs: Iterable[_Leg]) -> None:
        self.nodes: list[Node] = []
        self.leg_of = {node: leg for leg in legs for node in leg.nodes}
        self._placed: set[Node] = set()

    def placed(self, node: Node) -> bool:
        return node in self._placed or node.op == "placeholder"

    def waits(self, node: Node) -> bool:
        """Whether ``node`` reads what has no place yet."""
        return not all(self.placed(source) for source in node.all_input_nodes)

    def ready(self, leg: _Leg) -> bool:
        """Whether ``leg`` has no place yet, and may have the next: what it reads is there, or is a sum of what is."""

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
            own = set(nodes)
            missing = [s for node in nodes for s in node.all_input_nodes if s not in own and not self.placed(s)]
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
    gather_ahead(plan, gathers, 2 * largest)
    reduce_until_the_next(plan, chains[Category.REDUCE])
    exchange_when_reduced(plan, chains[Category.REDUCE], chains[Category.EXCHANGE], ctx.options.exchange_bytes)
    output = gm.graph.output_node()
    for node in _ordered(gm, plan, legs):
        output.prepend(node)
    return gm


SCHEDULE = GraphPass(
    "schedule", _schedule, requires=("lower",), conflicts=("await_refresh", "room", "verify"), kinds=LOWERED
)
