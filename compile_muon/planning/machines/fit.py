"""Fit a machine description to measurements: the constants of the cost formulas that come nearest."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compile_muon.passes.costs import Link, Table
from compile_muon.simulate.machine import Machine

#: graphs that the host enters in a measured step: forward, backward, the optimizer's step, each with all parameters
_GRAPHS = 3


@dataclass(frozen=True)
class Sample:
    """A measurement, taken while as many ranks as there are cores do the same."""

    group: str  # key of :data:`_FORMULAS`, whose formula `work` and `of` fit
    seconds: float  # median over the rounds
    work: float  # operations, bytes or entries
    of: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the formula

    def __str__(self) -> str:
        return ", ".join([f"{self.work:,.0f}", *(f"{name} {value}" for name, value in self.of.items())])

    def predicted(self, machine: Machine) -> float:
        """Return the seconds that `machine` predicts."""
        return _FORMULAS[self.group](machine, self.work, **self.of)

    def error(self, machine: Machine) -> float:
        """Return the error of the prediction as a part of the measured seconds; negative if too short."""
        return self.predicted(machine) / self.seconds - 1


@dataclass(frozen=True)
class Measured:
    """Measurements of a machine."""

    device: str  # "cuda" or "cpu"
    kernel_seconds: float  # of the least kernel
    cores: int  # shared by the ranks; 0 on GPUs
    node: int  # ranks that share a machine
    memory_bytes: int  # of a GPU, or of all ranks of a CPU
    samples: tuple[Sample, ...]


# --------------------------------------------------------------------------------------------------------- formulas


def _attention(machine: Machine, operations: float, sequence: int, width: int, dtype: str) -> float:
    """Causal attention, forward and backward, with the operations that ``torch.utils.flop_counter`` counts."""
    rate = machine.attention_rate(min(sequence, width), sequence, dtype)
    return 2 * machine.product_start(dtype) + operations / rate


def _step(machine: Machine, parameters: float, ranks: int, collectives: int) -> float:
    """A training step of so little compute that it takes the time of the host; `parameters` have few entries.

    In CPU time of a rank, which excludes waits: those are "late ranks".
    """
    host = machine.shared_by(ranks).host_seconds
    alone = host.get("graph", 0.0) + parameters * host.get("parameter", 0.0)
    return _GRAPHS * alone + collectives * host.get("collective", 0.0)


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
    # bytes over a way of offload, a field of the machine, with as many going back at the same time; a disk counts both
    "offload": lambda machine, nbytes, way, ranks: nbytes / getattr(machine.shared_by(ranks), way),
    # ranks 0 to ``ranks - 1``, each of which sends the bytes
    "collectives": lambda machine, nbytes, kind, ranks: machine.shared_by(ranks).collective_seconds(
        kind, nbytes, range(ranks)
    ),
    # core time of a rank in a collective on CPUs that is mostly copies
    "copies": lambda machine, nbytes: nbytes * machine.host_seconds.get("byte", 0.0),
}


# -------------------------------------------------------------------------------------------------------------- fit


def fit(measured: Measured, name: str) -> Machine:
    """Return a machine description fitted to the samples."""
    groups = defaultdict[str, list[Sample]](list, _by(lambda sample: sample.group, measured.samples))
    kernel_seconds = measured.kernel_seconds
    bandwidths = tuple((float(s.work), _rate(s, kernel_seconds)) for s in groups["kernels"])
    products = _by("dtype", groups["products"])
    starts = {dtype: _start(same, kernel_seconds) for dtype, same in products.items()}
    link, start_seconds, kinds = _link(groups["collectives"], measured.cores)
    late_seconds = [s.seconds / _load(s, measured.cores) for s in groups["late ranks"]]
    # Bytes/s of a rank; ranks that share cores share a disk.
    by_way = _by("way", groups["offload"])
    offload: dict[str, Any] = {way: max(s.work / s.seconds for s in same) for way, same in by_way.items()}
    if measured.cores and "disk_bandwidth" in offload:
        offload["disk_bandwidth"] *= min(measured.node, measured.cores)
    machine = Machine(
        name=name,
        device=measured.device,
        memory_bytes=measured.memory_bytes,
        memory_bandwidth=bandwidths[-1][1],
        kernel_seconds=kernel_seconds,
        rates={dtype: _rates(same, starts[dtype]) for dtype, same in products.items()},
        product_starts=starts,
        links=(link,),
        bandwidths=bandwidths,
        start_seconds=start_seconds,
        # For ranks with a core each; Machine.shared_by scales it by the load.
        late_seconds=statistics.geometric_mean(late_seconds) if late_seconds else 0.0,
        collectives=kinds,
        cores=measured.cores,
        **offload,
        sources={"all": f"python -m compile_muon calibrate, {measured.node} ranks of one machine"},
    )
    # The largest sample only: smaller ones are mostly their bytes and their start.
    functions = [(s.seconds - s.predicted(machine)) / s.work for s in groups["functions"][-1:]]
    return replace(
        machine,
        function_seconds=max(0.0, *functions) if functions else 0.0,
        attention_rates={
            dtype: _rates_by("sequence", same, 2 * machine.product_start(dtype))
            for dtype, same in _by("dtype", groups["attention"]).items()
        },
        host_seconds=_host(groups["steps"], groups["copies"]),
    )


def completed(machine: Machine, base: Machine) -> Machine:
    """Return `machine`, as :func:`fit` made it, with whatever was not measured taken from `base`.

    Of the links only the one inside a node is measured, or none if there was one rank.
    """
    single_rank = not machine.links[0].bandwidths and machine.links[0].bandwidth <= 1.0
    fields = ["fill_entries", "architecture", "processors", "collective_processors"]
    fields += ["host_seconds", "host_bandwidth", "host_memory_bandwidth", "disk_bandwidth"]
    from_base = {name: getattr(base, name) for name in fields if not getattr(machine, name)}
    if single_rank:
        from_base |= {name: getattr(base, name) for name in ("links", "start_seconds", "protocols", "collectives")}
    elif base.node is not None and machine.node is None:
        from_base["links"] = (replace(machine.links[0], within=base.node), *base.links[1:])
    names = ", ".join(sorted(from_base))
    return replace(
        machine, **from_base, sources={**machine.sources, "not measured": f"{names}: as {base.name} has them"}
    )


def _by(key: str | Callable[[Sample], Any], samples: Sequence[Sample]) -> dict[Any, list[Sample]]:
    """Group samples by one of their parameters, or what `key` returns, in the order of measurement."""
    keys = [sample.of[key] if isinstance(key, str) else key(sample) for sample in samples]
    return {one: [s for s, k in zip(samples, keys, strict=True) if k == one] for one in dict.fromkeys(keys)}


def _rate(sample: Sample, rest: float) -> float:
    # A sample hardly longer than the rest would seem infinitely fast.
    return sample.work / max(sample.seconds - rest, 0.1 * sample.seconds)


def _rates_by(
    key: str | Callable[[Sample], Any], samples: Sequence[Sample], rest: float | Callable[[Sample], float]
) -> Table:
    """Return the mean rate of the samples of each key, beside `rest` seconds."""
    return tuple(
        (float(at), statistics.geometric_mean(_rate(s, rest(s) if callable(rest) else rest) for s in same))
        for at, same in sorted(_by(key, samples).items())
    )


def _start(products: Sequence[Sample], least: float) -> float:
    """Return the time of a product beside its operations: the median of those that mostly take it, else `least`."""
    best = max(s.work / s.seconds for s in products)
    starts = [(s.seconds - s.work / best, s.seconds) for s in products]
    return statistics.median([rest for rest, seconds in starts if rest > 0.75 * seconds] or [least])


def _rates(products: Sequence[Sample], start: float) -> Table:
    """Return the rate for each smallest dimension that best fits the shapes with it."""
    rates = []
    best = max(s.work / s.seconds for s in products)
    for size, same in sorted(_by(lambda s: min(s.of[dimension] for dimension in "mnk"), products).items()):
        (per_operation,) = _solve([[s.work] for s in same], [s.seconds for s in same], start)
        # The smallest products may take no longer than the start.
        rates.append((float(size), min(best, 1 / per_operation) if per_operation else best))
    return tuple(rates)


def _host(steps: Sequence[Sample], copies: Sequence[Sample]) -> dict[str, float]:
    """Return host seconds by kind: graph and parameter from single ranks, collective from what several add."""
    single = [sample for sample in steps if sample.of["ranks"] == 1]
    if not single:
        return {}
    graph, parameter = _solve([[_GRAPHS, _GRAPHS * s.work] for s in single], [s.seconds for s in single])
    host_seconds = {"graph": graph, "parameter": parameter}
    if several := [s for s in steps if s.of["collectives"]]:
        rest = [s.seconds - _GRAPHS * (graph + s.work * parameter) for s in several]
        host_seconds["collective"] = max(0.0, sum(rest) / sum(s.of["collectives"] for s in several))
    if copies:
        host_seconds["byte"] = statistics.median(s.seconds / s.work for s in copies)
    return host_seconds


def _link(collectives: Sequence[Sample], cores: int) -> tuple[Link, float, dict[str, tuple[float, float]]]:
    """Return the link that joins all ranks, the start of a collective in seconds, and kind -> (hops, bytes).

    The first kind determines link and start; the pairs of the others are multiples of its hops and bytes. Without
    collectives the link is a placeholder.
    """
    if not collectives:
        return Link(None, 1.0, 0.0), 0.0, {}

    def hops(sample: Sample) -> float:
        return _load(sample, cores) * (sample.of["ranks"] - 1)

    def waits(sample: Sample) -> float:
        return _load(sample, cores) * start + hops(sample) * latency

    (_, base), *other_kinds = _by("kind", collectives).items()
    several = len(_by("ranks", base)) > 1  # with one number of ranks, start and hop cannot be told apart
    columns = [[_load(s, cores) * several, hops(s), s.work] for s in base]
    start, latency, per_byte = _solve(columns, [s.seconds for s in base])
    # Where latency dominates, the time says nothing of the bandwidth. Samples that send about the same bytes count
    # together, whatever the number of ranks.
    telling = [s for s in base if s.work * per_byte > waits(s)]
    bandwidths = _rates_by(lambda s: 2.0 ** round(math.log2(s.work)), telling, waits)
    bandwidth = bandwidths[-1][1] if bandwidths else 1 / max(per_byte, 1e-12)
    link = Link(None, bandwidth, latency, bandwidths=bandwidths)
    factors = {}
    for kind, same in other_kinds:
        columns = [[hops(s) * latency, link.transfer_seconds(s.work)] for s in same]
        of_hops, of_bytes = _solve(columns, [s.seconds for s in same], [_load(s, cores) * start for s in same])
        factors[kind] = (of_hops, of_bytes)
    return link, start, factors


def _load(sample: Sample, cores: int) -> float:
    """Return how many ranks a core serves."""
    return max(1.0, sample.of["ranks"] / cores) if cores else 1.0


def _solve(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], starts: Sequence[float] | float = 0.0
) -> list[float]:
    """Return non-negative coefficients of `starts` + columns with the least squared relative error."""
    a = np.array(columns) / np.array(seconds)[:, None]
    b = 1 - np.array(starts) / np.array(seconds)
    best, coefficients = np.inf, np.zeros(a.shape[1])
    for size in range(1, a.shape[1] + 1):
        for subset in map(list, itertools.combinations(range(a.shape[1]), size)):
            part = np.linalg.lstsq(a[:, subset], b, rcond=None)[0]
            residual = float(((a[:, subset] @ part - b) ** 2).sum())
            if (part >= 0).all() and residual < best:
                best, coefficients = residual, np.zeros(a.shape[1])
                coefficients[subset] = part
    return coefficients.tolist()
