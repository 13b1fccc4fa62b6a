"""Run the graphs of one rank on one compute stream and several communication streams.

Nodes are issued in graph order. A kernel starts when the previous one ends. A collective starts when it is issued and
its stream is free: each process group has one, as in NCCL and Gloo. A wait blocks the compute stream until its
collective ends.

Collectives of several groups may share a link: their hops (latency) overlap, and n that send bytes over it at a time
each get 1/n of its bandwidth. A group uses the outermost link that its ranks need: over loopback one link serves all
groups, on GPUs a group inside a node has NVLink and a group across nodes the network adapter.

A bucket of offloaded state is waited for when it is opened (:mod:`.offload_transfers`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from torch.fx import Node

from compile_muon.offload.store import Bucket
from compile_muon.passes.collectives import Traffic, bytes_received, bytes_sent, collectives, is_wait, measure_traffic
from compile_muon.passes.exchange.packing import LIFT
from compile_muon.passes.joint.move import AWAIT_MOVE, BRING_BACK, MOVE_OUT
from compile_muon.passes.language.layout import Axis
from compile_muon.passes.language.work import Work, work_of
from compile_muon.passes.lowering.aliases import nbytes
from compile_muon.passes.pipeline import GraphKind
from compile_muon.simulate.cost import kernel_kind, kernel_seconds
from compile_muon.simulate.fusion import Kernel, fused_step, gpu_kernels, kernels
from compile_muon.simulate.machine import Machine
from compile_muon.simulate.memory import LiveBytes, Memory
from compile_muon.simulate.newton_schulz import Call
from compile_muon.simulate.offload_transfers import Move, OffloadTransfers, OnHost
from compile_muon.simulate.played import SimulatedGraph

#: names of the compute stream and of the host; each other stream has the name of its process group
COMPUTE, HOST = "compute", "host"
#: cause of waits for offloaded state, and first word of the streams that move it
OFFLOAD = "offload"
#: cause of waits for collectives of the model itself
_MODEL = "model"


@dataclass(frozen=True)
class Event:
    """An interval of work on a stream."""

    name: str
    category: str  # "product", "newton_schulz", "copy", "kernel" or "host"; of a collective, its purpose
    stream: str
    start: float  # seconds from the beginning of the step, like `end`
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step of one rank; `busy` and `exposed` add up to `seconds`."""

    seconds: float
    busy: float  # the compute stream at work
    exposed: Mapping[str, float]  # the compute stream waiting, by cause; "host" is one
    events: tuple[Event, ...]  # in order of their ends
    traffic: Traffic
    peak: LiveBytes  # where most bytes are live
    # by the ranks of a group, in order: (name of the collective that all its ranks share, how many of that name came
    # before) -> when this rank issued it
    issued: Mapping[tuple[int, ...], Mapping[tuple[str, int], float]]
    # part of `exposed` that waits for offloaded state, by where: "backward", "step"
    offload_waits: Mapping[str, float] = field(default_factory=dict)
    moved: tuple[int, int] = (0, 0)  # bytes of offloaded state that come to the device, and that go back


def simulate(
    graphs: Sequence[SimulatedGraph],
    machine: Machine,
    *,
    groups: Mapping[Axis, Sequence[int]],
    ranks: int,
    resident: Mapping[str, int] | None = None,
    codegen: str = "inductor",
    others: Mapping[tuple[int, ...], Sequence[float]] | None = None,
    transfers: OffloadTransfers | None = None,
) -> Timeline:
    """Simulate `graphs` one after the other, as one of many equal steps.

    `groups`: ranks of every process group that a collective names; `ranks`: size of the job, whose ranks share the
    cores of a CPU; `resident`: bytes by category that are live all the time (weights, optimizer state); `codegen`:
    "inductor", which fuses kernels, or "eager". `others`: ranks of a group -> when the last of the other ranks issues
    each of its collectives (:func:`~.together.simulate_together`); in groups without an entry all ranks keep the pace
    of this one. `transfers` carries out the moves of offloaded state.
    """
    machine = machine.shared_by(ranks)
    player = _Player(machine, groups, others or {}, transfers)
    memory, traffic = Memory(resident or {}, machine), Traffic()
    # The refresh, which forward finishes, comes first: the previous step has started it.
    ordered = sorted(graphs, key=lambda played: not played.finished_by_forward)
    last_run = {played.title: played for played in ordered}
    for played in ordered:
        generated = codegen == "inductor" and not played.eager
        on_gpu = machine.device == "cuda"
        launched = gpu_kernels(played.gm) if generated and on_gpu else kernels(played.gm, fuses=generated)
        memory.run(played, launched, generated=generated, last=last_run[played.title] is played)
        if on_gpu and played.fused:
            launched = fused_step(played.gm, {node for node, moves in played.moves.items() if moves})
        player.run(played, launched)
        if played.counted:
            traffic = traffic + measure_traffic(played.gm, groups)
    events = tuple(sorted(player.finish(), key=lambda event: (event.end, event.start)))
    moved = (0, 0) if transfers is None else (transfers.bytes_in, transfers.bytes_out)
    return Timeline(
        player.now, player.busy, dict(player.exposed), events, traffic, memory.peak,
        issued=dict(player.issued), offload_waits=dict(player.offload_waits), moved=moved,
    )  # fmt: skip


