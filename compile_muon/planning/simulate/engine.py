"""Graphs of one rank on one compute stream and several communication streams.

Nodes are issued in graph order. A kernel starts when the one before it is done; a collective when it is issued and its
stream is free, and nothing is computed between a wait and the end of what it waits for. Each process group has a
stream, as NCCL and Gloo serve them.

Collectives of several groups at a time share a link: their hops go on side by side, and of n that send bytes over the
same link each gets an n-th of it. The link of a group is the outermost that its ranks need: over loopback that is one
for all groups, on GPUs those inside a node have NVLink and those across nodes have the adapter.

What opens a bucket of offloaded state waits for it (:mod:`.offload_transfers`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from torch.fx import GraphModule, Node

from compile_muon.offload.store import Bucket
from compile_muon.passes.collectives import Traffic, bytes_received, bytes_sent, collectives, is_wait, measure_traffic
from compile_muon.passes.exchange.lift import LIFT
from compile_muon.passes.language.layout import Axis
from compile_muon.passes.language.work import Work, work_of
from compile_muon.passes.lowering.aliases import nbytes
from compile_muon.passes.pipeline import GraphKind, PassContext
from compile_muon.planning.machine import Machine
from compile_muon.planning.simulate.cost import kernel_kind, kernel_seconds
from compile_muon.planning.simulate.fusion import Kernel, fused_step, gpu_kernels, kernels, moved_bytes
from compile_muon.planning.simulate.memory import Held, Memory
from compile_muon.planning.simulate.newton_schulz import Call
from compile_muon.planning.simulate.offload_transfers import Move, Moves, OffloadTransfers, OnHost

__all__ = ["COMPUTE", "HOST", "OFFLOAD", "Event", "Played", "Timeline", "simulate", "to_chrome_trace"]

#: names of the compute stream and of what the host does beside it; other streams have those of their groups
COMPUTE, HOST = "compute", "host"
#: why a rank waits for offloaded state, and the first word of the streams of that
OFFLOAD = "offload"
#: why a rank waits for collectives that no pass inserted
_MODEL = "model"


@dataclass(frozen=True)
class Played:
    """A lowered graph and its part in the step.

    Args:
        kind: its role.
        frame: name that forward and backward of a frame share.
        user_outputs: of a forward graph: how many outputs are the model's; the rest is saved for backward.
        drops: categories of memory that are let go ahead of it.
        eager: nothing compiles it: every node is a kernel of its own.
        counted: its bytes are traffic, as an optimizer counts its own.
        finished_by_forward: its gathers are waited for by forward graphs of the step behind it.
        awaits: of a forward graph: its nodes that wait for such a gather, and the number of each.
        parameters: that its caller looks after; None where it is a part of another's call.
        waits: the host waits for the device behind it.
        replayed: a CUDA graph, which the host starts at once.
        fused: of eager code: on GPUs one kernel does what lies between two moves, for all parameters.
        moves: what is asked for of offloaded state, ahead of a node.
    """

    gm: GraphModule
    kind: GraphKind
    frame: str = "frame"
    user_outputs: int = 0
    drops: tuple[str, ...] = ()
    eager: bool = False
    counted: bool = True
    finished_by_forward: bool = False
    awaits: Mapping[Node, int] = field(default_factory=dict)
    parameters: int | None = None
    waits: bool = False
    replayed: bool = False
    fused: bool = False
    moves: Mapping[Node, Moves] = field(default_factory=dict)

    @classmethod
    def of(cls, gm: GraphModule, ctx: PassContext) -> Played:
        """A graph that the lowering passes have run over."""
        return cls(gm, ctx.kind, ctx.frame, ctx.user_outputs)

    @property
    def title(self) -> str:
        return f"{self.frame}.{self.kind.value}"


@dataclass(frozen=True)
class Event:
    """``name`` ran on ``stream`` from ``start`` to ``end``, in seconds from the beginning of the step.

    Args:
        category: "product", "newton_schulz", "copy", "kernel" or "host"; of a collective, what it is for.
    """

    name: str
    category: str
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Args:
        seconds: all of it.
        busy: of them, with the compute stream at work.
        exposed: of them, with the compute stream waiting, by what the wait is for, of which one is the "host"; with
            ``busy`` they are all.
        events: in order of their ends.
        traffic: as :func:`~..collectives.measure_traffic` counts.
        peak: the most that is live at a time.
        issued: by a group's ranks, its collectives in order: what all of these call each, how many of that name are
            ahead of it, and when it was issued.
        offload_waits: of ``exposed``, what waits for offloaded state, by where: "backward", "step".
        moved: bytes of offloaded state that come to the device, and go back.
    """

    seconds: float
    busy: float
    exposed: Mapping[str, float]
    events: tuple[Event, ...]
    traffic: Traffic
    peak: Held
    issued: Mapping[tuple[int, ...], Mapping[tuple[str, int], float]]
    offload_waits: Mapping[str, float] = field(default_factory=dict)
    moved: tuple[int, int] = (0, 0)


