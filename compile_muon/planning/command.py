"""`python -m compile_muon plan`: print a plan, and write it as one self-contained HTML page that has charts too."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from compile_muon.config import accept, load_config, read_options
from compile_muon.errors import MuonZeroError, config_error
from compile_muon.planning.candidates import Price, percent, planned_for
from compile_muon.planning.charts import memory_chart, price_chart, time_chart, timeline_chart
from compile_muon.planning.fit import fits
from compile_muon.planning.models import Batch, check_multiple, load_subject, plan_module
from compile_muon.planning.plan import Figures, Plan, Question, World, make_plan, mesh_text, size
from compile_muon.simulate import to_chrome_trace
from compile_muon.simulate.machine import load_machine

#: title of each column, and its cell text
_COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("stage", lambda f: f"{f.stage}{' *' * f.asked}"),
    ("mesh", lambda f: mesh_text(f.mesh)),
    ("memory", lambda f: size(f.peak_bytes) + " !" * (not f.fits)),
    ("of them", lambda f: _by_size(f.memory, size)),
    ("GB sent", lambda f: _by_size(f.sent, lambda nbytes: f"{nbytes / 1e9:.2f}") or "0"),
    ("step ms", lambda f: f"{f.step_seconds * 1e3:,.1f}"),
    ("exposed ms", lambda f: f"{f.exposed_seconds * 1e3:,.1f}"),
    ("tokens/s", lambda f: f"{f.tokens_per_second:,.0f}"),
    ("NS", lambda f: f"{f.newton_schulz_share:.1%}"),
    ("owners", lambda f: f"{f.owners_uneven:.2f}"),
    ("over AdamW", lambda f: f"{f.price_seconds * 1e3:+,.1f} ms ({f.price_share:+.1%})"),
    ("of it computed", lambda f: f"{(f.price_seconds - f.price_exposed_seconds) * 1e3:+,.1f} ms"),
    ("of it exposed", lambda f: f"{f.price_exposed_seconds * 1e3:+,.1f} ms"),
)
#: columns of words: left-aligned, and wrapped on the page
_WORDS = ("mesh", "of them", "GB sent")
_LEGEND = (
    "* what the config says. ! does not fit. GB sent: by a rank, per axis. NS: Newton-Schulz, of the step. owners: the "
    "most that one orthogonalizes, over the mean. over AdamW: what the step takes more than with AdamW alone."
)
#: title of the price table
_PRICE = "What Muon adds to AdamW's step, by tokens of a rank and step (simulated); in brackets what it adds to waits"

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .4rem; text-align: right; border-bottom: 1px solid #8884; }
.words { text-align: left; min-width: 7rem; }
th { border-bottom-color: currentColor; }
h2 { text-align: left; margin: 1.5rem 0 .5rem; }
tr.choice { font-weight: 700; background: #54a24b33; }
tr.unfit { opacity: .6; }
.yellow { color: #b36b00; margin: 0; }
@media (prefers-color-scheme: dark) { .yellow { color: #ffb84d; } }
svg { width: 100%; height: auto; }
figure { margin: 1.2rem 0; }
.dim { opacity: .75; font-size: 13px; }
</style>
</head>
<body>
<h1>Plan, simulated</h1>
$parts
<script type="application/json" id="plan">$numbers</script>
</body>
</html>
""")


def run(chosen: Namespace) -> int:
    """Make and print the plan that the command line asks for, and write its files; return 2 if an argument is wrong."""
    notes = Console(stderr=True, highlight=False)
    try:
        for option in ("html", "json", "trace"):
            path: Path | None = getattr(chosen, option)
            if path and (path.is_dir() or not path.absolute().parent.is_dir()):
                problem = "is not a file in a folder that exists"
                raise config_error(f"--{option}", str(path), problem, "make the folder first")
        question = _question(chosen, lambda text: notes.print(text, style="dim"))
        if chosen.html:
            plan_module("matplotlib.figure", "--html", str(chosen.html))
        if chosen.fit:
            subject_of = partial(load_subject, chosen.model)
            for line in fits(question, subject_of):
                Console(soft_wrap=True, highlight=False, markup=False).print(line)
            return 0
        plan = make_plan(question)
    except MuonZeroError as error:
        notes.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(report(plan))
    if chosen.json:
        chosen.json.write_text(json.dumps(plan.to_json(), indent=1))
    if chosen.trace:
        chosen.trace.write_text(json.dumps(traces(plan)))
    if chosen.html:
        chosen.html.write_text(page(plan), encoding="utf-8")
    return 0


def _question(chosen: Namespace, progress: Callable[[str], None]) -> Question:
    """Check the command line and return its question."""
    for world in chosen.world:
        accept.integer("--world", world, low=1)
    batch = Batch(chosen.tokens, chosen.tokens if chosen.sequence is None else chosen.sequence)
    machine = load_machine(chosen.machine, "--machine")
    config = planned_for(load_config(chosen.config), machine, chosen.machine)
    options = read_options(config.compile.options())
    subject = load_subject(chosen.model, batch)
    price = sorted(set(chosen.price))
    for tokens in price:
        check_multiple("--price", tokens, batch.tokens, "micro-batches", "--tokens")
    return Question(subject, batch, config, options, machine, list(dict.fromkeys(chosen.world)), price, progress)


