"""What the model of a launch expects of the 80 matrices of `train_step.py --preset 1b`, by part, and beside NCCL.

    python benchmarks/list_model.py [sm_90] [--processors 132]

No GPU: times are those of kernels/gpu/model.py, whose numbers stand in tiles.json. Before: tiles on diagonals as wide
as others, loops that are not flattened, a summand wherever a is added. Normalization is not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from gpt import PRESETS

from compile_muon.kernels.batching import Stack, chunked
from compile_muon.kernels.call_plan import MEMORY_LIMIT
from compile_muon.kernels.coefficients import resolve_coefficients
from compile_muon.kernels.dispatch import cheaper_method
from compile_muon.kernels.gpu.arena import Layout, list_bytes
from compile_muon.kernels.gpu.model import Device, Result, Tile, programs, seconds, seconds_beside, waves
from compile_muon.kernels.gpu.tile_order import results_of
from compile_muon.kernels.gpu.tiles import Table, choose, load_tables
from compile_muon.kernels.iterations import FORMS

HELD = (0, 8, 16, 32)
CHANNELS = 32  # of NCCL, at most, on one node


@dataclass(frozen=True)
class Launched:
    """A launch, as the model needs it; `listed` where it is of a whole list."""

    part: str
    results: tuple[Result, ...]
    triangle: bool
    summand: bool
    listed: bool = True
    halves: bool = True

    def tile(self, table: Table, device: Device, processors: int) -> Tile:
        tiles = table.symmetric if self.triangle else table.product
        if self.listed:
            tiles = tuple(replace(tile.in_list, listed=self.halves) for tile in tiles)
        return choose(tiles, device, self.results, processors, triangle=self.triangle, summand=self.summand)

    def seconds(self, table: Table, device: Device, processors: int) -> float:
        tile = self.tile(table, device, processors)
        return seconds(tile, device, self.results, processors, triangle=self.triangle, summand=self.summand)


class Recorder:
    """`iterations.Products` and `Folding` that only note what would be launched; a matrix is whether it is square."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self.launched: list[Launched] = []

    def _note(self, part: str, triangle: bool, square: bool, summand: bool) -> None:
        results = results_of(self._layout, triangle=triangle, square=square)
        self.launched.append(Launched(part, results, triangle, summand))

    def outer(self, x: bool) -> bool:
        self._note("XXᵀ", triangle=True, square=x, summand=False)
        return True

    def symmetric(
        self, left: bool, right: bool, *, plus: bool | None = None, beta: float = 0, alpha: float = 1
    ) -> bool:
        part = "bR + cR², and aI" if alpha != 1 else "S and R"
        self._note(part, triangle=True, square=True, summand=plus is not None)
        return True

    def factor(self, x: bool, step: object) -> bool:
        return self.symmetric(x, x, plus=x, alpha=2)

    def general(
        self, left: bool, right: bool, *, plus: bool | None = None, beta: float = 0, out: object = None
    ) -> bool:
        if out is None:
            self._note("Q" if right else "FX, or QX", triangle=False, square=right, summand=plus is not None)
            return right
        for b, k, l in self._layout.shapes:  # noqa: E741
            one = Launched("the last X", ((1, k, l, k),), triangle=False, summand=plus is not None, listed=False)
            self.launched += [one] * b
        return right

    def add_to_diagonal(self, x: bool, a: float) -> None:
        pass


def launches(shapes: Iterable[tuple[int, int]], method: str, dtype: str, *, fold: bool) -> Iterator[Launched]:
    """Of Newton-Schulz of these matrices, (k, l) with k ≤ l, by jordan's five steps; "auto" as dispatch has it."""
    coefficients = resolve_coefficients("jordan", 5)
    restarts = coefficients.gram_restarts(getattr(torch, dtype))
    forms: dict[str, list[tuple[int, int]]] = {}
    for k, l in shapes:  # noqa: E741
        form = cheaper_method(k, l, 5, len(restarts), symmetric=True) if method == "auto" else method
        forms.setdefault(form, []).append((k, l))
    for form, mine in forms.items():
        each = [list_bytes(k, l, form, 5, len(restarts), 2, 2) for k, l in mine]  # noqa: E741
        for chunk in chunked([Stack(1, nbytes) for nbytes in each], MEMORY_LIMIT):
            found = sorted((mine[i] for i, _ in chunk), key=lambda shape: (-shape[1], -shape[0]))
            layout = Layout(tuple((found.count(shape), *shape) for shape in dict.fromkeys(found)))
            noted = Recorder(layout)
            FORMS[form](False, coefficients.steps, restarts, noted, out=True, folding=noted if fold else None)
            yield from noted.launched


