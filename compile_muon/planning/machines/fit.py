"""Fit a machine description to measurements: the constants of the cost formulas that come nearest."""

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

#: bytes from which on a collective on CPUs is mostly copies
_LARGE = 2**20
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


def _transfer(machine: Machine, nbytes: float, way: str, ranks: int) -> float:
    """A transfer from host memory to a device ("host"), or from disk to host memory ("disk"), with as much going back
    at the same time; or host memory that AdamW reads and writes ("adamw").

    `nbytes` are those of the busier side; a disk counts both ways.
    """
    own = machine.shared_by(ranks)
    return nbytes / {"host": own.host_bandwidth, "disk": own.disk_bandwidth, "adamw": own.host_memory_bandwidth}[way]


def _collective(machine: Machine, nbytes: float, kind: str, ranks: int, core_seconds: float = 0.0) -> float:
    """A collective of ranks 0 to ``ranks - 1``, each of which sends `nbytes`.

    `core_seconds`, the CPU time of all threads of a rank meanwhile, 0 if not measured, is in the samples for
    :func:`_host`.
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
    """Return a machine description fitted to the samples."""
    groups: dict[str, list[Sample]] = {group: [] for group in _FORMULAS}
    for sample in measured.samples:
        groups[sample.group].append(sample)
    kernel_seconds = measured.kernel_seconds
    # A kernel hardly slower than the least one would seem infinitely fast: subtract at most 90 % of its time.
    bandwidths = tuple(
        (float(s.work), s.work / max(s.seconds - kernel_seconds, 0.1 * s.seconds)) for s in groups["kernels"]
    )
    products = _by("dtype", groups["products"])
    starts = {dtype: _start(same, kernel_seconds) for dtype, same in products.items()}
    link, start_seconds, kinds = _link(groups["collectives"], measured.cores)
    late_seconds = [s.seconds / _load(s, measured.cores) for s in groups["late ranks"]]
    # Bytes/s of a rank, by way.
    bandwidth_of = {way: max(s.work / s.seconds for s in same) for way, same in _by("way", groups["offload"]).items()}
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
        host_bandwidth=bandwidth_of.get("host", 0.0),
        host_memory_bandwidth=bandwidth_of.get("adamw", 0.0),
        disk_bandwidth=bandwidth_of.get("disk", 0.0) * (min(measured.node, measured.cores) if measured.cores else 1),
        sources={"all": f"python -m compile_muon calibrate, {measured.node} ranks of one machine"},
    )
    # The largest sample only: smaller ones are mostly their bytes and their start.
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


def _by(name: str, samples: Sequence[Sample]) -> dict[Any, list[Sample]]:
    """Group samples by one of their parameters, in the order of measurement."""
    return {key: [s for s in samples if s.of[name] == key] for key in dict.fromkeys(s.of[name] for s in samples)}


def _start(products: Sequence[Sample], least: float) -> float:
    """Return the time of a product beside its operations: the median over the products of which it is most of the time;
    the least kernel's if there are none."""
    best = max(s.work / s.seconds for s in products)
    starts = [(s.seconds - s.work / best, s.seconds) for s in products]
    return statistics.median([rest for rest, seconds in starts if rest > 0.75 * seconds] or [least])


def _rates(products: Sequence[Sample], start: float) -> Table:
    """Return the rate for each smallest dimension that best fits the shapes with it."""
    rates = []
    best = max(s.work / s.seconds for s in products)
    smallest = {id(s): min(s.of[dimension] for dimension in "mnk") for s in products}
    for size in sorted(set(smallest.values())):
        same = [s for s in products if smallest[id(s)] == size]
        (per_operation,) = _solve([[s.work] for s in same], [s.seconds for s in same], start)
        # The smallest products may take no longer than the start.
        rates.append((float(size), min(best, 1 / per_operation) if per_operation else best))
    return tuple(rates)


def _attention_rates(attention: Sequence[Sample], start: float) -> Table:
    """Return the rate by sequence length, over all widths."""
    return tuple(
        (float(sequence), statistics.geometric_mean(s.work / max(s.seconds - start, 0.1 * s.seconds) for s in same))
        for sequence, same in sorted(_by("sequence", attention).items())
    )


def _host(steps: Sequence[Sample], collectives: Sequence[Sample]) -> dict[str, float]:
    """Return host seconds by kind: of a graph and a parameter from single ranks; of a collective from what several
    ranks add."""
    single_rank_steps = [sample for sample in steps if sample.of["ranks"] == 1]
    if not single_rank_steps:
        return {}
    graph, parameter = _solve(
        [[_GRAPHS, _GRAPHS * s.work] for s in single_rank_steps], [s.seconds for s in single_rank_steps]
    )
    host_seconds = {"graph": graph, "parameter": parameter}
    several = [s for s in steps if s.of["collectives"]]
    if several:
        rest = [s.seconds - _GRAPHS * (graph + s.work * parameter) for s in several]
        host_seconds["collective"] = max(0.0, sum(rest) / sum(s.of["collectives"] for s in several))
    large = [s for s in collectives if s.work >= _LARGE and s.of["core_seconds"]]
    if large:
        host_seconds["byte"] = statistics.median(s.of["core_seconds"] / s.work for s in large)
    return host_seconds


def _link(collectives: Sequence[Sample], cores: int) -> tuple[Link, float, dict[str, tuple[float, float]]]:
    """Return the link that joins all ranks, the start of a collective in seconds, and kind -> (hops, bytes).

    The first kind determines link and start; the pairs of the others are multiples of its hops and bytes. Without
    collectives the link is a placeholder.
    """
    if not collectives:
        return Link(None, 1.0, 0.0), 0.0, {}
    (_, base), *other_kinds = _by("kind", collectives).items()
    hops = {id(s): _load(s, cores) * (s.of["ranks"] - 1) for s in collectives}
    several = len(_by("ranks", base)) > 1  # with one number of ranks, start and hop cannot be told apart
    columns = [[_load(s, cores) * several, hops[id(s)], s.work] for s in base]
    start, latency, per_byte = _solve(columns, [s.seconds for s in base])
    waits = {id(s): _load(s, cores) * start + hops[id(s)] * latency for s in collectives}
    # Group samples that send about the same bytes, whatever the number of ranks.
    by_size: dict[int, list[float]] = {}
    for s in base:
        # Where latency dominates, the time says nothing of the bandwidth.
        if s.work * per_byte > waits[id(s)]:
            rate = s.work / max(s.seconds - waits[id(s)], 0.1 * s.seconds)
            by_size.setdefault(round(math.log2(s.work)), []).append(rate)
    bandwidths = tuple((2.0**power, statistics.geometric_mean(same)) for power, same in sorted(by_size.items()))
    bandwidth = bandwidths[-1][1] if bandwidths else 1 / max(per_byte, 1e-12)
    link = Link(None, bandwidth, latency, bandwidths=bandwidths)
    factors = {}
    for kind, same in other_kinds:
        columns = [[hops[id(s)] * latency, link.transfer_seconds(s.work)] for s in same]
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