def traces(plan: Plan) -> dict[str, Any]:
    """Return what Perfetto reads: one process for each number of ranks."""
    events: list[dict[str, Any]] = []
    for pid, (world, timeline) in enumerate(zip(plan.worlds, plan.timelines, strict=True)):
        name = f"{world.ranks} ranks, {world.candidates[world.shown].name} (simulated)"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        events += [{**event, "pid": pid} for event in to_chrome_trace(timeline)["traceEvents"]]
    return {"traceEvents": events}


def rows(world: World) -> list[list[str]]:
    """Return the cells of each candidate, as text."""
    return [[text(figures) for _, text in _COLUMNS] for figures in world.candidates]


def price_text(price: Price) -> str:
    """Return a cell of the price table: share of AdamW's step, its exposed part in brackets, "!" if it does not fit."""
    return f"{price.share:+.1%} ({percent(price.exposed_share)})" + " !" * (not price.fits)


def _parts(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield the kind and the content of each part of a report, in order.

    "table": its title, the titles of its columns, and its rows, each a class ("choice", "unfit" or "") and cells;
    "chart", on pages only: its caption, and a function that draws it; any other kind is the style of a text.
    """
    yield "", _headline(plan)
    for world, timeline in zip(plan.worlds, plan.timelines, strict=True):
        shown = world.candidates[world.shown]
        kinds = ["choice" if i == world.choice else "" if f.fits else "unfit" for i, f in enumerate(world.candidates)]
        lines = list(zip(kinds, rows(world), strict=True))
        yield "table", (f"{world.ranks} ranks (simulated)", [title for title, _ in _COLUMNS], lines)
        yield "", f"→ {world.why}"
        yield from (("", f"  {kept}") for kept in shown.kept)
        yield from (("yellow", f"  {warning}") for warning in shown.warnings)
        yield "chart", ("Memory of a rank. " + _intermediates(shown), partial(memory_chart, world))
        yield "chart", ("Time of a step", partial(time_chart, world))
        yield "chart", (f"A step of {shown.name}", partial(timeline_chart, timeline))
    if priced := [world for world in plan.worlds if world.prices]:
        titles = ["ranks", *(f"{price.tokens:,}" for price in priced[0].prices)]
        yield "table", (_PRICE, titles, [("", [str(world.ranks), *map(price_text, world.prices)]) for world in priced])
        yield "chart", ("What Muon adds to AdamW's step", partial(price_chart, priced))
    yield "dim", _LEGEND


def report(plan: Plan) -> RenderableType:
    """Return the whole plan for the terminal."""
    parts: list[RenderableType] = []
    for kind, part in _parts(plan):
        if kind == "table":
            title, titles, lines = part
            parts.append(table := Table(title=f"\n{title}", title_justify="left"))
            for column in titles:
                table.add_column(column, justify="left" if column in _WORDS else "right")
            for row, cells in lines:
                table.add_row(*cells, style="bold" if row == "choice" else "")
        elif kind != "chart":
            parts.append(Text(part, style=kind))
    return Group(*parts)


def page(plan: Plan) -> str:
    """Return the plan as an HTML page, which also embeds the numbers of ``--json``."""
    parts = []
    for kind, part in _parts(plan):
        if kind == "table":
            parts.append(_table(*part))
        elif kind == "chart":
            caption, draw = part
            parts.append(f"<figure><figcaption>{escape(caption)}</figcaption>{draw()}</figure>")
        else:
            parts.append(f'<p class="{kind}">{escape(part)}</p>')
    return _PAGE.substitute(
        title=escape(f"{plan.model} on {plan.machine} (simulated)"),
        parts="\n".join(parts),
        # "</script>" in a name would end the element.
        numbers=json.dumps(plan.to_json()).replace("<", "\\u003c"),
    )


def _table(title: str, titles: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table of :func:`_parts` as HTML."""
    text = f'<div class="scroll"><table><caption><h2>{escape(title)}</h2></caption>\n'
    for row, tag, cells in [("", "th", titles), *((row, "td", cells) for row, cells in lines)]:
        css = ["words" if column in _WORDS else "" for column in titles]
        shown = [f'<{tag} class="{c}">{escape(cell)}</{tag}>' for c, cell in zip(css, cells, strict=True)]
        text += f'<tr class="{row}">{"".join(shown)}</tr>\n'
    return text + "</table></div>"


def _headline(plan: Plan) -> str:
    """Say in one line which model, batch and machine the plan is for."""
    micro = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    count = plan.parameters
    parameters = f"{count / 1e9:,.2f} G" if count >= 1e9 else f"{count / 1e6:,.1f} M"
    return (
        f"{plan.model}: {parameters} parameters; {plan.tokens:,} tokens a rank and micro-batch in "
        f"sequences of {plan.sequence:,}{micro}; {plan.machine}, {size(plan.memory_bytes)}. Everything is simulated."
    )


def _by_size(values: Mapping[str, int], text: Callable[[float], str]) -> str:
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {text(value)}" for name, value in ordered if re.search("[1-9]", text(value)))


def _intermediates(shown: Figures) -> str:
    return (
        "intermediates: what forward or backward makes and soon needs no more"
        + (f"; the largest of {shown.name} is {shown.largest}" if shown.largest else "")
        + ". activations: what forward saves for backward. step: of AdamW, and norms."
    )
