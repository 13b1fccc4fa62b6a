"""The report of trial records: the table, the ratios compared with the project's bars, the JSON and the chart."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from contenders import EARLIER, NO_STAGE
from links import UNLIMITED, bytes_per_second
from pictures import write_svg
from rich.console import Console
from rich.table import Table

_DEEPSPEED = ("deepspeed-muon", "deepspeed-muon-compiled")
_COLOURS = {
    "ours-muon": "#0b6e4f",
    "ours-muon-auto": "#117a65",
    "ours-muon-graphs": "#138d75",
    "ours-muon-bfloat16": "#16a085",
    "ours-muon-8bit": "#45b39d",
    EARLIER: "#8fae9f",
    "ours-adamw": "#7fc8a9",
    "deepspeed-muon": "#b03a2e",
    "deepspeed-muon-compiled": "#e59866",
    "fsdp2-adamw": "#5d6d7e",
    "ddp-muon": "#aeb6bf",
    "plain-muon": "#85929e",
    "plain-adamw": "#d5d8dc",
    "compute-only": "#d9d2c5",
}


@dataclass(frozen=True)
class Row:
    """One contender at one stage, over all its repeats. Times in seconds, sizes in bytes."""

    contender: str
    stage: int
    link: str
    step_s: float
    step_min_s: float
    cpu_s: float
    tokens_per_s: float
    compile_cold_s: float
    compile_warm_s: float | None
    peak_bytes: float | None
    bytes_per_step: float | None
    counted_bytes_per_step: float | None
    loss: float
    samples: int
    note: str


@dataclass(frozen=True)
class Verdict:
    """A line of the ratio report; `met` is None where a side was not measured."""

    text: str
    met: bool | None


def summarize(records: list[dict], tokens_per_step: int) -> list[Row]:
    """Make a row a contender, stage and link: medians over all timed steps; `tokens_per_step` is that of all ranks."""
    rows = []
    for contender, stage, link in dict.fromkeys((r["contender"], r["stage"], _link(r)) for r in records):
        runs = [run for run in _ran(records, contender, stage) if _link(run) == link]
        if not runs:
            continue
        steps = [s for run in runs for s in run["step_s"]]
        median = statistics.median(steps)
        warm = [run["first_step_s"] - median for run in runs if run["repeat"] > 0]
        cold = [run["first_step_s"] - median for run in runs if run["repeat"] == 0]
        rows.append(
            Row(
                contender=contender,
                stage=stage,
                link=link,
                step_s=median,
                step_min_s=min(steps),
                cpu_s=statistics.median(s for run in runs for s in run["cpu_s"]),
                tokens_per_s=tokens_per_step / median,
                compile_cold_s=max(cold or warm),
                compile_warm_s=statistics.median(warm) if warm else None,
                peak_bytes=_median_of(runs, "peak_bytes"),
                bytes_per_step=_median_of(runs, "socket_bytes_per_step"),
                counted_bytes_per_step=_median_of(runs, "counted_bytes_per_step"),
                loss=statistics.fmean(run["losses"][-1] for run in runs),
                samples=len(steps),
                note=runs[0]["note"],
            )
        )
    links = [row.link for row in rows]
    return sorted(rows, key=lambda row: (links.index(row.link), row.stage, list(_COLOURS).index(row.contender)))


def _link(record: dict) -> str:
    return record.get("link", UNLIMITED)


def _median_of(runs: list[dict], key: str) -> float | None:
    values = [run[key] for run in runs if run[key] is not None]
    return statistics.median(values) if values else None


def _ran(records: list[dict], contender: str, stage: int) -> list[dict]:
    return [r for r in records if (r["contender"], r["stage"]) == (contender, stage) and not r["error"]]


def _rounds(
    records: list[dict], ours: tuple[str, int], other: tuple[str, int], key: str = "step_s"
) -> list[tuple[float, float]]:
    """Pair the seconds of two contenders, each `(name, stage)`, in the same rounds of the same heats."""
    other_values = {(r["heat"], r["repeat"]): r[key] for r in _ran(records, *other)}
    both = [r for r in _ran(records, *ours) if (r["heat"], r["repeat"]) in other_values]
    return [pair for r in both for pair in zip(r[key], other_values[r["heat"], r["repeat"]], strict=True)]


def judge(rows: list[Row], records: list[dict], ranks: int = 2, cores: int | None = None) -> list[Verdict]:
    """Compare with the "Fast" bars, on each link; against DeepSpeed, the faster of its two ways to run counts."""
    load = max(1.0, ranks / (cores or ranks))  # ranks that share a core; None for a core each
    free = [record for record in records if _link(record) == UNLIMITED]
    verdicts = [] if records and not free else _unlimited([row for row in rows if row.link == UNLIMITED], free)
    for link in dict.fromkeys(_link(record) for record in records if _link(record) != UNLIMITED):
        here = [record for record in records if _link(record) == link]
        judged = _limited([row for row in rows if row.link == link], here, free, bytes_per_second(link) / ranks, load)
        verdicts += [Verdict(f"{link}: {verdict.text}", verdict.met) for verdict in judged]
    return [*verdicts, _same_training(rows)]


def _limited(rows: list[Row], records: list[dict], free: list[dict], rate: float, load: float) -> list[Verdict]:
    """Judge runs on a link of `rate` bytes/s a rank, with `load` ranks a core; `free`: records of unlimited links."""
    verdicts = [
        _ratio(records, "ours-muon", "deepspeed-muon", 3, 0.5),
        _ratio(records, "ours-muon", "deepspeed-muon", 1, 0.7),
        _ratio(records, "ours-muon", "fsdp2-adamw", 3, 0.85),
    ]
    at = {(row.contender, row.stage): row for row in rows}
    for stage in sorted({row.stage for row in rows if row.contender == "ours-muon"}):
        adamw, muon = at.get(("ours-adamw", stage)), at["ours-muon", stage]
        wire = (muon.bytes_per_step or 0) / rate
        pair = ("ours-muon", stage), ("ours-adamw", stage)
        added, before = ([x - y for x, y in _rounds(part, *pair)] for part in (records, free))
        if added and before:
            more, share = statistics.median(added), statistics.median(added) / statistics.median(before)
            text = f"ours Muon minus AdamW, stage {stage}: {more:.3f} s, {share:.2f} of that without a limit"
            verdicts.append(Verdict(f"{text} (bar: at most 1.1; Muon's bytes alone take {wire:.3f} s)", share <= 1.1))
        if adamw is not None:
            wire = (adamw.bytes_per_step or 0) / rate
            cpu = adamw.cpu_s * load
            floor = max(wire, cpu)
            text = f"ours AdamW, stage {stage}: {adamw.step_s / floor:.3f} of the larger of its bytes ({wire:.3f} s)"
            text += f" and its CPU time ({cpu:.3f} s) (bar: at most 1.1)"
            verdicts.append(Verdict(text, adamw.step_s <= 1.1 * floor))
        if any(record["contender"] == EARLIER for record in records):
            verdicts.append(_ratio(records, "ours-muon", EARLIER, stage, 1.0))
    return verdicts


def _unlimited(rows: list[Row], records: list[dict]) -> list[Verdict]:
    verdicts = []
    for stage, bar in ((3, 0.5), (1, 1.0)):
        theirs = [row for row in rows if row.contender in _DEEPSPEED and row.stage == stage]
        fastest = min(theirs, key=lambda row: row.step_s).contender if theirs else _DEEPSPEED[0]
        verdicts.append(_ratio(records, "ours-muon", fastest, stage, bar))
    for stage in sorted({row.stage for row in rows if row.contender == "ours-muon"}):
        verdicts.append(_ratio(records, "ours-muon", "ours-adamw", stage, 1.15))
        if any(record["contender"] == EARLIER for record in records):
            verdicts.append(_ratio(records, "ours-muon", EARLIER, stage, 1.02))
    return verdicts


def judge_memory(rows: list[Row]) -> list[Verdict]:
    """Compare with the bar on memory, for rows measured with an allocator that returns freed memory."""
    return [_memory_order({(row.contender, row.stage): row for row in rows}), _same_training(rows)]


def over_compute(records: list[dict]) -> list[str]:
    """List the seconds of each step over bare forward and backward: the part that a training system decides."""
    lines = []
    records = [record for record in records if _link(record) == UNLIMITED]
    for contender, stage in dict.fromkeys((r["contender"], r["stage"]) for r in records):
        pairs = _rounds(records, (contender, stage), ("compute-only", NO_STAGE))
        if stage != NO_STAGE and pairs:
            lines.append(
                f"{contender} stage {stage}: {statistics.median(x - y for x, y in pairs):+.3f} s over bare forward and "
                f"backward, which is {statistics.median(y / x for x, y in pairs):.3f} of its step"
            )
    return lines


def _ratio(records: list[dict], ours: str, other: str, stage: int, bar: float) -> Verdict:
    """Compare the median, over rounds, of the ratio of two steps in one round: other work slows both."""
    label = f"{ours} / {other}, stage {stage}"
    sides = (ours, stage), (other, stage)
    ratios = [x / y for x, y in _rounds(records, *sides)]
    if not ratios:
        return Verdict(f"{label}: not measured (bar: at most {bar:g})", None)
    ratio = statistics.median(ratios)
    cpu = statistics.median(x / y for x, y in _rounds(records, *sides, key="cpu_s"))
    return Verdict(
        f"{label}: {ratio:.3f} (bar: at most {bar:g}; {len(ratios)} rounds from {min(ratios):.3f} to "
        f"{max(ratios):.3f}; by CPU time {cpu:.3f})",
        ratio <= bar,
    )


def _memory_order(at: dict[tuple[str, int], Row]) -> Verdict:
    rows = [at.get(("ours-muon", stage)) for stage in (3, 1, 0)]
    sizes = [row.peak_bytes for row in rows if row and row.peak_bytes is not None]
    if len(sizes) < len(rows):
        return Verdict("ours Muon peak memory, stage 3 < 1 < 0: not measured", None)
    text = ", ".join(f"{size / 2**20:.0f}" for size in sizes)
    return Verdict(f"ours Muon peak memory, stage 3 < 1 < 0: {text} MiB", sizes[0] < sizes[1] < sizes[2])


def _same_training(rows: list[Row]) -> Verdict:
    """Check that all Muon losses agree: a contender that does less work than the others is no contender."""
    rows = [row for row in rows if row.contender.endswith(("-muon", "-muon-compiled"))]
    if len(rows) < 2:
        return Verdict("the Muon contenders' last losses agree: only one measured", None)
    losses = [row.loss for row in rows]
    spread = (max(losses) - min(losses)) / (min(losses) or 1.0)  # all losses of a rehearsal are 0
    # Newton-Schulz in bf16 and other summation orders move the loss by less than 0.1 % over ten steps; DeepSpeed with
    # its default clipping, which all but stops Muon, was off by 7 %.
    return Verdict(f"the Muon contenders' last losses agree: within {spread:.2%} (bar: 1 %)", spread <= 0.01)


def print_report(console: Console, rows: list[Row], verdicts: list[Verdict], remainders: list[str], title: str) -> None:
    table = Table(title=title)
    several = len({row.link for row in rows}) > 1
    if several:
        table.add_column("link", no_wrap=True)
    table.add_column("stage", justify="right")
    table.add_column("contender", no_wrap=True)
    for heading in (
        "step s\n(median)",
        "step s\n(min)",
        "CPU s",
        "tokens/s",
        "compile s\ncold/warm",
        "peak\nMiB",
        "MB sent\nper step",
        "loss",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("how it ran")
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous is not None and (previous.link, previous.stage) != (row.link, row.stage):
            table.add_section()
        table.add_row(
            *([row.link] if several else []),
            _stage(row),
            row.contender,
            f"{row.step_s:.3f}",
            f"{row.step_min_s:.3f}",
            f"{row.cpu_s:.3f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.compile_cold_s:.1f}/{_number(row.compile_warm_s, 1, 1)}",
            _number(row.peak_bytes, 2**20, 0),
            _sent(row),
            f"{row.loss:.3f}",
            row.note,
        )
    console.print(table)
    for verdict in verdicts:
        mark = {True: "[green]met[/green]", False: "[red]MISSED[/red]", None: "[yellow]open[/yellow]"}[verdict.met]
        console.print(f"{mark}  {verdict.text}", soft_wrap=True)
    for line in remainders:
        console.print(f"[dim]{line}[/dim]", soft_wrap=True)


def _stage(row: Row) -> str:
    return "-" if row.stage == NO_STAGE else str(row.stage)


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def _sent(row: Row) -> str:
    """Format the bytes measured on the sockets, and in brackets the optimizer's own count."""
    measured = _number(row.bytes_per_step, 1e6, 1)
    return measured if row.counted_bytes_per_step is None else f"{measured} ({row.counted_bytes_per_step / 1e6:.1f})"


