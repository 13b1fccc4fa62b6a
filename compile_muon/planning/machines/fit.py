"""What is measured of a machine, and the machine whose formulas come nearest to it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compile_muon.passes.costs import Link, Table
from compile_muon.planning.machine import Machine

__all__ = ["Measured", "Sample", "completed", "fit"]

#: bytes of collectives from which on the cores do little else than copy them
_LARGE = 2**20
#: of a measured step, graphs that the host enters: forward, backward, the optimizer's step; and all have all parameters
_GRAPHS = 3


@dataclass(frozen=True)
class Sample:
    """One measurement, by each rank at a time as many others as there are cores doing the same.

    Args:
        group: which of :data:`_FORMULAS` says how long it takes, and what ``work`` and ``of`` are.
        seconds: median over the rounds.
        work: operations, bytes or entries.
        of: what else the formula takes, by name.
    """

    group: str
    seconds: float
    work: float
    of: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([f"{self.work:,.0f}", *(f"{name} {value}" for name, value in self.of.items())])

    def predicted(self, machine: Machine) -> float:
        """Seconds that ``machine`` says it takes."""
        return _FORMULAS[self.group](machine, self.work, **self.of)

    def error(self, machine: Machine) -> float:
        """How far the prediction is off, as a part of what was measured; negative where it is too short."""
        return self.predicted(machine) / self.seconds - 1


@dataclass(frozen=True)
class Measured:
    """All measurements.

    Args:
        device: "cuda" or "cpu".
        kernel_seconds: of the least kernel.
        cores: that ranks share; 0 on GPUs.
        node: ranks that share a machine.
        memory_bytes: of a device, or of all ranks of a CPU.
    """

    device: str
    kernel_seconds: float
    cores: int
    node: int
    memory_bytes: int
    samples: tuple[Sample, ...]


# --------------------------------------------------------------------------------------------------------- formulas


def _attention(machine: Machine, operations: float, sequence: int, width: int, dtype: str) -> float:
    """Causal attention, forward and backward, operations as ``torch.utils.flop_counter`` has them."""
    rate = machine.attention_rate(min(sequence, width), sequence, dtype)
    return 2 * machine.product_start(dtype) + operations / rate


def _step(machine: Machine, parameters: float, ranks: int, collectives: int) -> float:
    """A training step of ``ranks`` ranks, of so little that the host is what takes time: parameters of a few numbers.

    In CPU time of a rank: what it waits for are late ranks, a group of their own.
    """
    host = machine.shared_by(ranks).host_seconds
    alone = host.get("graph", 0.0) + parameters * host.get("parameter", 0.0)
    return _GRAPHS * alone + collectives * host.get("collective", 0.0)


def _transfer(machine: Machine, nbytes: float, way: str, ranks: int) -> float:
    """From host memory to a device ("host"), from a disk to memory ("disk"), and as much back beside it, or of host
    memory that AdamW reads and writes ("adamw"); bytes are those that the busier side serves: a disk both ways."""
    own = machine.shared_by(ranks)
    return nbytes / {"host": own.host_bandwidth, "disk": own.disk_bandwidth, "adamw": own.host_memory_bandwidth}[way]


def _collective(machine: Machine, nbytes: float, kind: str, ranks: int, core_seconds: float = 0.0) -> float:
    """One collective of ranks 0 to ``ranks`` - 1, of which each sends ``nbytes``.

    Args:
        core_seconds: that all threads of a rank computed meanwhile; 0 where that was not measured.
    """
    return machine.shared_by(ranks).collective_seconds(kind, nbytes, range(ranks))


_FORMULAS: dict[str, Callable[..., float]] = {
    # ``batch`` products (m, k) @ (k, n)
    "products": lambda machine, work, **of: machine.product_seconds(**of),
    # a compiled kernel that reads two tensors and writes one
    "kernels": lambda machine, nbytes: machine.move_seconds(nbytes),
    # a compiled kernel that reads and writes ``entries`` numbers of float32, and takes several functions of each
    "functions": lambda machine, work, entries: machine.move_seconds(8 * entries) + work * machine.function_seconds,
    "attention": _attention,
    "steps": _step,
    # how much longer work takes with a small collective behind it: ``ranks`` ranks wait for the last of them
    "late ranks": lambda machine, work, ranks: machine.shared_by(ranks).late_seconds,
    "offload": _transfer,
    "collectives": _collective,
}


# -------------------------------------------------------------------------------------------------------------- fit


def fit(measured: Measured, name: str) -> Machine:
    """A description out of the samples."""
    groups: dict[str, list[Sample]] = {group: [] for group in _FORMULAS}
    for sample in measured.samples:
        groups[sample.group].append(sample)
    least = measured.kernel_seconds
    # never more than ten times what the seconds say, where these are hardly more than those of the least kernel
    bandwidths = tuple((float(s.work), s.work / max(s.seconds - least, 0.1 * s.seconds)) for s in groups["kernels"])
    products = _by("dtype", groups["products"])
    starts = {dtype: _start(same, least) for dtype, same in products.items()}
    link, start_seconds, kinds = _link(groups["collectives"], measured.cores)
    late = [s.seconds / _load(s, measured.cores) for s in groups["late ranks"]]
    # bytes/s of a rank; 0 where they were not measured
    moved = {way: max(s.work / s.seconds for s in same) for way, same in _by("way", groups["offload"]).items()}
    machine = Machine(
        name=name,
        device=measured.device,
        memory_bytes=measured.memory_bytes,
        memory_bandwidth=bandwidths[-1][1],
        kernel_seconds=least,
        rates={dtype: _rates(same, starts[dtype]) for dtype, same in products.items()},
        product_starts=starts,
        links=(link,),
        bandwidths=bandwidths,
        start_seconds=start_seconds,
        # of ranks that have a core each
        late_seconds=statistics.geometric_mean(late) if late else 0.0,
        collectives=kinds,
        cores=measured.cores,
        host_bandwidth=moved.get("host", 0.0),
        host_memory_bandwidth=moved.get("adamw", 0.0),
        disk_bandwidth=moved.get("disk", 0.0) * (min(measured.node, measured.cores) if measured.cores else 1),
        sources={"all": f"python -m compile_muon calibrate, {measured.node} ranks of one machine"},
    )
    # Of the kernels that take longest: the others are mostly their bytes and their start.
    functions = [(s.seconds - s.predicted(machine)) / s.work for s in groups["functions"][-1:]]
    return replace(
        machine,
        function_seconds=max(0.0, *functions) if functions else 0.0,
        attention_rates={
            dtype: _attention_rates(same, 2 * machine.product_start(dtype))
            for dtype, same in _by("dtype", groups["attention"]).items()
        },
        host_seconds=_host(groups["steps"], groups["collectives"]),
    )


def completed(machine: Machine, base: Machine) -> Machine:
    """``machine`` as :func:`fit` made it, with what was not measured as ``base`` has it.

    Of links what joins ranks of one node was measured, or none where there was one rank.
    """
    alone = not machine.links[0].bandwidths and machine.links[0].bandwidth <= 1.0
    fields = ["fill_entries", "architecture", "processors", "collective_processors"]
    fields += ["host_seconds", "host_bandwidth", "host_memory_bandwidth", "disk_bandwidth"]
    kept = {name: getattr(base, name) for name in fields if not getattr(machine, name)}
    if alone:
        kept |= {name: getattr(base, name) for name in ("links", "start_seconds", "protocols", "collectives")}
    elif base.node is not None and machine.node is None:
        kept["links"] = (replace(machine.links[0], within=base.node), *base.links[1:])
    names = ", ".join(sorted(kept))
    return replace(machine, **kept, sources={**machine.sources, "not measured": f"{names}: as {base.name} has them"})


def _by(name: str, samples: Sequence[Sample]) -> dict[Any, list[Sample]]:
    """Samples by what they are of, in the order they were taken in."""
    return {key: [s for s in samples if s.of[name] == key] for key in dict.fromkeys(s.of[name] for s in samples)}


def _start(products: Sequence[Sample], least: float) -> float:
    """What a product takes beside its operations: the median of those of which that is most; else the least kernel."""
    best = max(s.work / s.seconds for s in products)
    starts = [(s.seconds - s.work / best, s.seconds) for s in products]
    return statistics.median([rest for rest, seconds in starts if rest > 0.75 * seconds] or [least])


def _rates(products: Sequence[Sample], start: float) -> Table:
    """For each smallest dimension the rate that fits the shapes that have it best."""
    found = []
    best = max(s.work / s.seconds for s in products)
    smallest = {id(s): min(s.of[dimension] for dimension in "mnk") for s in products}
    for size in sorted(set(smallest.values())):
        same = [s for s in products if smallest[id(s)] == size]
        (per_operation,) = _solve([[s.work] for s in same], [s.seconds for s in same], start)
        # of the smallest the start may be all there is
        found.append((float(size), min(best, 1 / per_operation) if per_operation else best))
    return tuple(found)


def _attention_rates(attention: Sequence[Sample], start: float) -> Table:
    """The rate by the length of the sequences, over all widths."""
    return tuple(
        (float(sequence), statistics.geometric_mean(s.work / max(s.seconds - start, 0.1 * s.seconds) for s in same))
        for sequence, same in sorted(_by("sequence", attention).items())
    )


def _host(steps: Sequence[Sample], collectives: Sequence[Sample]) -> dict[str, float]:
    """What a step takes of a rank by itself; and of several, how much more, for each collective."""
    alone = [sample for sample in steps if sample.of["ranks"] == 1]
    if not alone:
        return {}
    graph, parameter = _solve([[_GRAPHS, _GRAPHS * s.work] for s in alone], [s.seconds for s in alone])
    found = {"graph": graph, "parameter": parameter}
    together = [s for s in steps if s.of["collectives"]]
    if together:
        rest = [s.seconds - _GRAPHS * (graph + s.work * parameter) for s in together]
        found["collective"] = max(0.0, sum(rest) / sum(s.of["collectives"] for s in together))
    sent = [s for s in collectives if s.work >= _LARGE and s.of["core_seconds"]]
    if sent:
        found["byte"] = statistics.median(s.of["core_seconds"] / s.work for s in sent)
    return found


def _link(collectives: Sequence[Sample], cores: int) -> tuple[Link, float, dict[str, tuple[float, float]]]:
    """The link that joins all ranks, the start of a collective, and kind -> (hops, bytes).

    The first kind gives the first two, the others how many times its hops and bytes they take. Without collectives the
    link is one that nobody uses.
    """
    if not collectives:
        return Link(None, 1.0, 0.0), 0.0, {}
    (_, base), *others = _by("kind", collectives).items()
    hops = {id(s): _load(s, cores) * (s.of["ranks"] - 1) for s in collectives}
    several = len(_by("ranks", base)) > 1  # else a start and a hop are the same
    columns = [[_load(s, cores) * several, hops[id(s)], s.work] for s in base]
    start, latency, per_byte = _solve(columns, [s.seconds for s in base])
    waits = {id(s): _load(s, cores) * start + hops[id(s)] * latency for s in collectives}
    # Together what sends about as much: of one place in the plan, by any number of ranks.
    by_size: dict[int, list[float]] = {}
    for s in base:
        # where waiting is more than the bytes, nothing is to be learnt of these
        if s.work * per_byte > waits[id(s)]:
            rate = s.work / max(s.seconds - waits[id(s)], 0.1 * s.seconds)
            by_size.setdefault(round(math.log2(s.work)), []).append(rate)
    bandwidths = tuple((2.0**power, statistics.geometric_mean(same)) for power, same in sorted(by_size.items()))
    bandwidth = bandwidths[-1][1] if bandwidths else 1 / max(per_byte, 1e-12)
    link = Link(None, bandwidth, latency, bandwidths=bandwidths)
    factors = {}
    for kind, same in others:
        columns = [[hops[id(s)] * latency, link.transfer_seconds(s.work)] for s in same]
        of_hops, of_bytes = _solve(columns, [s.seconds for s in same], [_load(s, cores) * start for s in same])
        factors[kind] = (of_hops, of_bytes)
    return link, start, factors


def _load(sample: Sample, cores: int) -> float:
    """Ranks that a core serves."""
    return max(1.0, sample.of["ranks"] / cores) if cores else 1.0


def _solve(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], starts: Sequence[float] | float = 0.0
) -> list[float]:
    """Coefficients, none negative, of ``starts`` + columns, with the least squares of relative errors."""
    a = np.array(columns) / np.array(seconds)[:, None]
    b = 1 - np.array(starts) / np.array(seconds)
    best, found = np.inf, np.zeros(a.shape[1])
    for size in range(1, a.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(a.shape[1]), size)):
            part = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            rest = float(((a[:, chosen] @ part - b) ** 2).sum())
            if (part >= 0).all() and rest < best:
                best, found = rest, np.zeros(a.shape[1])
                found[chosen] = part
    return found.tolist()
