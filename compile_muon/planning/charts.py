"""Draw the charts of a plan as self-contained SVG in the page's text colour."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_muon.planning.plan import Figures, World, mesh_text
from compile_muon.simulate import Timeline
from compile_muon.simulate.engine import COMPUTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: placeholder colour of text and axes, replaced by the page's
_INK = "#010203"
_COLOURS = {
    "parameters": "#4c78a8", "optimizer": "#72b7b2", "gathered": "#9d755d", "activations": "#f58518",
    "gradients": "#e45756", "exchange": "#b279a2", "intermediates": "#ffbf79", "step": "#9a9a9a", "kernels": "#8cbf88",
    "pools": "#d3d3d3",
    "product": "#54a24b", "kernel": "#8cbf88", "copy": "#bab0ac", "host": "#79706e", "newton_schulz": "#eeca3b",
    "gather": "#9d755d", "reduce": "#e45756", "refresh": "#4c78a8", "checks": "#72b7b2", "model": "#ff9da6",
}  # fmt: skip
#: of matplotlib; the background is the page's
_STYLE = {
    "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none", "figure.facecolor": "none",
    "legend.frameon": False, "legend.labelcolor": _INK, "legend.fontsize": 8, "font.family": "sans-serif",
    "svg.fonttype": "none", "svg.hashsalt": "compile_muon",
}  # fmt: skip
#: part of a step: intervals closer than this are drawn as one
_FINEST = 1 / 1500


def memory_chart(world: World) -> str:
    """Bytes by category of each candidate, against the memory of the device."""
    unit, name_of_it = (2**30, "GiB") if max(f.peak_bytes for f in world.candidates) >= 2**30 else (2**20, "MiB")
    bars = [{name: nbytes / unit for name, nbytes in f.memory.items()} for f in world.candidates]
    # Models of a few MiB: a line at the device's memory would make the bars invisible.
    limit = world.candidates[0].limit_bytes / 2**30 if unit == 2**30 else None
    return _stacked(world.candidates, bars, f"{name_of_it}, where most are live", limit)


def time_chart(world: World) -> str:
    """Milliseconds of a step of each candidate: kernels, Newton-Schulz, and waits by cause."""
    bars = []
    for f in world.candidates:
        kernels = f.step_seconds - f.exposed_seconds - f.newton_schulz_seconds
        parts = {"kernels": kernels, "newton_schulz": f.newton_schulz_seconds, **f.exposed}
        bars.append({name: seconds * 1e3 for name, seconds in parts.items()})
    marks = [f.adamw_seconds * 1e3 for f in world.candidates]
    return _stacked(world.candidates, bars, "ms of a step; | with AdamW alone", marks=marks)


def price_chart(worlds: Sequence[World]) -> str:
    """Percent that Muon adds to AdamW's step, over tokens: a line for each number of ranks, its exposed part dashed."""
    axes = _axes(3.2)
    for number, world in enumerate(worlds):
        tokens = [price.tokens for price in world.prices]
        colour = f"C{number}"
        axes.plot(tokens, [100 * p.share for p in world.prices], "o-", color=colour, label=f"{world.ranks} ranks")
        axes.plot(tokens, [100 * p.exposed_share for p in world.prices], "--", color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.set_xlabel("tokens of a rank and step; % of AdamW's step, dashed: of it exposed")
    return _svg(axes)


def timeline_chart(timeline: Timeline) -> str:
    """The work of each stream over time, with gaps too small to see closed."""
    streams = dict.fromkeys([COMPUTE, *(event.stream for event in timeline.events)])
    spans: dict[str, dict[str, list[tuple[float, float]]]] = {stream: defaultdict(list) for stream in streams}
    for event in sorted(timeline.events, key=lambda event: event.start):
        bars = spans[event.stream][event.category]
        close = bars and event.start - bars[-1][1] < _FINEST * timeline.seconds
        start, end = bars.pop() if close else (event.start, event.end)
        bars.append((start, max(end, event.end)))
    axes = _axes(0.45 * len(spans) + 1.3)
    for row, of_stream in enumerate(spans.values()):
        for category, bars in of_stream.items():
            widths = [((start * 1e3), (end - start) * 1e3) for start, end in bars]
            axes.broken_barh(widths, (row - 0.4, 0.8), **_look(category))
    names = [stream if stream == COMPUTE else ", ".join(sorted(of)) for stream, of in spans.items()]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, timeline.seconds * 1e3), xlabel="ms")
    return _svg(axes)


def _stacked(
    candidates: Sequence[Figures], bars: Sequence[Mapping[str, float]], label: str, limit: float | None = None,
    marks: Sequence[float] = (),
) -> str:  # fmt: skip
    """Draw a horizontal stacked bar for each candidate; `limit` is a line across all, `marks` has a tick for each."""
    axes = _axes(0.32 * len(bars) + 1.3)
    places = range(len(bars))
    offsets = [0.0] * len(bars)
    for name in dict.fromkeys(name for bar in bars for name in bar):
        widths = [bar.get(name, 0.0) for bar in bars]
        axes.barh(places, widths, left=offsets, height=0.7, **_look(name))
        offsets = [start + width for start, width in zip(offsets, widths, strict=True)]
    if limit is not None:
        axes.axvline(limit, color=_INK, linestyle="--", label=f"device, {limit:.1f}")
    for place, mark in enumerate(marks):
        axes.plot([mark, mark], [place - 0.45, place + 0.45], color=_INK, linewidth=1.5)
    axes.set_yticks(places, [f"{f.stage}, {mesh_text(f.mesh)}" for f in candidates])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return _svg(axes)


def _look(category: str) -> dict[str, Any]:
    return {"color": _COLOURS.get(category, _COLOURS["step"]), "label": category.replace("_", " ")}


def _axes(height: float) -> Axes:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        return Figure(figsize=(10, height), layout="constrained").add_subplot()


def _svg(axes: Axes) -> str:
    """Return the SVG to embed in HTML: without prolog, metadata and namespaces, and in the page's colour."""
    import matplotlib

    handles, labels = axes.get_legend_handles_labels()
    handle_of = dict(zip(labels, handles, strict=True))
    figure = axes.get_figure(root=True)
    assert figure is not None
    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.legend(list(handle_of.values()), list(handle_of), loc="outside upper center", ncols=7)
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    for size in ("width", "height"):  # the page's CSS sets the width
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    return svg.replace(_INK, "currentColor")
