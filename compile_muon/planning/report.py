"""Render a plan for the terminal, and as one self-contained HTML page with the same tables and charts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compile_muon.planning.candidates import Price, percent
from compile_muon.planning.charts import memory_chart, price_chart, time_chart, timeline_chart
from compile_muon.planning.plan import Figures, Plan, World, mesh_text, size

__all__ = ["page", "price_text", "report", "rows"]

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
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: #1a1a1a; background: #ffffff; }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #16181c; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .4rem; text-align: right; border-bottom: 1px solid #8884; }
.words { text-align: left; min-width: 7rem; }
th { border-bottom-color: currentColor; }
tr.choice { font-weight: 700; background: #54a24b33; }
tr.unfit { opacity: .6; }
.why { font-size: 1.05rem; }
.warning { color: #b36b00; margin: 0; }
@media (prefers-color-scheme: dark) { .warning { color: #ffb84d; } }
svg { width: 100%; height: auto; }
figure { margin: 1.2rem 0; }
.legend { opacity: .75; font-size: 13px; }
</style>
</head>
<body>
<h1>Plan, simulated</h1>
<p>$headline.</p>
<p class="legend">$legend</p>
$sections
<script type="application/json" id="plan">$numbers</script>
</body>
</html>
""")


@dataclass(frozen=True)
class _Grid:
    """A table of a plan."""

    title: str
    titles: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]  # class of the row ("choice", "unfit" or ""), and its cells

    def text(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=self.title, title_justify="left")
        for title in self.titles:
            table.add_column(title, justify="left" if title in _WORDS else "right")
        for kind, cells in self.lines:
            table.add_row(*cells, style="bold" if kind == "choice" else "")
        return table

    def html(self) -> str:
        """Return the table as HTML."""
        lines = [("", "th", self.titles), *((kind, "td", cells) for kind, cells in self.lines)]
        return f'<div class="scroll"><table>\n{"".join(self._line(*line) for line in lines)}</table></div>'

    def _line(self, kind: str, tag: str, cells: Sequence[str]) -> str:
        css_classes = ["words" if title in _WORDS else "" for title in self.titles]
        texts = [f'<{tag} class="{css}">{escape(cell)}</{tag}>' for css, cell in zip(css_classes, cells, strict=True)]
        return f'<tr class="{kind}">{"".join(texts)}</tr>\n'


def rows(world: World) -> list[list[str]]:
    """Return the cells of each candidate, as text."""
    return [[text(figures) for _, text in _COLUMNS] for figures in world.candidates]


def price_text(price: Price) -> str:
    """Return a cell of the price table: share of AdamW's step, its exposed part in brackets, "!" if it does not fit."""
    return f"{price.share:+.1%} ({percent(price.exposed_share)})" + " !" * (not price.fits)


def report(plan: Plan) -> RenderableType:
    """Return the whole plan for the terminal."""
    parts: list[RenderableType] = [Text(_headline(plan))]
    for world in plan.worlds:
        warnings = [Text(f"  {warning}", style="yellow") for warning in world.candidates[world.shown].warnings]
        parts += [_candidates(world).text(), Text(f"→ {world.why}"), *warnings, Text("")]
    if prices := _prices(plan):
        parts += [prices.text(), Text("")]
    return Group(*parts, Text(_LEGEND, style="dim"))


def page(plan: Plan) -> str:
    """Return the plan as an HTML page, which also embeds the numbers of ``--json``."""
    sections = []
    for world, timeline in zip(plan.worlds, plan.timelines, strict=True):
        shown = world.candidates[world.shown]
        parts = [f'<p class="why">{escape(world.why)}</p>']
        parts += [f'<p class="warning">{escape(text)}</p>' for text in shown.warnings]
        parts += [_candidates(world).html(), _figure("Memory of a rank", memory_chart(world))]
        parts += [f'<p class="legend">{escape(_intermediates(shown))}</p>']
        parts += [_figure("Time of a step", time_chart(world))]
        sections.append(
            (f"{world.ranks} ranks", [*parts, _figure(f"A step of {shown.name}", timeline_chart(timeline))])
        )
    if prices := _prices(plan):
        chart = _figure("What Muon adds to AdamW's step", price_chart(plan.worlds))
        sections.append(("Price of Muon", [f'<p class="legend">{escape(prices.title)}</p>', prices.html(), chart]))
    return _PAGE.substitute(
        title=escape(f"{plan.model} on {plan.machine} (simulated)"),
        headline=escape(_headline(plan)),
        legend=escape(_LEGEND),
        sections="\n".join("\n".join(["<section>", f"<h2>{h}</h2>", *parts, "</section>"]) for h, parts in sections),
        # "</script>" in a name would end the element.
        numbers=json.dumps(plan.to_json()).replace("<", "\\u003c"),
    )


def _headline(plan: Plan) -> str:
    """Say in one line which model, batch and machine the plan is for."""
    micro = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    count = plan.parameters
    parameters = f"{count / 1e9:,.2f} G" if count >= 1e9 else f"{count / 1e6:,.1f} M"
    return (
        f"{plan.model}: {parameters} parameters; {plan.tokens:,} tokens a rank and micro-batch in "
        f"sequences of {plan.sequence:,}{micro}; {plan.machine}, {size(plan.memory_bytes)}. Everything is simulated"
    )


def _candidates(world: World) -> _Grid:
    kinds = ["choice" if i == world.choice else "" if f.fits else "unfit" for i, f in enumerate(world.candidates)]
    titles = [title for title, _ in _COLUMNS]
    return _Grid(f"{world.ranks} ranks (simulated)", titles, list(zip(kinds, rows(world), strict=True)))


def _prices(plan: Plan) -> _Grid | None:
    """Return the price table, a line for each number of ranks; None where no prices were asked for."""
    priced = [world for world in plan.worlds if world.prices]
    if not priced:
        return None
    titles = ["ranks", *(f"{price.tokens:,}" for price in priced[0].prices)]
    return _Grid(_PRICE, titles, [("", [str(world.ranks), *map(price_text, world.prices)]) for world in priced])


def _by_size(values: Mapping[str, int], text: Callable[[float], str]) -> str:
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {text(value)}" for name, value in ordered if re.search("[1-9]", text(value)))


def _figure(caption: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>"


def _intermediates(shown: Figures) -> str:
    return (
        "intermediates: what forward or backward makes and soon needs no more"
        + (f"; the largest of {shown.name} is {shown.largest}" if shown.largest else "")
        + ". activations: what forward saves for backward. step: of AdamW, and norms."
    )
