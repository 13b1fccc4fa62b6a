"""Expected times of the 80 matrices of `train_step.py --preset 1b` by the model of a launch, by part, and beside NCCL.

    python benchmarks/list_model.py [sm_90] [--processors 132]
    python benchmarks/list_model.py --fit benchmarks/results/h200_lists.json --machine h200 --whole-q

No GPU: times are those of kernels/gpu/model.py, whose numbers are in tiles.json. "before" has tiles on diagonals as
wide as others, loops that are not flattened, and a summand wherever a is added. Normalization is left out.

``--fit`` takes lists that `lists.py` timed back to back beside a product, and prints constants of tiles.json at that
clock: the rate is the product's in float16, the default; the time between two tiles is the rest of the lists' time,
each at the rate of its own dtype. Two lists cannot tell flattened loops from others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpt import PRESETS
from lists import CASES

from compile_muon.kernels import iterations
from compile_muon.kernels.call_plan import MEMORY_LIMIT
from compile_muon.kernels.coefficients import resolve_coefficients
from compile_muon.kernels.dispatch import chosen_form
from compile_muon.kernels.gpu.model import Device, programs, seconds_beside, waves
from compile_muon.kernels.gpu.tiles import Table, load_tables
from compile_muon.simulate.machine import Machine, load_machine
from compile_muon.simulate.newton_schulz import KernelLaunch, Steps, launches

HELD = (0, 8, 16, 32)
CHANNELS = 32  # NCCL's on one node, at most


def launched_for(shapes: Iterable[tuple[int, int]], method: str, dtype: str, *, folds: bool) -> list[KernelLaunch]:
    """List the launches of Newton-Schulz of these matrices, (k, l) with k ≤ l, by jordan's five steps."""
    coefficients = resolve_coefficients("jordan", 5)
    restarts = coefficients.gram_restarts(getattr(torch, dtype))
    forms: dict[str, list[tuple[int, int]]] = {}
    for k, width in shapes:
        form = chosen_form(method, k, width, 5, len(restarts), symmetric=True)
        forms.setdefault(form, []).append((k, width))
    launched: list[KernelLaunch] = []
    for form, same_form in forms.items():
        steps = Steps(form, tuple(coefficients.steps), tuple(restarts), folds, itemsize=2, limit=MEMORY_LIMIT)
        launched += launches(tuple(((1, *shape), 2) for shape in same_form), steps)
    return launched


def by_part(launched: list[KernelLaunch], table: Table, device: Device, processors: int) -> dict[str, float]:
    """Return the milliseconds of each part, with the numbers of ``device`` for lists."""
    parts: dict[str, float] = {}
    for launch in launched:
        time = launch.seconds(replace(table, device=device) if launch.listed else table, processors)
        parts[launch.part] = parts.get(launch.part, 0) + 1e3 * time
    return parts


def beside(
    launched: list[KernelLaunch], table: Table, processors: int, held: int, dealing: str, reserved: int = 0
) -> tuple[float, float]:
    """Return (seconds of grouped launches, longest seconds that a collective waits for one of their programs)."""
    device = table.device
    total = longest = 0.0
    for launch in launched:
        tile = launch.tile(table, processors)
        tiles = sum(b * programs(tile, rows, cols, triangle=launch.triangle) for b, rows, cols, _ in launch.results)
        width = (processors - reserved) * tile.resident  # as if the reserved multiprocessors were not there
        starts, begin, summand = waves(tiles, width, shared=dealing == "waves"), None, launch.summand
        if dealing == "a counter":  # a program that draws tiles from a counter has no loop that could be flattened
            starts, begin, summand = [*range(0, tiles, width), tiles], 0.0, True
        free = processors - max(held, 0)  # other kernels hold the rest
        settings = {"triangle": launch.triangle, "summand": summand, "start": begin}
        time, waited = seconds_beside(tile, device, launch.results, free, starts, width, **settings)
        total += time
        longest = max(longest, waited)
    return total, longest


def fitted(rows: Sequence[Mapping[str, Any]], table: Table, machine: Machine) -> dict[str, float]:
    """Fit "list_rate", "between" and "between_flattened" to the rows of `lists.py`, by least squares over lists.

    Normalization reads each matrix twice and writes it once, in two bytes an element.
    """
    processors, fastest = machine.processors, max(tile.rate for tile in table.cublas)
    rates: dict[str, float] = {}
    products = squares = 0.0
    for row in (row for row in rows if row["way"] == "list"):
        shapes = [tuple(sorted(shape)) for shape in CASES[row["case"]]]
        rates[row["dtype"]] = rate = 1e12 * row["sustained_tflops"] / processors / fastest
        listed = launched_for(shapes, row["method"], row["dtype"], folds=row["dtype"] == "float16")
        without, with_one = (
            sum(by_part(listed, replace(table, device=device), device, processors).values())
            for between in (0.0, 1e-6)
            for device in [replace(table.device, list_rate=rate, between=between, between_flattened=between)]
        )
        copied = 6 * sum(k * width for k, width in shapes) / (machine.memory_bandwidth * machine.memory_fraction)
        microsecond = with_one - without
        products += microsecond * (row["ms"] - 1e3 * copied - without)
        squares += microsecond**2
    between = round(1e-6 * max(0.0, products / squares), 8)
    return {"list_rate": round(rates["float16"], -9), "between": between, "between_flattened": between}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", nargs="?", default="sm_90", choices=list(load_tables()))
    parser.add_argument("--processors", type=int, default=132)
    parser.add_argument("--fit", type=Path, metavar="LISTS.json")
    parser.add_argument("--machine", default="h200", help="that was timed, for --fit")
    parser.add_argument("--whole-q", action="store_true", help="the lists were timed before Q was mirrored")
    options = parser.parse_args()
    if options.fit:
        machine = load_machine(options.machine)
        rows = json.loads(options.fit.read_text())["rows"]
        if options.whole_q:
            iterations.MIRRORED = frozenset()
        print(json.dumps(fitted(rows, load_tables()[machine.architecture], machine)))
        return
    table, processors = load_tables()[options.architecture], options.processors
    shape = PRESETS["1b"]
    width = shape.width
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (width, 4 * width)] * shape.layers
    one_cost = replace(table.device, between_flattened=table.device.between)
    as_alone = replace(one_cost, overhead=table.device.between)
    for method, dtype in (("standard", "bfloat16"), ("standard", "float16"), ("auto", "float16")):
        unfolded, folded = (launched_for(matrices, method, dtype, folds=folds) for folds in (False, dtype == "float16"))
        whole = [replace(launch, halves=False) for launch in unfolded]
        columns = [
            by_part(whole, table, as_alone, processors),
            by_part(unfolded, table, one_cost, processors),
            by_part(unfolded, table, table.device, processors),
            by_part(folded, table, table.device, processors),
        ]
        print(f"\n{method}, {dtype}: {len(unfolded)} launches\n")
        print("| part | before, ms | halves on diagonals | flattened | a on the diagonal |\n|---|---|---|---|---|")
        for part in {**columns[0], **columns[-1]}:
            print(f"| {part} | {' | '.join(f'{column.get(part, 0):.1f}' for column in columns)} |")
        print(f"| all | {' | '.join(f'{sum(column.values()):.1f}' for column in columns)} |")
        lists = [launch for launch in folded if launch.listed]
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
