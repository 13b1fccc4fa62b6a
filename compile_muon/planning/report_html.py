"""A plan as one page that needs nothing else: no script, no font, no address."""

from __future__ import annotations

import json
from html import escape
from string import Template

from compile_muon.planning.charts import memory_chart, price_chart, time_chart, timeline_chart
from compile_muon.planning.plan import Plan, World
from compile_muon.planning.report_table import COLUMNS, LEGEND, PRICE, WORDS, headline, price_rows, rows

__all__ = ["page"]

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
$worlds
$prices
<script type="application/json" id="plan">$numbers</script>
</body>
</html>
""")


def page(plan: Plan) -> str:
    """The page, with the numbers of ``--json`` inside."""
    worlds = zip(plan.worlds, plan.timelines, strict=True)
    return _PAGE.substitute(
        title=escape(f"{plan.model} on {plan.machine} (simulated)"),
        headline=escape(headline(plan)),
        legend=escape(LEGEND),
        worlds="\n".join(_world(world, timeline_chart(timeline)) for world, timeline in worlds),
        prices=_prices(plan),
        numbers=json.dumps(plan.to_json()).replace("<", "\\u003c"),
    )


def _world(world: World, timeline: str) -> str:
    warnings = "\n".join(f'<p class="warning">{escape(text)}</p>' for text in world.candidates[world.shown].warnings)
    return f"""<section>
<h2>{world.ranks} ranks</h2>
<p class="why">{escape(world.why)}</p>
{warnings}
<div class="scroll"><table>
<tr>{"".join(f'<th class="{_kind(title)}">{escape(title)}</th>' for title, _ in COLUMNS)}</tr>
{_rows(world)}
</table></div>
<figure><figcaption>Memory of a rank</figcaption>{memory_chart(world)}</figure>
<p class="legend">{escape(_intermediates(world))}</p>
<figure><figcaption>Time of a step</figcaption>{time_chart(world)}</figure>
<figure><figcaption>A step of {escape(world.candidates[world.shown].name)}</figcaption>{timeline}</figure>
</section>"""


def _prices(plan: Plan) -> str:
    found = price_rows(plan)
    if not found:
        return ""
    titles, *texts = found
    cells = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in texts)
    return f"""<section>
<h2>Price of Muon</h2>
<p class="legend">{escape(PRICE)}</p>
<div class="scroll"><table>
<tr>{"".join(f"<th>{escape(title)}</th>" for title in titles)}</tr>
{cells}
</table></div>
<figure><figcaption>What Muon adds to AdamW's step</figcaption>{price_chart(plan.worlds)}</figure>
</section>"""


def _intermediates(world: World) -> str:
    largest = world.candidates[world.shown].largest
    return (
        "intermediates: what forward or backward makes and soon needs no more"
        + (f"; the largest of {world.candidates[world.shown].name} is {largest}" if largest else "")
        + ". activations: what forward saves for backward. step: of AdamW, and norms."
    )


def _rows(world: World) -> str:
    lines = []
    for place, cells in enumerate(rows(world)):
        kind = "choice" if place == world.choice else "" if world.candidates[place].fits else "unfit"
        columns = zip(COLUMNS, cells, strict=True)
        texts = "".join(f'<td class="{_kind(title)}">{escape(cell)}</td>' for (title, _), cell in columns)
        lines.append(f'<tr class="{kind}">{texts}</tr>')
    return "\n".join(lines)


def _kind(title: str) -> str:
    return "words" if title in WORDS else ""