def as_json(rows: list[Row], verdicts: list[Verdict], remainders: list[str]) -> dict:
    return {
        "rows": [asdict(row) for row in rows],
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "over_compute": remainders,
    }


def title_of(result: dict) -> str:
    """Describe the model, the ranks and the machine of a result in a line."""
    shape, options = result["shape"], result["options"]
    parameters = next((sample["parameters"] for sample in result["samples"] if not sample["error"]), 0)
    backwards = "" if options["micro_batches"] == 1 else f" in {options['micro_batches']} micro-batches"
    return (
        f"{shape['layers']}-layer GPT, {parameters / 1e6:.1f} M parameters, {shape['context'] * shape['batch']:,} "
        f"tokens per rank and step{backwards}, {options['ranks']} ranks, {options['dtype']}, {result['device']}, "
        f"torch {result['versions']['torch']}"
    )


def _label(value: float) -> str:
    """Format a bar's value with three digits, or all of those before the point; a few bytes count as 0 MB."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.001 else "0"


def draw(result: dict, path: Path) -> None:
    """Draw bar charts of a result, by stage: step time on each link (fastest step as a tick), memory, bytes sent."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [Row(**{"link": UNLIMITED, **row}) for row in result["rows"]]
    stages = sorted({row.stage for row in rows})
    names = [name for name in _COLOURS if any(row.contender == name for row in rows)]
    links = {link: [row for row in rows if row.link == link] for link in dict.fromkeys(row.link for row in rows)}
    first = next(iter(links.values()))
    panels = [
        *(
            (f"step time, s (median; tick: fastest), link {link}", "step_s", 1.0, group)
            for link, group in links.items()
        ),
        ("peak memory per rank, MiB", "peak_bytes", 2**20, first),
        ("sent per rank and step, MB", "bytes_per_step", 1e6, first),
    ]
    panels = [panel for panel in panels if any(getattr(row, panel[1]) is not None for row in panel[3])]
    across = min(len(panels), 2)  # with more the page shrinks them until they cannot be read
    down = -(-len(panels) // across)
    figure = Figure(figsize=(5 * across, 4 * down + 0.5))
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    width = 0.8 / max(Counter((row.link, row.stage) for row in rows).values())
    for axis, (label, field, unit, shown) in zip(axes, panels, strict=False):
        for place, stage in enumerate(stages):
            group = [row for row in shown if row.stage == stage and getattr(row, field) is not None]
            for index, row in enumerate(group):
                x = place + (index - (len(group) - 1) / 2) * width
                bar = axis.bar(x, getattr(row, field) / unit, width * 0.92, color=_COLOURS[row.contender])
                axis.bar_label(bar, fmt=_label, fontsize=7, padding=1)
                if field == "step_s":
                    axis.plot([x - width / 3, x + width / 3], [row.step_min_s] * 2, color="white", linewidth=1)
        axis.set_xticks(range(len(stages)), ["none" if s == NO_STAGE else f"stage {s}" for s in stages])
        axis.set_title(label, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.remove()
    handles = [Patch(color=_COLOURS[name]) for name in names]
    figure.legend(handles, names, loc="lower center", ncols=min(len(names), 3 * across), frameon=False, fontsize=9)
    figure.suptitle(textwrap.fill(title_of(result), 50 * across), fontsize=11)
    figure.tight_layout(rect=(0, 0.06 / down, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_svg(figure, path)
