"""What the core must know of a machine to decide by: how long collectives take to start, and Newton-Schulz to run.

Bucket sizes, which weights are gathered alone, and the owners of matrices follow from one :class:`Costs`, the same on
every rank. ``compile_muon.config.machine`` reads it from the file of a machine; the planner knows more of
one (``compile_muon.planning.machine``). docs/reference/machines.md is the same for users.
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

__all__ = [
    "COLLECTIVES",
    "Costs",
    "Link",
    "Protocol",
    "Table",
    "exchange_start",
    "gather_start",
    "interpolated",
    "owned_work",
    "reduce_start",
]

#: kinds of :meth:`Costs.collective_seconds`, as :mod:`.collectives` counts them
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

#: bytes of a collective that takes no longer to start than to send, on links of any machine
_LARGE = 2.0**28

#: ``(at, value)`` in rising order of ``at``, both positive
Table = tuple[tuple[float, float], ...]


def interpolated(table: Table, at: float) -> float:
    """The value at ``at``: a straight line of logarithms between neighbours, the value of the nearest end outside."""
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
    """Of ``nbytes``: the table's, or ``above`` its last row."""
    return interpolated(table, nbytes) if table and nbytes <= table[-1][0] else above


def divided(table: Table, by: float) -> Table:
    """Every value over ``by``."""
    return tuple((at, value / by) for at, value in table)


@dataclass(frozen=True)
class Link:
    """What joins ranks, and no link further inside does.

    Args:
        within: it joins ranks of the same block of so many consecutive ones; None for all.
        bandwidth: bytes/s that one rank can send, while it receives as many.
        latency: seconds of one hop; a collective of n ranks takes n - 1 of them, ring or pairwise.
        fraction: of ``bandwidth`` that collectives reach.
        bandwidths: ``((bytes that a rank sends over it, bytes/s), ...)``, interpolated, where the size matters;
            ``bandwidth`` above the last one.
    """

    within: int | None
    bandwidth: float
    latency: float
    fraction: float = 1.0
    bandwidths: Table = ()

    def transfer_seconds(self, nbytes: float) -> float:
        """Of ``nbytes`` that a rank sends."""
        return nbytes / (_bandwidth(self.bandwidths, nbytes, self.bandwidth) * self.fraction)


