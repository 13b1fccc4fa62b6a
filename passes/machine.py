"""A machine as the cost model sees it: how fast it multiplies, reads memory and sends.

Numbers only, and formulas over them; ``compile_muon.machines`` has files of several machines and measures others.
docs/reference/machines.md is the same for users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from .errors import DescriptionError

__all__ = ["COLLECTIVES", "Link", "Machine", "Protocol"]

#: kinds of :meth:`Machine.collective_seconds`, as :mod:`.collectives` counts them
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

_DEVICES = ("cuda", "cpu")

#: fields that are read-only mappings; the first has no default
_MAPPINGS = ("rates", "product_starts", "attention_rates", "host_seconds", "collectives", "sources")

#: what the host does of a step, as :attr:`Machine.host_seconds` has it
_HOST = ("graph", "parameter", "collective", "byte")

#: ``(at, value)`` in rising order of ``at``, both positive
Table = tuple[tuple[float, float], ...]


def _interpolated(table: Table, at: float) -> float:
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
    return _interpolated(table, nbytes) if table and nbytes <= table[-1][0] else above


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


@dataclass(frozen=True)
class Machine:
    """The devices of a job and what joins them; every rank has the same.

    Args:
        name: as users call it.
        device: "cuda" or "cpu".
        memory_bytes: of one rank's device.
        memory_bandwidth: bytes/s, read and written, of kernels that no cache serves.
        kernel_seconds: the least that a kernel takes.
        rates: dtype -> ``((smallest dimension of a product, operations/s), ...)``, interpolated.
        links: innermost first, the last one ``within`` None.
        memory_fraction: of ``memory_bandwidth`` that kernels reach.
        product_starts: dtype -> seconds that a product takes beside its operations; ``kernel_seconds`` of others.
        rate_fractions: ``((smallest dimension, fraction of the rate), ...)``, for ``rates`` that are published peaks;
            empty where they are what products reach.
        attention_fraction: of the ``rates`` of large products that fused attention in half precision reaches; None for
            what products of its smallest dimension reach.
        attention_rates: dtype -> ``((length of a sequence, operations/s), ...)`` of fused attention, interpolated; of
            a dtype that is there, in place of ``attention_fraction``.
        bandwidths: ``((bytes that a kernel moves, bytes/s), ...)`` of those that caches serve; above the last one it
            is ``memory_bandwidth``.
        function_seconds: what an exponential, error function or the like takes of an entry, beside its bytes.
        host_seconds: what the thread that launches kernels does itself, where kernels wait for it, as they do on CPUs:
            to enter a ``"graph"``, for each ``"parameter"`` of it, for each ``"collective"``, and for each ``"byte"``
            that a rank sends, which cores copy. 0 where it is not there.
        start_seconds: what a collective takes before its first hop.
        late_seconds: how much later than this rank the last one issues a collective, where ranks that compute share
            cores: it has just lost its own. Who waits does so until then; meanwhile no core and no link is taken.
        protocols: other ways to do collectives, of which each takes the fastest.
        collectives: kind -> (hops, bytes): how many times the hops, and the seconds of its bytes, it takes. (1, 1) for
            a kind that is not there.
        cores: that ranks of this machine share, one for each while there are enough; 0 where each rank has a device.
        sources: field -> where its numbers come from.
    """

    name: str
    device: str
    memory_bytes: int
    memory_bandwidth: float
    kernel_seconds: float
    rates: Mapping[str, Table]
    links: tuple[Link, ...]
    memory_fraction: float = 1.0
    product_starts: Mapping[str, float] = field(default_factory=dict)
    rate_fractions: Table = ()
    attention_fraction: float | None = None
    attention_rates: Mapping[str, Table] = field(default_factory=dict)
    bandwidths: Table = ()
    function_seconds: float = 0.0
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    start_seconds: float = 0.0
    late_seconds: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cores: int = 0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.memory_bandwidth, self.kernel_seconds, self.links))

    def __reduce__(self) -> tuple[Any, ...]:
        return Machine.from_json, (self.to_json(),)

    @property
    def node(self) -> int | None:
        """Consecutive ranks that the innermost link joins; None where one link joins all."""
        return self.links[0].within

    # ------------------------------------------------------------------------------------------------- seconds

    def shared_by(self, ranks: int) -> Machine:
        """As each of ``ranks`` ranks of a job sees it, all at work: where they share cores, several may have one.

        Bytes of a collective take no longer: what ranks send each other is slower than the cores (benchmarks/NOTES.md).
        """
        if not self.cores:
            return self
        load = max(1.0, ranks / self.cores)
        return replace(
            self,
            memory_bytes=self.memory_bytes // ranks,
            memory_bandwidth=self.memory_bandwidth / load,
            bandwidths=_divided(self.bandwidths, load),
            kernel_seconds=self.kernel_seconds * load,
            product_starts={dtype: seconds * load for dtype, seconds in self.product_starts.items()},
            rates={dtype: _divided(table, load) for dtype, table in self.rates.items()},
            attention_rates={dtype: _divided(table, load) for dtype, table in self.attention_rates.items()},
            function_seconds=self.function_seconds * load,
            # What copies bytes is no thread of ours: a core that nobody computes on has it for nothing.
            host_seconds={
                kind: seconds * load
                for kind, seconds in self.host_seconds.items()
                if kind != "byte" or ranks >= self.cores
            },
            links=tuple(replace(link, latency=link.latency * load) for link in self.links),
            start_seconds=self.start_seconds * load,
            late_seconds=self.late_seconds * load,
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

    def rate(self, size: float, dtype: str) -> float:
        """Operations/s of products whose smallest dimension is ``size``.

        A dtype that :attr:`rates` lacks is taken as the one there of the nearest item size, and a wider one as slower
        by the ratio of the two.
        """
        fraction = _interpolated(self.rate_fractions, size) if self.rate_fractions else 1.0
        return self._listed_rate(size, dtype) * fraction

    def attention_rate(self, size: float, sequence: float, dtype: str) -> float:
        """Operations/s of attention over ``sequence`` entries; ``size`` is the smallest dimension of its products."""
        if dtype in self.attention_rates:
            return _interpolated(self.attention_rates[dtype], sequence)
        if self.attention_fraction is None or getattr(torch, dtype).itemsize != 2:
            return self.rate(size, dtype)
        return self._listed_rate(math.inf, dtype) * self.attention_fraction

    def _listed_rate(self, size: float, dtype: str) -> float:
        wanted = getattr(torch, dtype).itemsize
        sizes = {name: getattr(torch, name).itemsize for name in self.rates}
        known = dtype if dtype in self.rates else min(sizes, key=lambda name: abs(math.log(sizes[name] / wanted)))
        return _interpolated(self.rates[known], size) * min(1.0, sizes[known] / wanted)

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

    # -------------------------------------------------------------------------------------------------- as JSON

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` takes."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["links"] = [
            asdict(link) | {"bandwidths": [list(pair) for pair in link.bandwidths]} for link in self.links
        ]
        found["protocols"] = [asdict(protocol) | {"latencies": list(protocol.latencies)} for protocol in self.protocols]
        found["collectives"] = {kind: list(pair) for kind, pair in self.collectives.items()}
        for name in ("rates", "attention_rates"):
            found[name] = {dtype: [list(pair) for pair in table] for dtype, table in found[name].items()}
        for name in ("product_starts", "host_seconds", "sources"):
            found[name] = dict(found[name])
        for name in ("rate_fractions", "bandwidths"):
            found[name] = [list(pair) for pair in found[name]]
        return found

    @classmethod
    def from_json(cls, record: object) -> Machine:
        """The machine of what a JSON file holds; fields with a default may be left out.

        Raises:
            DescriptionError: naming the first field that is unknown, missing, of a wrong type or out of range.
        """
        given = _fields(cls, "", record)
        found = {name: _READERS[name](name, value) for name, value in given.items()}
        for place, protocol in enumerate(found.get("protocols", ())):
            if len(protocol.latencies) != len(found["links"]):
                raise DescriptionError(
                    f"protocols[{place}].latencies",
                    list(protocol.latencies),
                    f"has {len(protocol.latencies)} of them for {len(found['links'])} links",
                    "give one for each link",
                )
        return cls(**found)


def _divided(table: Table, by: float) -> Table:
    return tuple((at, value / by) for at, value in table)


# -------------------------------------------------------------------------------------------- reading what JSON holds


def _fields(kind: type, path: str, record: object) -> dict[str, Any]:
    """The fields of a dataclass that ``record`` has: all that have no default, and no others."""
    given = _mapping(path or "machine", record)
    prefix = f"{path}." if path else ""
    known = [f.name for f in fields(kind)]
    for name, value in given.items():
        if name not in known:
            raise DescriptionError(f"{prefix}{name}", value, "is not a field", f"use some of {', '.join(known)}")
    for name in known:
        if name not in given and not hasattr(kind, name) and name not in _MAPPINGS[1:]:
            raise DescriptionError(f"{prefix}{name}", None, "is missing", "add it")
    return given


def _mapping(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DescriptionError(path, value, f"must be an object, not {type(value).__name__}", "write {...}")
    return value


def _sequence(path: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise DescriptionError(path, value, f"must be a list, not {type(value).__name__}", "write [...]")
    return value


def _text(path: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise DescriptionError(path, value, "is not a text", 'write "..."')
    return value


def _number(path: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DescriptionError(path, value, f"must be a number, not {type(value).__name__}", "write a plain number")
    if not 0 <= value < math.inf:
        raise DescriptionError(path, value, "is negative or not finite", "use a finite number of at least 0")
    return float(value)


def _positive(path: str, value: object) -> float:
    if _number(path, value) == 0:
        raise DescriptionError(path, value, "is not positive", "use a number above 0")
    return _number(path, value)


def _fraction(path: str, value: object) -> float:
    if _positive(path, value) > 1:
        raise DescriptionError(path, value, "is more than all", "use a fraction in (0, 1]")
    return _positive(path, value)


def _count(path: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DescriptionError(path, value, "is not a positive integer", "use an integer of at least 1")
    return value


def _device(path: str, value: object) -> str:
    if value not in _DEVICES:
        raise DescriptionError(path, value, "is not a device", f"use one of {', '.join(map(repr, _DEVICES))}")
    return str(value)


def _pair(path: str, value: object) -> tuple[float, float]:
    pair = _sequence(path, value)
    if len(pair) != 2:
        raise DescriptionError(path, value, "is not a pair", "write two numbers")
    return _positive(f"{path}[0]", pair[0]), _positive(f"{path}[1]", pair[1])


def _table(path: str, value: object) -> Table:
    table = tuple(_pair(f"{path}[{place}]", pair) for place, pair in enumerate(_sequence(path, value)))
    for place, ((low, _), (high, _)) in enumerate(zip(table, table[1:], strict=False)):
        if low >= high:
            raise DescriptionError(f"{path}[{place + 1}]", high, f"comes after {low:g}", "sort by the first numbers")
    return table


def _fractions(path: str, value: object) -> Table:
    table = _table(path, value)
    for place, (_, fraction) in enumerate(table):
        _fraction(f"{path}[{place}][1]", fraction)
    return table


def _rates(path: str, value: object) -> dict[str, Table]:
    found = _tables(path, value)
    if not found:
        raise DescriptionError(path, value, "is empty", "give the rate of one dtype at least")
    return found


def _tables(path: str, value: object) -> dict[str, Table]:
    found = {}
    for dtype, table in _mapping(path, value).items():
        found[_dtype(path, dtype)] = _table(f"{path}.{dtype}", table)
        if not found[dtype]:
            raise DescriptionError(f"{path}.{dtype}", table, "is empty", "give at least one pair, or leave it out")
    return found


def _host(path: str, value: object) -> dict[str, float]:
    given = _mapping(path, value)
    for kind, seconds in given.items():
        if kind not in _HOST:
            raise DescriptionError(
                f"{path}.{kind}", seconds, "is nothing that is known", f"use some of {', '.join(_HOST)}"
            )
    return {kind: _number(f"{path}.{kind}", seconds) for kind, seconds in given.items()}


def _links(path: str, value: object) -> tuple[Link, ...]:
    found: list[Link] = []
    for place, record in enumerate(_sequence(path, value)):
        at = f"{path}[{place}]"
        given = _fields(Link, at, record)
        within = given["within"]
        link = Link(
            within if within is None else _count(f"{at}.within", within),
            _positive(f"{at}.bandwidth", given["bandwidth"]),
            _number(f"{at}.latency", given["latency"]),
            _fraction(f"{at}.fraction", given.get("fraction", 1.0)),
            _table(f"{at}.bandwidths", given.get("bandwidths", [])),
        )
        if found and (found[-1].within is None or (link.within is not None and link.within % found[-1].within)):
            raise DescriptionError(f"{at}.within", within, "does not hold whole blocks of the link before", "sort them")
        found.append(link)
    if not found or found[-1].within is not None:
        raise DescriptionError(path, value, "has no link of all ranks", 'give the last one "within": null')
    return tuple(found)


def _protocols(path: str, value: object) -> tuple[Protocol, ...]:
    found = []
    for place, record in enumerate(_sequence(path, value)):
        at = f"{path}[{place}]"
        given = _fields(Protocol, at, record)
        latencies = _sequence(f"{at}.latencies", given["latencies"])
        tree = given.get("tree", False)
        if not isinstance(tree, bool):
            raise DescriptionError(f"{at}.tree", tree, "is no truth value", "use true or false")
        found.append(
            Protocol(
                _text(f"{at}.name", given["name"]),
                _number(f"{at}.start_seconds", given["start_seconds"]),
                tuple(_number(f"{at}.latencies[{level}]", latency) for level, latency in enumerate(latencies)),
                _fraction(f"{at}.fraction", given.get("fraction", 1.0)),
                tree,
            )
        )
    return tuple(found)


def _kinds(path: str, value: object) -> dict[str, tuple[float, float]]:
    found = {}
    for kind, pair in _mapping(path, value).items():
        if kind not in COLLECTIVES:
            remedy = f"use some of {', '.join(COLLECTIVES)}"
            raise DescriptionError(f"{path}.{kind}", pair, "is not a kind of collective", remedy)
        numbers = _sequence(f"{path}.{kind}", pair)
        if len(numbers) != 2:
            raise DescriptionError(f"{path}.{kind}", pair, "is not a pair", "write two numbers")
        hops, nbytes = (_number(f"{path}.{kind}[{place}]", number) for place, number in enumerate(numbers))
        found[kind] = (hops, nbytes)
    return found


def _starts(path: str, value: object) -> dict[str, float]:
    return {_dtype(path, dtype): _positive(f"{path}.{dtype}", one) for dtype, one in _mapping(path, value).items()}


def _dtype(path: str, name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise DescriptionError(f"{path}.{name}", name, "is not a dtype of torch", 'use names like "bfloat16"')
    return name


def _sources(path: str, value: object) -> dict[str, str]:
    return {name: _text(f"{path}.{name}", text) for name, text in _mapping(path, value).items()}


_READERS: dict[str, Callable[[str, object], Any]] = {
    "name": _text,
    "device": _device,
    "memory_bytes": _count,
    "memory_bandwidth": _positive,
    "kernel_seconds": _positive,
    "rates": _rates,
    "links": _links,
    "memory_fraction": _fraction,
    "product_starts": _starts,
    "rate_fractions": _fractions,
    "attention_fraction": lambda path, value: None if value is None else _fraction(path, value),
    "attention_rates": _tables,
    "bandwidths": _table,
    "function_seconds": _number,
    "host_seconds": _host,
    "start_seconds": _number,
    "late_seconds": _number,
    "protocols": _protocols,
    "collectives": _kinds,
    "cores": lambda path, value: 0 if value == 0 and not isinstance(value, bool) else _count(path, value),
    "sources": _sources,
}