@dataclass(eq=False)
class _Sent:
    """A collective under way."""

    node: Node
    name: str
    stream: str
    link: int
    hops: float  # seconds of latency left
    transfer: float  # seconds of sending left, alone on its link
    issued: float
    others: float  # when the last of the other ranks issues it: it sends nothing before
    start: float = math.nan
    end: float = math.nan
    # no wait ends before: when a rank issues it that computes the same but lost its core for a while
    everyone: float = 0.0


@dataclass
class _Wires:
    """Collectives under way: each stream serves its own in order, and those that send over one link share it."""

    now: float = 0.0
    queues: dict[str, deque[_Sent]] = field(default_factory=dict)

    def issue(self, collective: _Sent) -> None:
        queue = self.queues.setdefault(collective.stream, deque())
        queue.append(collective)
        if len(queue) == 1:
            self._begin(collective, collective.issued)

    def _under_way(self) -> tuple[dict[_Sent, float], Counter[int]]:
        """Return the seconds until the head of each stream ends its hops or its transfer, and how many heads share each
        link."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        sharing = Counter(head.link for head in heads if not head.hops)
        return {head: head.hops or head.transfer * sharing[head.link] for head in heads}, sharing

    def advance(self, until: float, awaited: _Sent | None = None) -> None:
        """Let time pass to `until`, or to the end of `awaited` if that comes first."""
        while self.now < until and (awaited is None or math.isnan(awaited.end)):
            seconds_left, sharing = self._under_way()
            step = min(seconds_left.values(), default=math.inf)
            if math.isinf(passed := min(step, until - self.now)):
                return
            self.now = until if step > passed else self.now + step
            for head in seconds_left:
                over = seconds_left[head] == step == passed
                if head.hops:
                    head.hops = 0.0 if over else head.hops - passed
                else:
                    head.transfer = 0.0 if over else max(0.0, head.transfer - passed / sharing[head.link])
            for head in seconds_left:
                if not head.hops and not head.transfer:
                    head.end = self.now
                    queue = self.queues[head.stream]
                    queue.popleft()
                    if queue:
                        self._begin(queue[0], self.now)

    def until_next(self) -> float:
        """Return the seconds until a collective ends its hops or its transfer; infinite if none is under way."""
        return min(filter(None, self._under_way()[0].values()), default=math.inf)

    def _begin(self, collective: _Sent, now: float) -> None:
        """Start a collective whose stream is free; its hops last until the other ranks have issued it."""
        collective.start = now
        collective.hops += max(0.0, collective.others - now)


@dataclass
class _Player:
    machine: Machine
    groups: Mapping[Axis, Sequence[int]]
    others: Mapping[tuple[int, ...], Sequence[float]]
    transfers: OffloadTransfers | None
    now: float = 0.0
    host: float = 0.0  # time of the host, where the device runs behind it
    busy: float = 0.0
    exposed: dict[str, float] = field(default_factory=partial(defaultdict, float))
    offload_waits: dict[str, float] = field(default_factory=partial(defaultdict, float))
    issued: dict[tuple[int, ...], dict[tuple[str, int], float]] = field(default_factory=partial(defaultdict, dict))
    _graphs: int = 0
    # whether the host launches each kernel, and starts each collective, of the current graph
    _launches: bool = False
    _starts: bool = False
    _wires: _Wires = field(default_factory=_Wires)
    _events: list[Event] = field(default_factory=list)
    _sent: list[_Sent] = field(default_factory=list)
    _refreshes: dict[int, list[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._axes = {axis.group: (axis, tuple(ranks)) for axis, ranks in self.groups.items()}
        self._runs_behind = self.machine.device != "cpu"
        self._ways = self.transfers or OffloadTransfers((), buffers=1, host=self.machine.host_bandwidth, disk=0.0)

    def run(self, played: SimulatedGraph, kernel_of: Mapping[Node, Kernel]) -> None:
        self._graphs += 1
        self._starts = self._runs_behind and not played.replayed
        # Eager step code runs on GPUs as multi-tensor launches, which the nodes of the trace do not show.
        self._launches = self._starts and not played.eager
        began = self.host
        if played.parameters is not None or (self._runs_behind and not self._launches):
            self._on_host(f"{played.title} on the host", graph=1, parameter=played.parameters or 0)
        sending = dict(collectives(played.gm))
        collective_of: dict[Node, _Sent] = {}
        copied: dict[Node, float] = {}
        refresh_of = _finishing(played) if played.finished_by_forward else {}
        for node in played.gm.graph.nodes:
            for move, bucket in played.moves.get(node, ()):
                self._move(move, bucket, played.kind)
            if node in played.awaits:
                self._finish_refresh(played.awaits[node])
                continue
            if node in kernel_of:
                kind = kernel_kind(node)
                kernel = kernel_of[node]
                seconds = kernel_seconds(kernel.nodes, self.machine, kernel.moved)
                launched = Call(node, self.machine).launched() if kind == "newton_schulz" else 1
                act = partial(self._compute, node.name, kind, seconds, launched, self._slower(node, kind))
                if node.target in (MOVE_OUT, BRING_BACK):
                    host = node if node.target is MOVE_OUT else node.args[0]
                    act = partial(self._copy, node, "out" if host is node else "in", host, copied)
                elif node.target is AWAIT_MOVE:
                    act = partial(self._arrive, copied[node.args[1]])
                elif node.target is LIFT and self._runs_behind and self.machine.host_bandwidth:
                    act = partial(self._copy, node, "in", node, copied)
                else:
                    read = (x for of in kernel.nodes for view in of.all_input_nodes for x in view.all_input_nodes)
                    if behind := [copied[x] for x in read if x in copied]:
                        act = partial(self._landed, max(behind), act)
            elif is_wait(node) and node.args[0] in collective_of:
                act = partial(self._wait, node, collective_of[node.args[0]])
            else:
                if node in sending:
                    collective_of[node] = self._issue(node, sending[node], played.title)
                continue
            if node in refresh_of:
                self._refreshes.setdefault(refresh_of[node], []).append(act)
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
        """Let the host spend the time of these counts of :attr:`Machine.host_seconds`; none without an entry there."""
        seconds = sum(count * self.machine.host_seconds.get(kind, 0.0) for kind, count in counts.items())
        if self._runs_behind:
            self.host += seconds
        elif seconds:
            self._compute(name, "host", seconds)

    def _copy(self, node: Node, way: str, copy: Node, copied: dict[Node, float]) -> None:
        """Start a copy of the result of `node` to or from host memory; `copied[copy]` is its end."""
        copied[copy] = self._ways.travel(way, nbytes(node), max(self.now, self.host))

    def _arrive(self, until: float) -> None:
        """Wait for a copy."""
        if until > self.now:
            self._wires.advance(until)
            self._expose(OFFLOAD, until)

    def _landed(self, until: float, act: Callable[[], None]) -> None:
        """Wait for the copies that `act` reads, then run it."""
        self._arrive(until)
        act()

    def _expose(self, cause: str, until: float) -> None:
        """Let the compute stream wait until then, and count the wait under `cause`."""
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
        """Return the factor by which a collective that holds multiprocessors lengthens a kernel; 1 if memory-bound."""
        comm_processors = self.machine.collective_processors
        if not comm_processors or kind not in ("product", "newton_schulz") or not self._wires.queues:
            return 1.0
        if kind == "newton_schulz":
            return Call(node, self.machine).slower()
        return self.machine.processors / (self.machine.processors - comm_processors)

    def _pass(self, seconds: float, slower: float) -> None:
        """Let `seconds` of work pass, `slower` times as long while a collective is under way."""
        if slower == 1.0:
            self.now += seconds
            return
        self._wires.advance(self.now)
        while math.isfinite(change := self._wires.until_next()) and change < seconds * slower:
            seconds -= change / slower
            # Without nextafter, a remainder below the clock's resolution would loop forever.
            self.now = max(self.now + change, math.nextafter(self.now, math.inf))
            self._wires.advance(self.now)
        self.now += seconds * slower if math.isfinite(change) else seconds

    def _issue(self, node: Node, kind: str, title: str) -> _Sent:
        axis, ranks = self._axes[node.args[-1]]
        nbytes = bytes_sent(node, kind, axis)
        if "all_to_all" in str(node.target):
            # Also a reduce-scatter lowered to an all-to-all, whose sum is a node of its own. The busier way counts: a
            # rank that owns nothing sends no directions back, and still waits for those it receives.
            received = bytes_received(node, axis)
            # On loopback all ranks share one link, so the average of both directions counts.
            shared = self.machine.device == "cpu"
            kind, nbytes = "all_to_all", (nbytes + received) // 2 if shared else max(nbytes, received)
        hops, transfer = self.machine.collective_parts(kind, nbytes, ranks)
        work = work_of(node)
        name = f"{title} {_cause(work)}" + (f" {work.bucket}" if work else f" {node.name}")
        issued = self.issued[ranks]
        if self._starts:
            self._on_host(name, collective=1)
        # Not before the host starts it, if the host has fallen behind the device.
        others = max(self.now, self.host, self.others[ranks][len(issued)] if ranks in self.others else self.now)
        # Names that all ranks agree on: frames are numbered by process, and nodes may have other names elsewhere.
        shared_name = f"graph {self._graphs} {_cause(work)}" + (f" {work.bucket}" if work else "")
        issued[shared_name, next(number for number in count() if (shared_name, number) not in issued)] = self.now
        collective = _Sent(node, name, axis.group, self._link(ranks), hops, transfer, self.now, others)
        self._wires.advance(self.now)
        self._wires.issue(collective)
        self._sent.append(collective)
        if not self._runs_behind:
            self._on_host(name, collective=1, byte=nbytes)
        collective.everyone = self.now + self.machine.late_seconds
        return collective

    def _wait(self, node: Node, collective: _Sent) -> None:
        self._wires.advance(self.now)
        self._wires.advance(math.inf, collective)
        self._expose(_cause(work_of(node)), max(collective.end, collective.everyone))

    def _move(self, move: Move, bucket: Bucket | OnHost | None, kind: GraphKind) -> None:
        if self.transfers is None:
            return
        ready = self.transfers.play(move, bucket, self.now)
        if ready > self.now:
            self.offload_waits[kind.value] += ready - self.now
        self._expose(OFFLOAD, ready)

    def _link(self, ranks: Sequence[int]) -> int:
        """Return the number of the innermost link that joins these ranks; the last link of a machine joins all."""
        blocks = [{rank // link.within if link.within else 0 for rank in ranks} for link in self.machine.links]
        return next(number for number, block in enumerate(blocks) if len(block) == 1)

    def finish(self) -> list[Event]:
        for number in list(self._refreshes):  # refreshes that no forward has waited for
            self._finish_refresh(number)
        self._wires.advance(math.inf)
        for sent in self._sent:
            self._events.append(Event(sent.name, _cause(work_of(sent.node)), sent.stream, sent.start, sent.end))
        for way, start, end in self._ways.travels:
            self._events.append(Event(f"{OFFLOAD} {way}", OFFLOAD, f"{OFFLOAD} {way}", max(start, 0.0), end))
        return self._events


def _finishing(played: SimulatedGraph) -> dict[Node, int]:
    """Return the nodes that finish each refresh, from its last wait on, with the number of the refresh."""
    finishing: dict[int, list[Node]] = {}
    for node in played.gm.graph.nodes:
        work = work_of(node)
        if work is not None and (is_wait(node) or work.bucket in finishing):
            # A gather over a second mesh dimension starts behind the wait for the first: the last wait counts.
            finishing[work.bucket] = [node] if is_wait(node) else [*finishing[work.bucket], node]
    return {node: number for number, nodes in finishing.items() for node in nodes}


def _cause(work: Work | None) -> str:
    return _MODEL if work is None else work.category.value


def to_chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the JSON that chrome://tracing and Perfetto read: a row for each stream, times in microseconds."""
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