def simulate(
    graphs: Sequence[Played],
    machine: Machine,
    *,
    groups: Mapping[Axis, Sequence[int]],
    ranks: int,
    resident: Mapping[str, int] | None = None,
    codegen: str = "inductor",
    others: Mapping[tuple[int, ...], Sequence[float]] | None = None,
    transfers: OffloadTransfers | None = None,
) -> Timeline:
    """Play ``graphs`` one behind the other, as a step among others like it.

    What is finished by forward comes first: the step before has started it.

    Args:
        machine: that every rank of the job runs on.
        groups: every process group that a collective names, and the ranks of the job in it.
        ranks: of the job; on machines whose ranks share cores all are at work.
        resident: bytes by category that are live all the time: weights, optimizer state.
        codegen: what compiles the graphs: "inductor", which fuses kernels, or "eager".
        others: by a group's ranks, when the last of the others issues each of its collectives, which does not begin
            before (:func:`~.together.simulate_together`); of groups that are not in it all ranks keep this one's pace.
        transfers: plays what moves of offloaded state the graphs have.
    """
    machine = machine.shared_by(ranks)
    player = _Player(machine, groups, others or {}, transfers)
    memory = Memory(resident or {}, machine)
    traffic = Traffic()
    for played in sorted(graphs, key=lambda played: not played.finished_by_forward):
        found = kernels(played.gm, "eager" if played.eager else codegen)
        player.run(played, _timed(played, found, machine, codegen))
        for category in played.drops:
            memory.drop(category)
        roots = {node: root for root, members in found.items() for node in members}
        memory.run(played.gm, played.kind, played.frame, played.user_outputs, roots, replayed=played.replayed)
        if played.counted:
            traffic = traffic + measure_traffic(played.gm, groups)
    events = tuple(sorted(player.finish(), key=lambda event: (event.end, event.start)))
    return Timeline(
        player.now, player.busy, dict(player.exposed), events, traffic, memory.peak,
        issued=dict(player.issued),
        offload_waits=dict(player.offload_waits),
        moved=(0, 0) if transfers is None else (transfers.bytes_in, transfers.bytes_out),
    )  # fmt: skip


def _timed(played: Played, found: Mapping[Node, list[Node]], machine: Machine, codegen: str) -> Mapping[Node, Kernel]:
    """The kernels whose time counts: on GPUs by the rules of what makes them there."""
    if machine.device == "cuda" and played.fused:
        return fused_step(played.gm, {node for node, moves in played.moves.items() if moves})
    if machine.device == "cuda" and codegen == "inductor" and not played.eager:
        return gpu_kernels(played.gm)
    return {root: Kernel(members, moved_bytes(members)) for root, members in found.items()}


@dataclass(eq=False)
class _Sent:
    """A collective from its issue on; ``hops`` and ``transfer`` are the seconds that are left of each.

    It does not begin before ``others``, when the last of the other ranks issues it as they were played, and no wait for
    it ends before ``everyone``: how much later than that a rank may come that computes the same.
    """

    node: Node
    name: str
    stream: str
    link: int
    hops: float
    transfer: float
    issued: float
    others: float
    start: float = math.nan
    end: float = math.nan
    everyone: float = 0.0


