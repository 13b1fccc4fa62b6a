"""The machine whose formulas come nearest to what was measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from compile_muon.passes.costs import Link, Table
from compile_muon.planning.machine import Machine
from compile_muon.planning.machines.measure import Measured
from compile_muon.planning.machines.samples import (
    AttentionSample,
    CollectiveSample,
    FunctionSample,
    LateSample,
    MoveSample,
    ProductSample,
    Sample,
    StepSample,
    TransferSample,
)

__all__ = ["completed", "fit"]

S = TypeVar("S", bound=Sample)

#: bytes of collectives from which on the cores do little else than copy them
_LARGE = 2**20


def fit(measured: Measured, name: str) -> Machine:
    """A description out of the samples that are not held out."""

    def seen(kind: type[S]) -> list[S]:
        return [sample for sample in measured.samples if isinstance(sample, kind) and not sample.held_out]

    products, collectives, transfers = seen(ProductSample), seen(CollectiveSample), seen(TransferSample)
    least = measured.kernel_seconds
    # never more than ten times what the seconds say, where these are hardly more than those of the least kernel
    bandwidths = tuple((float(s.nbytes), s.nbytes / max(s.seconds - least, 0.1 * s.seconds)) for s in seen(MoveSample))
    by_dtype = {dtype: [s for s in products if s.dtype == dtype] for dtype in dict.fromkeys(s.dtype for s in products)}
    starts = {dtype: _start(same, least) for dtype, same in by_dtype.items()}
    link, start_seconds, kinds = _link(collectives, measured.cores)
    machine = Machine(
        name=name,
        device=measured.device,
        memory_bytes=measured.memory_bytes,
        memory_bandwidth=bandwidths[-1][1],
        kernel_seconds=least,
        rates={dtype: _rates(same, starts[dtype]) for dtype, same in by_dtype.items()},
        product_starts=starts,
        links=(link,),
        bandwidths=bandwidths,
        start_seconds=start_seconds,
        late_seconds=_late(seen(LateSample), measured.cores),
        collectives=kinds,
        cores=measured.cores,
        host_bandwidth=_bandwidth("host", transfers),
        host_memory_bandwidth=_bandwidth("adamw", transfers),
        disk_bandwidth=_bandwidth("disk", transfers) * (min(measured.node, measured.cores) if measured.cores else 1),
        sources={"all": f"python -m compile_muon calibrate, {measured.node} ranks of one machine"},
    )
    attention = seen(AttentionSample)
    return replace(
        machine,
        function_seconds=_function_seconds(seen(FunctionSample), machine),
        attention_rates={
            dtype: _attention([s for s in attention if s.dtype == dtype], machine)
            for dtype in dict.fromkeys(s.dtype for s in attention)
        },
        host_seconds=_host(seen(StepSample), collectives),
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


def _bandwidth(way: str, samples: Sequence[TransferSample]) -> float:
    """Bytes/s of a rank; 0 where it was not measured."""
    return max((s.served / s.seconds for s in samples if s.way == way), default=0.0)


def _operations(sample: ProductSample) -> float:
    return 2.0 * sample.batch * sample.m * sample.n * sample.k


def _start(products: Sequence[ProductSample], least: float) -> float:
    """What a product takes beside its operations: the median of those of which that is most; else the least kernel."""
    best = max(_operations(s) / s.seconds for s in products)
    starts = [(s.seconds - _operations(s) / best, s.seconds) for s in products]
    return statistics.median([rest for rest, seconds in starts if rest > 0.75 * seconds] or [least])


def _rates(products: Sequence[ProductSample], start: float) -> Table:
    """For each smallest dimension the rate that fits the shapes that have it best."""
    found = []
    best = max(_operations(s) / s.seconds for s in products)
    for size in sorted({min(s.m, s.n, s.k) for s in products}):
        same = [s for s in products if min(s.m, s.n, s.k) == size]
        (per_operation,) = _solve([[_operations(s)] for s in same], [s.seconds for s in same], start)
        # of the smallest the start may be all there is
        found.append((float(size), min(best, 1 / per_operation) if per_operation else best))
    return tuple(found)


def _function_seconds(functions: Sequence[FunctionSample], machine: Machine) -> float:
    """Of the kernels that take longest: the others are mostly their bytes and their start."""
    found = [(s.seconds - s.predicted(machine)) / (s.entries * s.functions) for s in functions]
    return max(0.0, found[-1]) if found else 0.0


def _attention(attention: Sequence[AttentionSample], machine: Machine) -> Table:
    """The rate by the length of the sequences, over all widths."""
    start = 2 * machine.product_start(attention[0].dtype)
    found = []
    for sequence in sorted({s.sequence for s in attention}):
        rates = [s.operations / max(s.seconds - start, 0.1 * s.seconds) for s in attention if s.sequence == sequence]
        found.append((float(sequence), statistics.geometric_mean(rates)))
    return tuple(found)


def _host(steps: Sequence[StepSample], collectives: Sequence[CollectiveSample]) -> dict[str, float]:
    """What a step takes of a rank by itself; and of several, how much more, for each collective."""
    alone = [sample for sample in steps if sample.ranks == 1]
    if not alone:
        return {}
    columns = [[float(s.graphs), float(s.graphs * s.parameters)] for s in alone]
    graph, parameter = _solve(columns, [s.seconds for s in alone])
    found = {"graph": graph, "parameter": parameter}
    together = [s for s in steps if s.collectives]
    if together:
        rest = [s.seconds - s.graphs * (graph + s.parameters * parameter) for s in together]
        found["collective"] = max(0.0, sum(rest) / sum(s.collectives for s in together))
    sent = [s for s in collectives if s.nbytes >= _LARGE and s.core_seconds]
    if sent:
        found["byte"] = statistics.median(s.core_seconds / s.nbytes for s in sent)
    return found


def _link(collectives: Sequence[CollectiveSample], cores: int) -> tuple[Link, float, dict[str, tuple[float, float]]]:
    """The link that joins all ranks, the start of a collective, and kind -> (hops, bytes).

    The first kind gives the first two, the others how many times its hops and bytes they take. Without collectives the
    link is one that nobody uses.
    """
    if not collectives:
        return Link(None, 1.0, 0.0), 0.0, {}
    kinds = dict.fromkeys(sample.kind for sample in collectives)
    first = next(iter(kinds))
    base = [sample for sample in collectives if sample.kind == first]
    several = len({sample.ranks for sample in base}) > 1  # else a start and a hop are the same
    columns = [[_load(s, cores) * several, _load(s, cores) * (s.ranks - 1), s.nbytes] for s in base]
    start, latency, per_byte = _solve(columns, [sample.seconds for sample in base])

    def waits(sample: CollectiveSample) -> tuple[float, float]:
        return _load(sample, cores) * start, _load(sample, cores) * (sample.ranks - 1) * latency

    bandwidths = []
    for nbytes, same in _by_size(base):
        # where waiting is more than the bytes, nothing is to be learnt of these
        clear = [
            s.nbytes / max(s.seconds - sum(waits(s)), 0.1 * s.seconds)
            for s in same
            if s.nbytes * per_byte > sum(waits(s))
        ]
        if clear:
            bandwidths.append((nbytes, statistics.geometric_mean(clear)))
    bandwidth = bandwidths[-1][1] if bandwidths else 1 / max(per_byte, 1e-12)
    link = Link(None, bandwidth, latency, bandwidths=tuple(bandwidths))
    factors = {}
    for kind in kinds:
        if kind != first:
            group = [sample for sample in collectives if sample.kind == kind]
            columns = [[waits(s)[1], link.transfer_seconds(s.nbytes)] for s in group]
            hops, times = _solve(columns, [s.seconds for s in group], [waits(s)[0] for s in group])
            factors[kind] = (hops, times)
    return link, start, factors


def _late(late: Sequence[LateSample], cores: int) -> float:
    """Of ranks that have a core each."""
    return statistics.geometric_mean(s.seconds / _load(s, cores) for s in late) if late else 0.0


def _by_size(samples: Sequence[CollectiveSample]) -> list[tuple[float, list[CollectiveSample]]]:
    """Together what sends about as much: of one place in the plan, by any number of ranks."""
    found: dict[int, list[CollectiveSample]] = {}
    for sample in samples:
        found.setdefault(round(math.log2(sample.nbytes)), []).append(sample)
    return [(2.0**power, same) for power, same in sorted(found.items())]


def _load(sample: CollectiveSample | LateSample, cores: int) -> float:
    return max(1.0, sample.ranks / cores) if cores else 1.0


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
