"""The part of Muon's exchange that a schedule hides, simulated: an 8 B model on nodes of H100s, by several schedules.

    python benchmarks/schedules.py MODEL --world 8 64 512 --replicas 1 8 --together \\
        --out benchmarks/results/schedules.json

MODEL is an argument as of `python -m compile_muon plan`; NOTES.md has the table for the shape of Llama 3.1 8B. Every
number is simulated; no rank runs. Schedules differ in the order of the same nodes:

================  ===================================================================================================
this              `passes/lowering/schedule.py`, and resident weights gathered under the next forward
behind backward   exchanges start after backward, each when Newton-Schulz of the one ahead of it has been queued, and
                  step() waits for resident weights
before            the same in buckets of 25 MiB: without a schedule and its cost model
none              every collective is waited for where it starts
================  ===================================================================================================

Muon's price is the time of the step less that of the same step with AdamW for every parameter, in the same order.

One rank is simulated, one with most to orthogonalize. With ``--together`` so is, for each exchange, the rank with most
of it, and every collective begins when the last of these ranks has issued it, whichever of its groups each is in. That
is an upper bound, since groups of both axes lie between any two ranks.
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
from compile_muon.planning.models import Batch, load_subject
from compile_muon.planning.trace import Target, Trace, trace_step
from compile_muon.simulate import Timeline, simulate_together
from compile_muon.simulate.machine import Machine, load_machine

SCHEDULES = ("this", "behind backward", "before", "none")


@dataclass(frozen=True)
class Row:
    """A simulated step, times in milliseconds."""

    ranks: int
    replicas: int
    stage: int
    schedule: str
    step: float
    exposed: float  # waiting for collectives
    price: float  # of ``step``, over AdamW
    price_exposed: float  # of ``exposed``, over AdamW
    played: int = 1  # simulated ranks


def _behind_backward(plan, reductions, exchanges, limit) -> None:
    """Replace ``exchange_when_reduced``: put a bucket's first leg behind Newton-Schulz of the bucket ahead of it."""
    last_legs: list[schedule._Leg] = []
    for start, *rest in exchanges:
        plan.end += [start, *rest[:1]]
        last_legs += rest[1:]
    plan.end += last_legs


@contextlib.contextmanager
def ordered(name: str) -> Iterator[None]:
    """Lower graphs by the schedule ``name`` inside a ``with`` block."""
    with contextlib.ExitStack() as stack:
        if name in ("behind backward", "before"):
            stack.enter_context(mock.patch.object(schedule, "exchange_when_reduced", _behind_backward))
        elif name == "none":
            unscheduled = replace(schedule.SCHEDULE, rewrite=lambda gm, ctx: gm)
            passes = [unscheduled if p is schedule.SCHEDULE else p for p in LOWERING_PASSES]
            stack.enter_context(mock.patch("compile_muon.planning.trace.LOWERING_PASSES", passes))
        yield


def kind(group: tuple[int, ...]) -> tuple[int, int]:
    """Return a key that is equal for groups along the same axis."""
    return len(group), group[1] - group[0]


def timelines(trace: Trace, target: Target, ranks: Iterable[int], name: str, machine: Machine) -> list[Timeline]:
    """Simulate these ranks, which wait for each other, with their graphs in the order ``name``."""
    with ordered(name):
        steps = {rank: trace.captured(target, rank=rank) for rank in ranks}
    if name != "this":
        for rank, step in steps.items():
            graphs = tuple(replace(played, finished_by_forward=False, awaits={}) for played in step.graphs)
            steps[rank] = replace(step, graphs=graphs)
    plays = {rank: lambda others, step=step: step.simulated(machine, others=others) for rank, step in steps.items()}
    return list(simulate_together(plays, kind=kind).values())


def busiest(trace: Trace, target: Target) -> list[int]:
    """Return the rank with most to orthogonalize, then the ranks with most of an exchange."""
    exchange_work = trace.bucket_work(target)
    total = [sum(rank_work) for rank_work in zip(*exchange_work, strict=True)]
    return list(dict.fromkeys(work.index(max(work)) for work in (total, *exchange_work)))


def row(
    trace: Trace, config: Config, machine: Machine, ranks: int, replicas: int, stage: int, name: str, *, together: bool
) -> Row:
    """Simulate one step of the rank with most to orthogonalize."""
    axes = {"replicate": replicas, "shard": ranks // replicas} if replicas > 1 else {"shard": ranks}
    chosen = replace(config, zero=replace(config.zero, stage=stage))
    if name != "this":
        # Only this schedule keeps to the limit of bytes that exchanges hold.
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
    """Make a table of the rows, in milliseconds."""
    grid = Table(title="simulated, ms of a step")
    for title in ("ranks", "replicas", "stage"):
        grid.add_column(title, justify="right")
    grid.add_column("schedule")
    for title in ("step", "exposed", "Muon over AdamW", "of it exposed", "of the step"):
        grid.add_column(title, justify="right")
    for one in rows:
        numbers = (one.step, one.exposed, one.price, one.price_exposed)
        share = f"{one.price_exposed / one.step:.2%}"
        settings = map(str, (one.ranks, one.replicas, one.stage, one.schedule))
        grid.add_row(*settings, *(f"{n:,.1f}" for n in numbers), share)
    return grid


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
    args = parser.parse_args()
    machine = load_machine(args.machine)
    config = config_from_kwargs(gradient_accumulation_steps=1, param_dtype="bf16")
    config = planned_for(config, machine, args.machine)
    subject = load_subject(args.model, Batch(args.tokens, args.tokens))
    trace = trace_step(subject.build, subject.batch, config, FrameOptions())
    rows = []
    for ranks, replicas, stage, name in itertools.product(args.world, args.replicas, args.stages, args.schedules):
        if ranks % (replicas * (machine.node or 1)) == 0:
            rows.append(row(trace, config, machine, ranks, replicas, stage, name, together=args.together))
            print(rows[-1], flush=True)
    Console(width=140).print(table(rows))
    if args.out:
        record = {"simulated": True, "machine": machine.name, "model": subject.name, "rows": [asdict(r) for r in rows]}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
