"""A plan as tables for the terminal, and how each of its numbers is written; pages write them the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compile_muon.planning.plan import Figures, Plan, World, mesh_text, size
from compile_muon.planning.price import Price, percent

__all__ = ["COLUMNS", "PRICE", "WORDS", "headline", "price_rows", "price_text", "report", "rows"]

#: title of a column, and its text
COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
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
#: of these, columns of words, which are as wide as it suits the page
WORDS = ("mesh", "of them", "GB sent")
LEGEND = (
    "* what the config says. ! does not fit. GB sent: by a rank, per axis. NS: Newton-Schulz, of the step. owners: the "
    "most that one orthogonalizes, over the mean. over AdamW: what the step takes more than with AdamW alone."
)
#: title of the table of prices
PRICE = "What Muon adds to AdamW's step, by tokens of a rank and step (simulated); in brackets what it adds to waits"


def _by_size(values: Mapping[str, int], text: Callable[[float], str]) -> str:
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {text(value)}" for name, value in ordered if re.search("[1-9]", text(value)))


def _count(number: float) -> str:
    return f"{number / 1e9:,.2f} G" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def headline(plan: Plan) -> str:
    """What was asked."""
    micro = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    return (
        f"{plan.model}: {_count(plan.parameters)} parameters; {plan.tokens:,} tokens a rank and micro-batch in "
        f"sequences of {plan.sequence:,}{micro}; {plan.machine}, {size(plan.memory_bytes)}. Everything is simulated"
    )


def rows(world: World) -> list[list[str]]:
    """The text of every cell."""
    return [[text(figures) for _, text in COLUMNS] for figures in world.candidates]


def price_rows(plan: Plan) -> list[list[str]]:
    """A row of titles, and one for each number of ranks; nothing where no prices were asked for."""
    priced = [world for world in plan.worlds if world.prices]
    if not priced:
        return []
    titles = ["ranks", *(f"{price.tokens:,}" for price in priced[0].prices)]
    return [titles, *([str(world.ranks), *map(price_text, world.prices)] for world in priced)]


def price_text(price: Price) -> str:
    """A cell of that table."""
    return f"{price.share:+.1%} ({percent(price.exposed_share)})" + " !" * (not price.fits)


def report(plan: Plan) -> RenderableType:
    """All of a plan."""
    parts: list[RenderableType] = [Text(headline(plan))]
    for world in plan.worlds:
        table = Table(title=f"{world.ranks} ranks (simulated)", title_justify="left")
        for title, _ in COLUMNS:
            table.add_column(title, justify="left" if title in WORDS else "right")
        for place, cells in enumerate(rows(world)):
            table.add_row(*cells, style="bold" if place == world.choice else "")
        warnings = [Text(f"  {warning}", style="yellow") for warning in world.candidates[world.shown].warnings]
        parts += [table, Text(f"→ {world.why}"), *warnings, Text("")]
    if found := price_rows(plan):
        table = Table(title=PRICE, title_justify="left")
        for title in found[0]:
            table.add_column(title, justify="right")
        for cells in found[1:]:
            table.add_row(*cells)
        parts += [table, Text("")]
    return Group(*parts, Text(LEGEND, style="dim"))
