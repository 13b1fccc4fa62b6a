"""Writing a benchmark's picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_svg(figure: Figure, path: Path) -> None:
    """Write a figure as SVG on white, with text as text: the same bytes for the same numbers."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "compile_muon"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    # Matplotlib ends lines of paths with a space.
    path.write_text("\n".join(map(str.rstrip, path.read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8")