@dataclass(frozen=True)
class Protocol:
    """Another way to do a collective than in a ring whose hops are :attr:`Link.latency`: taken where it is faster.

    Args:
        name: as its library calls it.
        start_seconds: before its first hop.
        latencies: seconds of a hop over each link, innermost first.
        fraction: of what a ring sends over the same links.
        tree: all-reduces up and down a tree, whose part over the innermost links is a chain; else a ring, which does
            all-gathers and reduce-scatters too. Nothing here does an all-to-all.
    """

    name: str
    start_seconds: float
    latencies: tuple[float, ...]
    fraction: float = 1.0
    tree: bool = False

    def does(self, kind: str) -> bool:
        """Whether collectives of ``kind`` may go this way."""
        return kind == "all_reduce" if self.tree else kind != "all_to_all"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Products, memory and links of the ranks of a job; every rank has the same.

    By default of a machine where collectives start at once, and products take a nanosecond an operation.

    Args:
        memory_bandwidth: bytes/s, read and written, of kernels that no cache serves.
        kernel_seconds: the least that a kernel takes.
        rates: dtype -> ``((smallest dimension of a product, operations/s), ...)``, interpolated.
        links: innermost first, the last one ``within`` None.
        memory_fraction: of ``memory_bandwidth`` that kernels reach.
        product_starts: dtype -> seconds that a product takes beside its operations; ``kernel_seconds`` of others.
        rate_fractions: ``((smallest dimension, fraction of the rate), ...)``, for ``rates`` that are published peaks;
            empty where they are what products reach.
        bandwidths: ``((bytes that a kernel moves, bytes/s), ...)`` of those that caches serve; above the last one it
            is ``memory_bandwidth``.
        start_seconds: what a collective takes before its first hop.
        protocols: other ways to do collectives, of which each takes the fastest.
        collectives: kind -> (hops, bytes): how many times the hops, and the seconds of its bytes, it takes. (1, 1) for
            a kind that is not there.
        cores: that ranks of this machine share, one for each while there are enough; 0 where each rank has a device.
        fill_entries: of the matrices of a Newton-Schulz call, as many as fill the device: with fewer it takes longer
            for each; 0 where one matrix does.
    """

    memory_bandwidth: float = math.inf
    kernel_seconds: float = 0.0
    rates: Mapping[str, Table] = field(default_factory=lambda: {"float32": ((1.0, 1e9),)})
    links: tuple[Link, ...] = (Link(None, math.inf, 0.0),)
    memory_fraction: float = 1.0
    product_starts: Mapping[str, float] = field(default_factory=dict)
    rate_fractions: Table = ()
    bandwidths: Table = ()
    start_seconds: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cores: int = 0
    fill_entries: int = 0

    def __hash__(self) -> int:
        return hash((self.memory_bandwidth, self.kernel_seconds, self.links))

    def shared_by(self, ranks: int) -> Self:
        """As each of ``ranks`` ranks of a job sees it, all at work: where they share cores, several may have one.

        Bytes of a collective take no longer: what ranks send each other is slower than the cores
        (docs/reference/machines.md).
        """
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
        """Ranks that a core has to serve, of ``ranks`` in all."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    # ------------------------------------------------------------------------------------------------- products

    def rate(self, size: float, dtype: str) -> float:
        """Operations/s of products whose smallest dimension is ``size``.

        A dtype that :attr:`rates` lacks is taken as the one there of the nearest item size, and a wider one as slower
        by the ratio of the two.
        """
        fraction = interpolated(self.rate_fractions, size) if self.rate_fractions else 1.0
        return self.listed_rate(size, dtype) * fraction

    def listed_rate(self, size: float, dtype: str) -> float:
        """The same without :attr:`rate_fractions`."""
        wanted = getattr(torch, dtype).itemsize
        sizes = {name: getattr(torch, name).itemsize for name in self.rates}
        known = dtype if dtype in self.rates else min(sizes, key=lambda name: abs(math.log(sizes[name] / wanted)))
        return interpolated(self.rates[known], size) * min(1.0, sizes[known] / wanted)

    def product_start(self, dtype: str) -> float:
        """What a product, or fused attention, takes beside its operations."""
        return self.product_starts.get(dtype, self.kernel_seconds)

    def product_seconds(self, m: int, n: int, k: int, *, batch: int = 1, dtype: str) -> float:
        """Of ``batch`` products (m, k) @ (k, n): by their operations or by the bytes they move, whichever is longer."""
        operations = 2.0 * batch * m * n * k
        moved = batch * (m * k + k * n + m * n) * getattr(torch, dtype).itemsize
        return max(self.product_start(dtype) + operations / self.rate(min(m, n, k), dtype), self.move_seconds(moved))

    def move_seconds(self, nbytes: float) -> float:
        """Of a kernel that reads and writes ``nbytes`` in all and computes little."""
        bandwidth = _bandwidth(self.bandwidths, nbytes, self.memory_bandwidth)
        return self.kernel_seconds + nbytes / (bandwidth * self.memory_fraction)

    def newton_schulz_seconds(self, rows: int, cols: int, *, steps: int, dtype: str, restarts: int | None) -> float:
        """Of the products on one matrix.

        Args:
            restarts: of the gram form, see ``kernels/operations.py``; None for the standard form, in each step of which
                are XXᵀ, its square, and that times X.
        """
        k, l = sorted((rows, cols))  # noqa: E741
        wide = steps if restarts is None else restarts + 1
        square = steps if restarts is None else 4 * steps - 3 * wide
        counts = (((k, k, l), wide), ((k, l, k), wide), ((k, k, k), square))  # of a square matrix all the same
        return sum(count * self.product_seconds(*shape, dtype=dtype) for shape, count in counts)

    # ----------------------------------------------------------------------------------------------- collectives

    def collective_seconds(self, kind: str, nbytes_sent: float, ranks: Sequence[int]) -> float:
        """Of one collective among ``ranks`` of the job; none for one rank. Arguments as of :meth:`collective_parts`."""
        return sum(self.collective_parts(kind, nbytes_sent, ranks))

    def collective_parts(self, kind: str, nbytes_sent: float, ranks: Sequence[int]) -> tuple[float, float]:
        """The same in two parts: what it takes to start, hops included, and what its bytes take.

        Over links at several levels, a ring leaves a block once with all of ``nbytes_sent``, which the block's members
        send together, each through its own link; of an all-to-all each rank sends what goes outside through its own.
        Levels work at the same time, their hops add up. Of the ways there are (:attr:`protocols`) it goes the fastest.

        Args:
            kind: one of :data:`COLLECTIVES`.
            nbytes_sent: what one rank sends, as :func:`.collectives.measure_traffic` counts.
        """
        if kind not in COLLECTIVES:
            raise ValueError(f"{kind!r} is not one of {', '.join(COLLECTIVES)}")
        if len(ranks) < 2:
            return 0.0, 0.0
        plain = Protocol("ring", self.start_seconds, tuple(link.latency for link in self.links))
        ways = [plain, *(protocol for protocol in self.protocols if protocol.does(kind))]
        return min((self._by(protocol, kind, nbytes_sent, ranks) for protocol in ways), key=sum)

    def _by(self, protocol: Protocol, kind: str, nbytes_sent: float, ranks: Sequence[int]) -> tuple[float, float]:
        blocks = count = len(ranks)
        hops = transfer = 0.0
        for level, (link, latency) in enumerate(zip(self.links, protocol.latencies, strict=True)):
            outer = len({rank // link.within for rank in ranks}) if link.within else 1
            if outer < blocks:
                if kind == "all_to_all":
                    sent = nbytes_sent * (count / outer - count / blocks) / (count - 1)
                else:
                    sent = nbytes_sent * blocks / count
                if not protocol.tree:
                    hops += (blocks - outer) * latency
                else:
                    hops += (math.floor(math.log2(blocks / outer)) if level else blocks / outer - 1) * latency
                transfer = max(transfer, link.transfer_seconds(sent))
            blocks = outer
        more_hops, more_bytes = self.collectives.get(kind, (1.0, 1.0))
        return protocol.start_seconds + more_hops * hops, more_bytes * transfer / protocol.fraction

    def start_bytes(self, kind: str, ranks: Sequence[int]) -> int:
        """What a rank could send in the time that a collective of ``kind`` among ``ranks`` takes to start."""
        start, transfer = self.collective_parts(kind, _LARGE, ranks)
        return round(start * _LARGE / transfer) if start else 0


# ------------------------------------------------------------------------------------------------ of one parameter


def owned_work(muon: MuonSpec, costs: Costs, matrices: Sequence[tuple[int, int, int]]) -> float:
    """Nanoseconds that ``(count, rows, cols)`` of a parameter's matrices take their owner."""
    restarts = len(muon.restarts) if muon.form == "gram" else None

    def seconds(rows: int, cols: int) -> float:
        return costs.newton_schulz_seconds(rows, cols, steps=muon.steps, dtype=muon.dtype, restarts=restarts)

    # To the nanosecond, which is less than the libraries of two machines can differ by.
    return sum(count * round(seconds(rows, cols) * 1e9) for count, rows, cols in matrices)


def exchange_start(layout: Layout, costs: Costs) -> int:
    """What a rank could send in the time that the collective of an exchange takes to start: the one that hands
    directions round where that is done, else the all-to-alls."""
    if layout.replica_group.alone:
        return costs.start_bytes("all_to_all", range(layout.owner_group.size))
    kind = "all_to_all" if layout.pairwise else "all_gather"
    width = layout.owner_group.size
    return costs.start_bytes(kind, range(0, layout.replica_group.size * width, width))


def gather_start(layout: Layout, costs: Costs) -> int:
    """Bytes of whole weights that could be gathered in the time that the collectives take to start."""
    if not layout.sharded:
        return 0
    return _start(layout, costs, "all_gather", "all_to_all" if layout.pairwise else "all_gather")


def reduce_start(layout: Layout, costs: Costs) -> int:
    """The same of gradients to reduce."""
    over_all = formulas.OVER_ALL if layout.cut_twice else ""
    collective = "reduce_scatter" + over_all if layout.sharded else "all_reduce"
    return _start(layout, costs, collective, "all_to_all" if layout.pairwise else "reduce_scatter")


def _start(layout: Layout, costs: Costs, collective: str, over_shard: str) -> int:
    """Over the axis where it is most bytes.

    Args:
        collective: one of :data:`~.formulas.WEIGHT_BYTES`.
        over_shard: kind of the collective over the axis ``shard``.
    """
    shards, replicas = layout.shard.size, layout.replicate.size
    # Ranks of a data-parallel axis have those of the axes of model parallelism between them.
    apart = layout.expert.size * layout.tensor.size
    inside = shards * apart
    over_replicas = "all_reduce"
    if layout.cut_twice:
        over_replicas = "all_to_all" if layout.pairwise else "reduce_scatter"
    ways = {
        "shard": (over_shard, range(0, inside, apart)),
        "replicate": (over_replicas, range(0, inside * replicas, inside)),
        "all": ("all_reduce", range(0, inside * replicas, apart)),
    }
    sent = formulas.bytes_by_axis(collective, 1, 1, shards=shards, replicas=replicas, itemsize=1)
    return max((round(costs.start_bytes(*ways[axis]) / part) for axis, part in sent.items()), default=0)