def by_part(launched: list[Launched], table: Table, device: Device, processors: int) -> dict[str, float]:
    """Milliseconds of each part."""
    parts: dict[str, float] = {}
    for launch in launched:
        time = launch.seconds(table, device if launch.listed else table.device, processors)
        parts[launch.part] = parts.get(launch.part, 0) + 1e3 * time
    return parts


def beside(
    launched: list[Launched], table: Table, processors: int, held: int, dealing: str, reserved: int = 0
) -> tuple[float, float]:
    """(seconds of launches for lists, longest time that a collective waits for one of their programs)."""
    device = table.device
    total = longest = 0.0
    for launch in launched:
        tile = launch.tile(table, device, processors)
        tiles = sum(b * programs(tile, rows, cols, triangle=launch.triangle) for b, rows, cols, _ in launch.results)
        width = (processors - reserved) * tile.resident
        starts, begin, summand = waves(tiles, width, shared=dealing == "waves"), None, launch.summand
        if dealing == "a counter":  # tiles that a program draws are no loop that could be flattened
            starts, begin, summand = [*range(0, tiles, width), tiles], 0.0, True
        free = processors - max(held, 0)
        settings = {"triangle": launch.triangle, "summand": summand, "start": begin}
        time, waited = seconds_beside(tile, device, launch.results, free, starts, width, **settings)
        total += time
        longest = max(longest, waited)
    return total, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", nargs="?", default="sm_90", choices=list(load_tables()))
    parser.add_argument("--processors", type=int, default=132)
    options = parser.parse_args()
    table, processors = load_tables()[options.architecture], options.processors
    shape = PRESETS["1b"]
    width = shape.width
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (width, 4 * width)] * shape.layers
    one_cost = replace(table.device, between_flattened=table.device.between)
    as_alone = replace(one_cost, overhead=table.device.between)
    for method, dtype in (("standard", "bfloat16"), ("standard", "float16"), ("auto", "float16")):
        was, now = (list(launches(matrices, method, dtype, fold=fold)) for fold in (False, dtype == "float16"))
        whole = [replace(launch, halves=False) for launch in was]
        columns = [
            by_part(whole, table, as_alone, processors),
            by_part(was, table, one_cost, processors),
            by_part(was, table, table.device, processors),
            by_part(now, table, table.device, processors),
        ]
        print(f"\n{method}, {dtype}: {len(was)} launches\n")
        print("| part | before, ms | halves on diagonals | flattened | a on the diagonal |\n|---|---|---|---|---|")
        for part in columns[0]:
            print(f"| {part} | {' | '.join(f'{column[part]:.1f}' for column in columns)} |")
        print(f"| all | {' | '.join(f'{sum(column.values()):.1f}' for column in columns)} |")
        lists = [launch for launch in now if launch.listed]
        idle, _ = beside(lists, table, processors, 0, "one wave")
        print("\n| held | fair | one wave | a counter | 32 reserved | waves |\n|---|---|---|---|---|---|")
        waits = []
        for held in HELD:
            cells = [f"{processors / (processors - held):.2f}"]
            for dealing, reserved in (("one wave", 0), ("a counter", 0), ("one wave", CHANNELS), ("waves", 0)):
                time, wait = beside(lists, table, processors, held, dealing, reserved)
                cells.append(f"{time / idle:.2f}")
                waits.append(wait)
            print(f"| {held} | {' | '.join(cells)} |")
        one, _, _, several = (1e3 * wait for wait in waits[:4])
        print(f"\nlists {1e3 * idle:.1f} ms; a collective waits {one:.2f} ms at most, with waves {several:.2f}")


if __name__ == "__main__":
    main()
