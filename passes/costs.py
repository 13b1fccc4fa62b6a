"""The cost model of a machine that decisions need: the time to start a collective and to run Newton-Schulz.

Bucket sizes and owners follow from one :class:`Costs`, equal on every rank. ``compile_muon.config.machine`` reads it
from a machine's file; the planner has a larger model (``compile_muon.simulate.machine``). docs/reference/machines.md
describes both for users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from . import formulas
from .language.layout import Layout
from .language.spec import MuonSpec

if TYPE_CHECKING:
    from typing_extensions import Self

#: kinds of :meth:`Costs.collective_seconds`, as :mod:`.collectives` counts them
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

#: bytes of a collective whose start is no longer than its transfer, on links of any machine
_LARGE = 2.0**28

#: ``(at, value)`` in rising order of ``at``, both positive
Table = tuple[tuple[float, float], ...]


def interpolated(table: Table, at: float) -> float:
    """Interpolate ``table`` at ``at``, linearly in logarithms; outside, return the value of the nearest end."""
    low, value = table[0]
    if at <= low:
        return value
    for high, next_value in table[1:]:
        if at < high:
            part = math.log(at / low) / math.log(high / low)
            return value * (next_value / value) ** part
        low, value = high, next_value
    return value


def _bandwidth(table: Table, nbytes: float, above: float) -> float:
    """The table's bandwidth at ``nbytes``, or ``above`` beyond its last row."""
    return interpolated(table, nbytes) if table and nbytes <= table[-1][0] else above


def divided(table: Table, by: float) -> Table:
    """Divide every value of ``table`` by ``by``."""
    return tuple((at, value / by) for at, value in table)


@dataclass(frozen=True)
class Link:
    """A level of the network: it joins ranks that no inner link joins."""

    within: int | None  # joins ranks of the same block of so many consecutive ones; None for all
    bandwidth: float  # bytes/s that one rank sends while it receives as many
    latency: float  # seconds of one hop; a collective of n ranks takes n - 1, ring or pairwise
    fraction: float = 1.0  # of ``bandwidth`` that collectives reach
    # ``((bytes that a rank sends, bytes/s), ...)``, interpolated, where speed depends on size; ``bandwidth`` above the
    # last one.
    bandwidths: Table = ()

    def transfer_seconds(self, nbytes: float) -> float:
        """Seconds in which a rank sends ``nbytes``."""
        return nbytes / (_bandwidth(self.bandwidths, nbytes, self.bandwidth) * self.fraction)


