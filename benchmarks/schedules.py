"""What a schedule hides of Muon's exchange, simulated: an 8 B model on nodes of H100s, by this schedule and by others.

    python benchmarks/schedules.py MODEL --world 8 64 512 --replicas 1 8 --together \\
        --out benchmarks/results/schedules.json

MODEL is what `python -m compile_muon plan` takes; NOTES.md has the table for the shape of Llama 3.1 8B. Every
number is simulated; no rank runs. What differs is the order of the same nodes:

================  ===================================================================================================
this              `passes/lowering/schedule.py`, and resident weights gathered under the next forward
behind backward   exchanges start behind backward, each when Newton-Schulz of the one ahead of it has been queued, and
                  resident weights are waited for in step()
before            the same in buckets of 25 MiB: what this library did before it had a schedule and a cost model for it
none              every collective is waited for where it starts
================  ===================================================================================================

Muon's price is the step less the same step with AdamW for every parameter, in the same order.

One rank is played, one with most to orthogonalize. With ``--together`` it waits for others: of each exchange the rank
with most of it is played too, and every collective begins when the last of all these has issued it, whichever of its
groups each is in. That is what happens at most, since groups of both axes lie between any two of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.table import Table

from compile_muon.config import Config, FrameOptions, config_from_kwargs
from compile_muon.passes import LOWERING_PASSES
from compile_muon.passes.lowering import schedule
from compile_muon.planning.candidates import planned_for, with_adamw
from compile_muon.planning.machine import Machine, load_machine
from compile_muon.planning.models import Batch, load_subject
from compile_muon.planning.simulate import Timeline, simulate_together
from compile_muon.planning.trace import Target, Trace, trace_step

SCHEDULES = ("this", "behind backward", "before", "none")


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step: all of it, what waits for collectives, and how much more of each than with AdamW."""

    ranks: int
    replicas: int
    stage: int
    schedule: str
    step: float
    exposed: float
    price: float
    price_exposed: float
    played: int = 1


def _behind_backward(plan, reductions, exchanges, limit) -> None:
    """In place of ``exchange_when_reduced``: the first leg of a bucket behind Newton-Schulz of the one ahead of it."""
    last: list[schedule._Leg] = []
    for start, *rest in exchanges:
        plan.end += [start, *rest[:1]]
        last += rest[1:]
    plan.end += last


@contextlib.contextmanager
def ordered(name: str) -> Iterator[None]:
    """Graphs that are lowered meanwhile come in this order."""
    with contextlib.ExitStack() as stack:
        if name in ("behind backward", "before"):
            stack.enter_context(mock.patch.object(schedule, "exchange_when_reduced", _behind_backward))
        elif name == "none":
            unscheduled = replace(schedule.SCHEDULE, rewrite=lambda gm, ctx: gm)
            passes = [unscheduled if p is schedule.SCHEDULE else p for p in LOWERING_PASSES]
            stack.enter_context(mock.patch("compile_muon.planning.trace.LOWERING_PASSES", passes))
        yield


def kind(group: tuple[int, ...]) -> tuple[int, int]:
    """Groups along the same axis are alike."""
    return len(group), group[1] - group[0]


def timelines(trace: Trace, target: Target, ranks: Iterable[int], name: str, machine: Machine) -> list[Timeline]:
    """Of these ranks, which wait for each other, with their graphs in the order ``name``."""
    with ordered(name):
        steps = {rank: trace.captured(target, rank=rank) for rank in ranks}
    if name != "this":
        for rank, step in steps.items():
            graphs = tuple(replace(played, finished_by_forward=False, awaits={}) for played in step.graphs)
            steps[rank] = replace(step, graphs=graphs)
    plays = {rank: lambda others, step=step: step.simulated(machine, others=others) for rank, step in steps.items()}
    return list(simulate_together(plays, kind=kind).values())


def busiest(trace: Trace, target: Target) -> list[int]:
    """The rank with most to orthogonalize, and the others that have most of an exchange."""
    of_exchanges = trace.bucket_work(target)
    total = [sum(of_rank) for of_rank in zip(*of_exchanges, strict=True)]
    return list(dict.fromkeys(work.index(max(work)) for work in (total, *of_exchanges)))


def row(
    trace: Trace, config: Config, machine: Machine, ranks: int, replicas: int, stage: int, name: str, *, together: bool
) -> Row:
    """One step of the rank with most to orthogonalize."""
    axes = {"replicate": replicas, "shard": ranks // replicas} if replicas > 1 else {"shard": ranks}
    chosen = replace(config, zero=replace(config.zero, stage=stage))
    if name != "this":
        # It keeps to the limit of what exchanges hold; the others know none.
        options = FrameOptions(exchange_bytes=2**62)
        trace = replace(trace, options=replace(options, bucket_bytes=25 * 2**20) if name == "before" else options)
    with_muon, with_adamw_alone = (Target(ranks, of, axes, "nccl") for of in (chosen, with_adamw(chosen)))
    first, *others = busiest(trace, with_muon)
    played = [first, *others] if together else [first]
    steps = (
        timelines(trace, with_muon, played, name, machine)[0],
        timelines(trace, with_adamw_alone, [first], name, machine)[0],
    )
    muon, adamw = ((1e3 * t.seconds, 1e3 * sum(t.exposed.values())) for t in steps)
    return Row(ranks, replicas, stage, name, *muon, muon[0] - adamw[0], muon[1] - adamw[1], len(played))


def table(rows: Sequence[Row]) -> Table:
    """In milliseconds."""
    found = Table(title="simulated, ms of a step")
    for title in ("ranks", "replicas", "stage"):
        found.add_column(title, justify="right")
    found.add_column("schedule")
    for title in ("step", "exposed", "Muon over AdamW", "of it exposed", "of the step"):
        found.add_column(title, justify="right")
    for one in rows:
        numbers = (one.step, one.exposed, one.price, one.price_exposed)
        share = f"{one.price_exposed / one.step:.2%}"
        whose = map(str, (one.ranks, one.replicas, one.stage, one.schedule))
        found.add_row(*whose, *(f"{n:,.1f}" for n in numbers), share)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1], help="of one node or more each")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--together", action="store_true", help="play the busiest ranks, which wait for each other")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine = load_machine(given.machine)
    config = config_from_kwargs(gradient_accumulation_steps=1, param_dtype="bf16")
    config = planned_for(config, machine, given.machine)
    subject = load_subject(given.model, Batch(given.tokens, given.tokens))
    trace = trace_step(subject.build, subject.batch, config, FrameOptions())
    rows = []
    for ranks, replicas, stage, name in itertools.product(given.world, given.replicas, given.stages, given.schedules):
        if ranks % (replicas * (machine.node or 1)) == 0:
            rows.append(row(trace, config, machine, ranks, replicas, stage, name, together=given.together))
            print(rows[-1], flush=True)
    Console(width=140).print(table(rows))
    if given.out:
        record = {"simulated": True, "machine": machine.name, "model": subject.name, "rows": [asdict(r) for r in rows]}
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
