"""The simulator against the clock: predicted times of steps that `train_step.py` has timed.

    mkdir runs machines
    for ranks in 2 4; do for preset in tiny mini small medium; do
        python -m compile_muon calibrate --out machines/${preset}_$ranks.json
        python benchmarks/train_step.py --preset $preset --ranks $ranks --contenders ours-muon --together --repeats 1 \\
            --steps 9 --warmup 3 --links unlimited 1600mbit 800mbit --json runs/${preset}_$ranks.json
    done; done
    python benchmarks/simulator.py runs/*.json --machine machines/*.json --out benchmarks/results/simulator.json

Prints each case, and writes all of them to --out with a picture beside it; NOTES.md has the results. A link's rate is
shared by all ranks equally. The speed of a host that others use changes within an hour: calibrate before each run, or
give one --machine for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import matplotlib
import torch
from contenders import Plan, our_config
from gpt import GPT, Shape, read_corpus, sample_batch
from links import BURST, UNLIMITED, bytes_per_second
from pictures import write_svg
from rich.console import Console
from rich.table import Table

from compile_muon.config import load_config, read_options
from compile_muon.planning import capture_step
from compile_muon.simulate import simulate_together
from compile_muon.simulate.machine import Machine, load_machine

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

#: allowed error of predicted seconds; and least difference of two stages that have to be ranked right
_BAR, _RANKED = 0.2, 0.1


@dataclass(frozen=True)
class Case:
    """A step of one model, stage and link: medians of the timed steps, and the simulation of the slowest rank."""

    preset: str
    ranks: int
    stage: int
    link: str
    machine: str
    predicted: float  # seconds
    measured: float  # seconds
    predicted_bytes: float  # sent by a rank, mean
    counted_bytes: float  # sent by a rank, mean

    @property
    def error(self) -> float:
        """The relative error of the predicted seconds, negative where they are too few."""
        return self.predicted / self.measured - 1


def limited(machine: Machine, link: str, ranks: int) -> Machine:
    """Return ``machine`` with its link limited to the rate ``link``, which all ranks share."""
    rank_rate = bytes_per_second(link) / ranks
    (fast,) = machine.links
    # A collective's factor beside its bytes is time of the cores, which a slower link does not stretch.
    share = min(1.0, rank_rate / fast.bandwidth)
    kinds = {kind: (hops, 1 + (factor - 1) * share) for kind, (hops, factor) in machine.collectives.items()}
    slower = replace(
        fast,
        bandwidth=min(fast.bandwidth, rank_rate),
        bandwidths=tuple((size, min(bandwidth, rank_rate)) for size, bandwidth in fast.bandwidths),
    )
    return replace(machine, links=(slower,), collectives=kinds)


def cases(record: dict, machine: Machine) -> Iterator[Case]:
    """Simulate each step of one run of `train_step.py` with the settings that it was timed with."""
    shape, options = Shape(**record["shape"]), record["options"]
    sample = sample_batch(read_corpus(), shape, torch.Generator().manual_seed(0))
    ours = [row for row in record["rows"] if row["contender"] == "ours-muon"]
    for stage in sorted({row["stage"] for row in ours}):
        trial = options | {"stage": stage, "reshard_after_forward": not options["keep_gathered"]}
        plan = Plan.of(trial, shape.batch, torch.device("cpu"))
        batch = [tensor[: plan.sequences] for tensor in sample]
        config = load_config(our_config(plan, "Muon"))
        frames = read_options(config.compile.options())
        world = plan.ranks
        steps = [
            capture_step(lambda shape=shape: GPT(shape), batch, world=world, rank=rank, config=config, options=frames)
            for rank in range(world)
        ]
        for row in (row for row in ours if row["stage"] == stage):
            link = row["link"]
            on = limited(machine, link, world)
            plays = {
                rank: lambda others, step=step, on=on: step.simulated(on, others=others)
                for rank, step in enumerate(steps)
            }
            timelines = list(simulate_together(plays).values())
            slowest = max(timelines, key=lambda timeline: timeline.seconds)
            # A link that was idle lets a burst through at once, and was idle while other links had their turn.
            at_once = min(BURST / bytes_per_second(link), sum(slowest.exposed.values()))
            yield Case(
                preset=options["preset"],
                ranks=world,
                stage=stage,
                link=link,
                machine=machine.name,
                predicted=slowest.seconds - at_once,
                measured=row["step_s"],
                predicted_bytes=statistics.fmean(timeline.traffic.bytes_sent for timeline in timelines),
                counted_bytes=row["counted_bytes_per_step"],
            )


def misranked(found: Sequence[Case]) -> list[str]:
    """List pairs of stages that differ by more than 10 % and are predicted in wrong order, on equal settings."""
    wrong = []
    for a, b in itertools.permutations(found, 2):
        # Not stages 1 and 2, which are the same step with one micro-batch: their difference is noise.
        comparable = (a.preset, a.ranks, a.link) == (b.preset, b.ranks, b.link) and {a.stage, b.stage} != {1, 2}
        if comparable and a.measured * (1 + _RANKED) < b.measured and a.predicted >= b.predicted:
            wrong.append(f"{a.preset}, {a.ranks} ranks, {a.link}: stage {a.stage} is faster than {b.stage}")
    return wrong


def table(found: Sequence[Case]) -> Table:
    """Make a table of predicted and measured milliseconds, errors and bytes."""
    rows = Table("model", "ranks", "stage", "link", "predicted", "measured", "error", "bytes")
    for case in found:
        error = f"{case.error:+.0%}"
        rows.add_row(
            case.preset,
            str(case.ranks),
            str(case.stage),
            case.link,
            f"{1e3 * case.predicted:,.1f} ms",
            f"{1e3 * case.measured:,.1f} ms",
            f"[red]{error}[/red]" if abs(case.error) > _BAR else error,
            "exact" if case.predicted_bytes == case.counted_bytes else f"{case.predicted_bytes - case.counted_bytes:+}",
        )
    return rows


def draw(found: Sequence[Case], path: Path) -> None:
    """Draw predicted over measured seconds, by ranks and link."""
    figure, axes = pyplot.subplots(figsize=(6, 5.5), layout="constrained")
    ends = [min(c.measured for c in found) / 1.5, max(c.measured for c in found) * 1.5]
    axes.fill_between(
        ends, [(1 - _BAR) * x for x in ends], [(1 + _BAR) * x for x in ends], color="#ddd", label=f"within {_BAR:.0%}"
    )
    axes.plot(ends, ends, color="#888", linewidth=0.8)
    links = list(dict.fromkeys(case.link for case in found))
    for ranks, marker in zip(sorted({case.ranks for case in found}), "os^v", strict=False):
        for link, colour in zip(links, ("#4c78a8", "#f58518", "#e45756", "#72b7b2"), strict=False):
            these = [case for case in found if (case.ranks, case.link) == (ranks, link)]
            label = f"{ranks} ranks, {link if link == UNLIMITED else link.replace('mbit', ' Mbit/s')}"
            x, y = [c.measured for c in these], [c.predicted for c in these]
            axes.scatter(x, y, s=22, marker=marker, color=colour, label=label)
    axes.set(xscale="log", yscale="log", xlabel="measured, s (median)", ylabel="simulated, s", xlim=ends)
    axes.legend(fontsize=8)
    write_svg(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of train_step.py")
    parser.add_argument(
        "--machine",
        nargs="+",
        default=["cpu"],
        help="name or file of the machine they were timed on: one, or each its own",
    )
    parser.add_argument("--out", type=Path, help="JSON file; the picture lies beside it")
    args = parser.parse_args()
    if len(args.machine) not in (1, len(args.results)):
        parser.error(f"--machine: {len(args.machine)} of them for {len(args.results)} results; give one, or as many")
    machines = [load_machine(name) for name in args.machine]
    machine_of_run = machines if len(machines) > 1 else machines * len(args.results)
    rows = [
        case
        for path, machine in zip(args.results, machine_of_run, strict=True)
        for case in cases(json.loads(path.read_text()), machine)
    ]
    rows.sort(key=lambda case: case.ranks)
    console = Console(width=110)
    console.print(table(rows))
    errors = sorted(abs(case.error) for case in rows)
    within = sum(error <= _BAR for error in errors)
    wrong = misranked(rows)
    exact = sum(case.predicted_bytes == case.counted_bytes for case in rows)
    console.print(
        f"{within} of {len(rows)} within {_BAR:.0%}; median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}; "
        f"bytes of {exact} exact; stages ranked wrong: {len(wrong)}"
    )
    for line in wrong:
        console.print(line)
    if args.out:
        machine_records = {machine.name: machine.to_json() for machine in machines}
        record = {"machines": machine_records, "cases": [asdict(case) | {"error": case.error} for case in rows]}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        draw(rows, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