@dataclass(frozen=True)
class Protocol:
    """An algorithm for collectives beside the ring with :attr:`Link.latency`; the fastest one is used."""

    name: str  # in its library
    start_seconds: float  # before the first hop
    latencies: tuple[float, ...]  # seconds of a hop over each link, innermost first
    fraction: float = 1.0  # of a ring's bandwidth over the same links
    # All-reduces up and down a tree, which is a chain over the innermost links. Else a ring, also for all-gathers and
    # reduce-scatters; no protocol does all-to-alls.
    tree: bool = False

    def does(self, kind: str) -> bool:
        """Whether the protocol does collectives of ``kind``."""
        return kind == "all_reduce" if self.tree else kind != "all_to_all"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs on the ranks of a job; by default collectives start at once and products take a nanosecond an operation."""

    memory_bandwidth: float = math.inf  # bytes/s, read and written, of kernels beyond all caches
    kernel_seconds: float = 0.0  # least time of a kernel
    # dtype -> ``((smallest dimension of a product, operations/s), ...)``, interpolated
    rates: Mapping[str, Table] = field(default_factory=lambda: {"float32": ((1.0, 1e9),)})
    links: tuple[Link, ...] = (Link(None, math.inf, 0.0),)  # innermost first; the last one has ``within`` None
    memory_fraction: float = 1.0  # of ``memory_bandwidth`` that kernels reach
    # dtype -> seconds of a product beside its operations; else ``kernel_seconds``
    product_starts: Mapping[str, float] = field(default_factory=dict)
    # ``((smallest dimension, fraction of the rate), ...)`` where ``rates`` are published peaks; empty where they are
    # measured.
    rate_fractions: Table = ()
    # ``((bytes that a kernel moves, bytes/s), ...)`` of kernels within caches; ``memory_bandwidth`` above the last one.
    bandwidths: Table = ()
    start_seconds: float = 0.0  # of a collective, before its first hop
    protocols: tuple[Protocol, ...] = ()  # other algorithms for collectives
    # kind -> factors on the time of its hops and of its bytes; else (1, 1)
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cores: int = 0  # shared by the ranks of a machine, one each while there are enough; 0 where each rank has a device
    # Entries of the matrices in a Newton-Schulz call that fill the device, below which each matrix takes longer; 0
    # where one matrix fills it.
    fill_entries: int = 0

    def __hash__(self) -> int:
        return hash((self.memory_bandwidth, self.kernel_seconds, self.links))

    def shared_by(self, ranks: int) -> Self:
        """Return the costs for each of ``ranks`` busy ranks, which share cores if there are fewer."""
        if not self.cores:
            return self
        load = self.load(ranks)
        return replace(
            self,
            memory_bandwidth=self.memory_bandwidth / load,
            bandwidths=divided(self.bandwidths, load),
            kernel_seconds=self.kernel_seconds * load,
            product_starts={dtype: seconds * load for dtype, seconds in self.product_starts.items()},
            rates={dtype: divided(table, load) for dtype, table in self.rates.items()},
            # Bandwidths stay: links between ranks are slower than cores (docs/reference/machines.md).
            links=tuple(replace(link, latency=link.latency * load) for link in self.links),
            start_seconds=self.start_seconds * load,
            protocols=tuple(
                replace(
                    protocol,
                    start_seconds=protocol.start_seconds * load,
                    latencies=tuple(latency * load for latency in protocol.latencies),
                )
                for protocol in self.protocols
            ),
            cores=0,
        )

    def load(self, ranks: int) -> float:
        """Ranks per core, at least 1."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    # ------------------------------------------------------------------------------------------------- products

    def rate(self, size: float, dtype: str) -> float:
        """Operations/s of products whose smallest dimension is ``size``."""
        fraction = interpolated(self.rate_fractions, size) if self.rate_fractions else 1.0
        return self.listed_rate(size, dtype) * fraction

    def listed_rate(self, size: float, dtype: str) -> float:
        """:meth:`rate` without :attr:`rate_fractions`."""
        itemsize = getattr(torch, dtype).itemsize
        sizes = {name: getattr(torch, name).itemsize for name in self.rates}
        # A dtype without rates has those of the nearest item size, reduced by the ratio of sizes if that is narrower.
        nearest = dtype if dtype in self.rates else min(sizes, key=lambda name: abs(math.log(sizes[name] / itemsize)))
        return interpolated(self.rates[nearest], size) * min(1.0, sizes[nearest] / itemsize)

    def product_start(self, dtype: str) -> float:
        """Seconds of a product, or of fused attention, beside its operations."""
        return self.product_starts.get(dtype, self.kernel_seconds)

    def product_seconds(self, m: int, n: int, k: int, *, batch: int = 1, dtype: str) -> float:
        """Seconds of ``batch`` products (m, k) @ (k, n): by operations or by bytes moved, whichever is longer."""
        operations = 2.0 * batch * m * n * k
        moved = batch * (m * k + k * n + m * n) * getattr(torch, dtype).itemsize
        return max(self.product_start(dtype) + operations / self.rate(min(m, n, k), dtype), self.move_seconds(moved))

    def move_seconds(self, nbytes: float) -> float:
        """Seconds of a kernel that reads and writes ``nbytes`` in all and computes little."""
        bandwidth = _bandwidth(self.bandwidths, nbytes, self.memory_bandwidth)
        return self.kernel_seconds + nbytes / (bandwidth * self.memory_fraction)

    def newton_schulz_seconds(self, rows: int, cols: int, *, steps: int, dtype: str, restarts: int | None) -> float:
        """Seconds of all products for one matrix; ``restarts`` of the gram form, None for the standard form."""
        k, l = sorted((rows, cols))  # noqa: E741
        # Standard form: XXᵀ, its square, and that times X in each step. Gram form: see ``kernels/operations.py``.
        wide = steps if restarts is None else restarts + 1
        square = steps if restarts is None else 4 * steps - 3 * wide
        counts = (((k, k, l), wide), ((k, l, k), wide), ((k, k, k), square))
        return sum(count * self.product_seconds(*shape, dtype=dtype) for shape, count in counts)

    # ----------------------------------------------------------------------------------------------- collectives

    def collective_seconds(self, kind: str, nbytes_sent: float, ranks: Sequence[int]) -> float:
        """Seconds of one collective, the sum of :meth:`collective_parts`."""
        return sum(self.collective_parts(kind, nbytes_sent, ranks))

    def collective_parts(self, kind: str, nbytes_sent: float, ranks: Sequence[int]) -> tuple[float, float]:
        """Seconds of one collective among ``ranks`` of the job, as ``(start with hops, transfer)``; zeros for one rank.

        Over several levels of links, a ring leaves a block once with ``nbytes_sent``, which the block's members share
        among their links; in an all-to-all each rank sends its outside part over its own link. Levels transfer at the
        same time, their hops add up. The fastest protocol counts. ``nbytes_sent`` is that of one rank, as in
        :func:`.collectives.measure_traffic`.
        """
        if kind not in COLLECTIVES:
            raise ValueError(f"{kind!r} is not one of {', '.join(COLLECTIVES)}")
        if len(ranks) < 2:
            return 0.0, 0.0
        ring = Protocol("ring", self.start_seconds, tuple(link.latency for link in self.links))
        options = [ring, *(protocol for protocol in self.protocols if protocol.does(kind))]
        return min((self._by(protocol, kind, nbytes_sent, ranks) for protocol in options), key=sum)

    def _by(self, protocol: Protocol, kind: str, nbytes_sent: float, ranks: Sequence[int]) -> tuple[float, float]:
        blocks = count = len(ranks)
        hops = transfer = 0.0
        for level, (link, latency) in enumerate(zip(self.links, protocol.latencies, strict=True)):
            outer = len({rank // link.within for rank in ranks}) if link.within else 1
            if outer < blocks:
                if kind == "all_to_all":
                    level_bytes = nbytes_sent * (count / outer - count / blocks) / (count - 1)
                else:
                    level_bytes = nbytes_sent * blocks / count
                if not protocol.tree:
                    hops += (blocks - outer) * latency
                else:
                    hops += (math.floor(math.log2(blocks / outer)) if level else blocks / outer - 1) * latency
                transfer = max(transfer, link.transfer_seconds(level_bytes))
            blocks = outer
        more_hops, more_bytes = self.collectives.get(kind, (1.0, 1.0))
        return protocol.start_seconds + more_hops * hops, more_bytes * transfer / protocol.fraction

    def start_bytes(self, kind: str, ranks: Sequence[int]) -> int:
        """Bytes that a rank could send while a collective of ``kind`` among ``ranks`` starts."""
        start, transfer = self.collective_parts(kind, _LARGE, ranks)
        return round(start * _LARGE / transfer) if start else 0


# ------------------------------------------------------------------------------------------------ of one parameter


def owned_work(muon: MuonSpec, costs: Costs, matrices: Sequence[tuple[int, int, int]]) -> float:
    """Nanoseconds of the owner for ``(count, rows, cols)`` matrices of a parameter."""
    restarts = len(muon.restarts) if muon.form == "gram" else None

    def seconds(rows: int, cols: int) -> float:
        return costs.newton_schulz_seconds(rows, cols, steps=muon.steps, dtype=muon.dtype, restarts=restarts)

    # Whole nanoseconds: libm may differ in the last bits between ranks, which must compute the same owner table.
    return sum(count * round(seconds(rows, cols) * 1e9) for count, rows, cols in matrices)


def exchange_start(layout: Layout, costs: Costs) -> int:
    """Bytes that a rank could send while an exchange's collective over replicas, or else its all-to-all, starts."""
    if layout.replica_group.alone:
        return costs.start_bytes("all_to_all", range(layout.owner_group.size))
    kind = "all_to_all" if layout.pairwise else "all_gather"
    width = layout.owner_group.size
    return costs.start_bytes(kind, range(0, layout.replica_group.size * width, width))


def gather_start(layout: Layout, costs: Costs) -> int:
    """Bytes of full weights that could be gathered while the collectives of a gather start."""
    if not layout.sharded:
        return 0
    return _start(layout, costs, "all_gather", "all_to_all" if layout.pairwise else "all_gather")


def reduce_start(layout: Layout, costs: Costs) -> int:
    """Bytes of full gradients that could be reduced while the collectives of a reduction start."""
    over_all = formulas.OVER_ALL if layout.cut_twice else ""
    collective = "reduce_scatter" + over_all if layout.sharded else "all_reduce"
    return _start(layout, costs, collective, "all_to_all" if layout.pairwise else "reduce_scatter")


def _start(layout: Layout, costs: Costs, collective: str, over_shard: str) -> int:
    """Return the largest start, in bytes of full tensors, over the axes of ``collective``, a name in
    :mod:`~.formulas`; ``over_shard`` is the kind of its collective along ``shard``."""
    shards, replicas = layout.shard.size, layout.replicate.size
    # Ranks are numbered row-major: neighbours along a data-parallel axis are this far apart.
    stride = layout.expert.size * layout.tensor.size
    inside = shards * stride
    over_replicas = "all_reduce"
    if layout.cut_twice:
        over_replicas = "all_to_all" if layout.pairwise else "reduce_scatter"
    kind_and_ranks = {
        "shard": (over_shard, range(0, inside, stride)),
        "replicate": (over_replicas, range(0, inside * replicas, inside)),
        "all": ("all_reduce", range(0, inside * replicas, stride)),
    }
    sent = formulas.bytes_by_axis(collective, 1, 1, shards=shards, replicas=replicas, itemsize=1)
    return max((round(costs.start_bytes(*kind_and_ranks[axis]) / part) for axis, part in sent.items()), default=0)