@dataclass
class _Wires:
    """Collectives under way: streams are served in order, and what sends over one link at a time shares it."""

    now: float = 0.0
    queues: dict[str, deque[_Sent]] = field(default_factory=dict)

    def issue(self, sent: _Sent) -> None:
        queue = self.queues.setdefault(sent.stream, deque())
        queue.append(sent)
        if len(queue) == 1:
            self._begin(sent, sent.issued)

    def _under_way(self) -> tuple[dict[_Sent, float], Counter[int]]:
        """Of the first of each stream the seconds until it ends, or goes on to its bytes; and how many share a link."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        sharing = Counter(head.link for head in heads if not head.hops)
        return {head: head.hops or head.transfer * sharing[head.link] for head in heads}, sharing

    def advance(self, until: float, awaited: _Sent | None = None) -> None:
        """Let time pass to ``until``, or to the end of ``awaited`` if that comes before."""
        while self.now < until and (awaited is None or math.isnan(awaited.end)):
            left, sharing = self._under_way()
            step = min(left.values(), default=math.inf)
            if math.isinf(passed := min(step, until - self.now)):
                return
            self.now = until if step > passed else self.now + step
            for head in left:
                over = left[head] == step == passed
                if head.hops:
                    head.hops = 0.0 if over else head.hops - passed
                else:
                    head.transfer = 0.0 if over else max(0.0, head.transfer - passed / sharing[head.link])
            for head in left:
                if not head.hops and not head.transfer:
                    head.end = self.now
                    queue = self.queues[head.stream]
                    queue.popleft()
                    if queue:
                        self._begin(queue[0], self.now)

    def until_next(self) -> float:
        """Seconds until something under way ends, or goes on to its bytes; infinite where nothing is under way."""
        return min(filter(None, self._under_way()[0].values()), default=math.inf)

    def _begin(self, sent: _Sent, now: float) -> None:
        """Its stream is free; where others have not come yet it sends nothing until they have."""
        sent.start = now
        sent.hops += max(0.0, sent.others - now)


class _Player:
    def __init__(
        self,
        machine: Machine,
        groups: Mapping[Axis, Sequence[int]],
        others: Mapping[tuple[int, ...], Sequence[float]],
        transfers: OffloadTransfers | None,
    ) -> None:
        self.machine = machine
        self.groups = {axis.group: (axis, tuple(ranks)) for axis, ranks in groups.items()}
        self.others = others
        self.issued: dict[tuple[int, ...], dict[tuple[str, int], float]] = defaultdict(dict)
        self._graphs = 0
        self.now = 0.0
        #: the host's, where the device runs behind it
        self.host = 0.0
        self._runs_behind = machine.device != "cpu"
        #: whether it launches each kernel, and starts each collective, of the graph
        self._launches = self._starts = False
        self.busy = 0.0
        self.exposed: dict[str, float] = defaultdict(float)
        self.transfers = transfers
        self._ways = transfers or OffloadTransfers((), buffers=1, host=machine.host_bandwidth, disk=0.0)
        self.offload_waits: dict[str, float] = defaultdict(float)
        self._wires = _Wires()
        self._events: list[Event] = []
        self._sent: list[_Sent] = []
        self._refreshes: dict[int, list[Callable[[], None]]] = {}

    def run(self, played: Played, found: Mapping[Node, Kernel]) -> None:
        self._graphs += 1
        self._starts = self._runs_behind and not played.replayed
        # What is eager in a step GPUs do in launches for many parameters at once, of which the trace knows nothing.
        self._launches = self._starts and not played.eager
        began = self.host
        if played.parameters is not None or (self._runs_behind and not self._launches):
            self._on_host(f"{played.title} on the host", graph=1, parameter=played.parameters or 0)
        sending = dict(collectives(played.gm))
        sent: dict[Node, _Sent] = {}
        lifted: dict[Node, float] = {}
        late = _finishing(played) if played.finished_by_forward else {}
        for node in played.gm.graph.nodes:
            for move, bucket in played.moves.get(node, ()):
                self._move(move, bucket, played.kind)
            if node in played.awaits:
                self._finish_refresh(played.awaits[node])
                continue
            if node in found:
                kind = kernel_kind(node)
                kernel = found[node]
                seconds = kernel_seconds(kernel.nodes, self.machine, kernel.moved)
                launched = Call(node, self.machine).launched() if kind == "newton_schulz" else 1
                act = partial(self._compute, node.name, kind, seconds, launched, self._slower(node, kind))
                if node.target is LIFT and self._runs_behind and self.machine.host_bandwidth:
                    act = partial(self._lift, node, lifted)
                else:
                    read = (x for of in kernel.nodes for view in of.all_input_nodes for x in view.all_input_nodes)
                    if behind := [lifted[x] for x in read if x in lifted]:
                        act = partial(self._landed, max(behind), act)
            elif is_wait(node) and node.args[0] in sent:
                act = partial(self._wait, node, sent[node.args[0]])
            else:
                if node in sending:
                    sent[node] = self._issue(node, sending[node], played.title)
                continue
            if node in late:
                self._refreshes.setdefault(late[node], []).append(act)
            else:
                act()
        if self.host > began:
            self._events.append(Event(f"{played.title} on the host", "host", HOST, began, self.host))
        if played.waits:
            self.host = max(self.host, self.now)

    def _finish_refresh(self, number: int) -> None:
        for act in self._refreshes.pop(number, ()):
            act()

    def _on_host(self, name: str, **counts: float) -> None:
        """As many of each kind of :attr:`Machine.host_seconds`; nothing on machines without them."""
        seconds = sum(count * self.machine.host_seconds.get(kind, 0.0) for kind, count in counts.items())
        if self._runs_behind:
            self.host += seconds
        elif seconds:
            self._compute(name, "host", seconds)

    def _lift(self, node: Node, lifted: dict[Node, float]) -> None:
        """Begin to copy shards of a bucket."""
        lifted[node] = self._ways.travel("in", nbytes(node), max(self.now, self.host))

    def _landed(self, until: float, act: Callable[[], None]) -> None:
        """Do what reads copies that are there then."""
        if until > self.now:
            self._wires.advance(until)
            self._expose(OFFLOAD, until)
        act()

    def _expose(self, cause: str, until: float) -> None:
        """Wait until then, if it is not past."""
        if until > self.now:
            self.exposed[cause] += until - self.now
            self.now = until

    def _compute(self, name: str, category: str, seconds: float, launched: int = 0, slower: float = 1.0) -> None:
        if self._launches:
            self._on_host(name, **{category: launched})
        self._expose(HOST, self.host)
        start = self.now
        self._pass(seconds, slower)
        self.busy += self.now - start
        self._events.append(Event(name, category, COMPUTE, start, self.now))

    def _slower(self, node: Node, kind: str) -> float:
        """How many times as long a kernel takes while a collective holds multiprocessors: memory does not care."""
        held = self.machine.collective_processors
        if not held or kind not in ("product", "newton_schulz") or not self._wires.queues:
            return 1.0
        if kind == "newton_schulz":
            return Call(node, self.machine).slower()
        return self.machine.processors / (self.machine.processors - held)

    def _pass(self, seconds: float, slower: float) -> None:
        """Let ``seconds`` of work pass, ``slower`` times as long while anything is under way."""
        if slower == 1.0:
            self.now += seconds
            return
        self._wires.advance(self.now)
        while math.isfinite(change := self._wires.until_next()) and change < seconds * slower:
            seconds -= change / slower
            # By rounding something may be left that is less than one step of the clock.
            self.now = max(self.now + change, math.nextafter(self.now, math.inf))
            self._wires.advance(self.now)
        self.now += seconds * slower if math.isfinite(change) else seconds

    def _issue(self, node: Node, kind: str, title: str) -> _Sent:
        axis, ranks = self.groups[node.args[-1]]
        nbytes = bytes_sent(node, kind, axis)
        if "all_to_all" in str(node.target):
            # A reduction that is made of one has its sum in the graph. Who owns nothing still waits for what it takes.
            received = bytes_received(node, axis)
            # Ranks of one machine send over the same loopback, where what one takes more another takes less.
            shared = self.machine.device == "cpu"
            kind, nbytes = "all_to_all", (nbytes + received) // 2 if shared else max(nbytes, received)
        hops, transfer = self.machine.collective_parts(kind, nbytes, ranks)
        work = work_of(node)
        name = f"{title} {_cause(work)}" + (f" {work.bucket}" if work else f" {node.name}")
        issued = self.issued[ranks]
        if self._starts:
            self._on_host(name, collective=1)
        # Behind the host, if that has fallen behind the device.
        others = max(self.now, self.host, self.others[ranks][len(issued)] if ranks in self.others else self.now)
        # Frames are counted by process, and nodes of the model may have other names on other ranks.
        called = f"graph {self._graphs} {_cause(work)}" + (f" {work.bucket}" if work else "")
        issued[called, next(number for number in count() if (called, number) not in issued)] = self.now
        sent = _Sent(node, name, axis.group, self._link(ranks), hops, transfer, self.now, others)
        self._wires.advance(self.now)
        self._wires.issue(sent)
        self._sent.append(sent)
        if not self._runs_behind:
            self._on_host(name, collective=1, byte=nbytes)
        sent.everyone = self.now + self.machine.late_seconds
        return sent

    def _wait(self, node: Node, sent: _Sent) -> None:
        self._wires.advance(self.now)
        self._wires.advance(math.inf, sent)
        self._expose(_cause(work_of(node)), max(sent.end, sent.everyone))

    def _move(self, move: Move, bucket: Bucket | OnHost | None, kind: GraphKind) -> None:
        if self.transfers is None:
            return
        ready = self.transfers.play(move, bucket, self.now)
        if ready > self.now:
            self.offload_waits[kind.value] += ready - self.now
        self._expose(OFFLOAD, ready)

    def _link(self, ranks: Sequence[int]) -> int:
        """The innermost that joins them; the last one of a machine joins all."""
        blocks = [{rank // link.within if link.within else 0 for rank in ranks} for link in self.machine.links]
        return next(number for number, block in enumerate(blocks) if len(block) == 1)

    def finish(self) -> list[Event]:
        for number in list(self._refreshes):  # those that no forward has waited for
            self._finish_refresh(number)
        self._wires.advance(math.inf)
        for sent in self._sent:
            self._events.append(Event(sent.name, _cause(work_of(sent.node)), sent.stream, sent.start, sent.end))
        for way, start, end in self._ways.travels:
            self._events.append(Event(f"{OFFLOAD} {way}", OFFLOAD, f"{OFFLOAD} {way}", max(start, 0.0), end))
        return self._events


def _finishing(played: Played) -> dict[Node, int]:
    """The nodes of each refresh from its last wait on, with its number."""
    found: dict[int, list[Node]] = {}
    for node in played.gm.graph.nodes:
        work = work_of(node)
        if work is not None and (is_wait(node) or work.bucket in found):
            # A gather over a second axis starts behind the wait for the first.
            found[work.bucket] = [node] if is_wait(node) else [*found[work.bucket], node]
    return {node: number for number, nodes in found.items() for node in nodes}


def _cause(work: Work | None) -> str:
    return _MODEL if work is None else work.category.value


def to_chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """What chrome://tracing and Perfetto read, as JSON: a row for each stream, times in microseconds."""
    streams = [COMPUTE, *sorted({event.stream for event in timeline.events} - {COMPUTE})]
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": stream}}
        for row, stream in enumerate(streams)
    ]
    for event in timeline.events:
        when = {"ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
        row = {"pid": 0, "tid": streams.index(event.stream)}
        rows.append({"ph": "X", "name": event.name, "cat": event.category, **row, **when})
    return {"traceEvents": rows}
