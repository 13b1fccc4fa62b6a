"""The planner's times of the steps that were measured on one H100, as they ran then, and with today's defaults.

    python benchmarks/plan_h100.py                     # about a minute of a core, no GPU
    python benchmarks/plan_h100.py --json plan_h100.json

Reads results/h100_step_1b_*.json (seconds, shape, settings) and results/h100_products.json (products of the same day).
The steps ran with earlier kernels, which differ from those in today's graphs:

- lists had tiles on diagonals as wide as others, and loops that were not flattened;
- tiles were estimates: rate and cost of a tile follow for each kind of product from the squares of
  ``h100_products.json``, the small one at the clock of an idle card;
- 52.5 bytes were moved for a Muon element, where today 36 are (docs/reference/host-time.md);
- chunks had 1 GiB.

Nothing here is fitted to the two steps. The Muon step cannot judge today's ``between`` of kernels/gpu/tiles.json, the
seconds between tiles of a list, because it was set by that step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Shape
from torch._subclasses import FakeTensorMode

from compile_muon.config import Config, FrameOptions, load_config
from compile_muon.kernels.gpu.model import busiest
from compile_muon.kernels.gpu.tiles import Table
from compile_muon.planning import capture_step
from compile_muon.planning.candidates import planned_for
from compile_muon.planning.capture import Captured
from compile_muon.simulate.machine import Machine, load_machine
from compile_muon.simulate.newton_schulz import Call

RESULTS = Path(__file__).parent / "results"
BAR = 0.05
#: bytes of a Muon element that the earlier step moved beyond today's
EARLIER_BYTES = 52.5 - 36
EARLIER_LIMIT = 2**30
#: sides of the squares that give the rate of a tile and its cost beside the loop
SQUARES = (2048, 8192)
#: TFLOP/s of cuBLAS at 8192 on this card, bfloat16: in rounds of 3 ms with pauses between, and without pauses. Their
#: ratio is that of the clocks. Triton's do_bench zeroes 256 MB before each launch, so a square of 2048, 34 µs, ran at
#: the first of these clocks; one of 8192, 1 ms, and the lists of a step ran at the second.
RESTED, SUSTAINED = 798, 690
#: part of a list -> the square product that gives its rate
SHOWN_BY = {"XXᵀ": "X Xᵀ", "bR + cR², and aI": "bA + cA²", "FX, or QX": "aX + BX", "the last X": "aX + BX"}


def measured(kind: str) -> tuple[dict[str, Any], float]:
    """Return the record of a run and the median seconds of its steps."""
    record = json.loads((RESULTS / f"h100_step_1b_{kind}.json").read_text())
    (row,) = [sample for sample in record["samples"] if sample["contender"] == f"ours-{kind}"]
    return record, statistics.median(row["step_s"])


def captured(shape: Shape, kind: str, settings: dict[str, Any], machine: Machine) -> Captured:
    """Capture a step of one rank at stage 0 in bfloat16."""
    rates = {"muon_lr": 0.02, "adam_lr": 3e-4} if kind == "muon" else {"lr": 3e-4}
    optimizer = {"type": {"muon": "Muon", "adamw": "AdamW"}[kind], "params": rates | settings}
    config = load_config({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "optimizer": optimizer})
    return on_one_rank(shape, shape.batch, planned_for(config, machine, "h100"), FrameOptions(codegen="inductor"))


def on_one_rank(shape: Shape, sequences: int, config: Config, options: FrameOptions) -> Captured:
    """Capture a step of one rank with micro-batches of so many sequences, on fake tensors."""

    def model() -> GPT:
        with FakeTensorMode():
            return GPT(shape)

    tokens = torch.zeros(sequences, shape.context, dtype=torch.long)
    return capture_step(model, (tokens, tokens), world=1, rank=0, config=config, options=options)


def earlier_tables(table: Table, processors: int) -> dict[str, Table]:
    """Solve for the rate of a tile's loop and the tile's cost beside it, for each part of a list, from two squares."""
    rows = json.loads((RESULTS / "h100_products.json").read_text())["rows"]
    tables = {}
    for part, product in SHOWN_BY.items():
        took = {row["size"]: row["ms"] / 1e3 for row in rows if row["product"] == product}
        triangle = product != "aX + BX"
        tile = (table.symmetric if triangle else table.product)[0]
        points = []  # (operations, seconds) of a tile
        for size in SQUARES:
            operations, tiles = busiest(tile, ((1, size, size, size),), processors, triangle=triangle)
            points.append((operations / tiles, (took[size] - table.device.launch) / tiles))
        # One tile of the small square runs on a multiprocessor, and several of the large one: two equations for two
        # unknowns, at the clock of a step.
        (few, short), (many, long) = points
        short *= RESTED / SUSTAINED
        rate = (many - few) / (long - short)
        overhead = short - few / rate
        device = replace(table.device, rate=rate, overhead=overhead, between=overhead, between_flattened=overhead)
        tables[part] = replace(table, device=device)
    return tables


def newton_schulz(step: Captured, machine: Machine, *, earlier: bool) -> float:
    """Return the seconds of the products of all lists."""
    assert machine.tiles is not None
    tables = earlier_tables(machine.tiles, machine.processors) if earlier else {}
    op = torch.ops.muon_zero.newton_schulz.default
    calls = [node for played in step.graphs for node in played.gm.graph.find_nodes(op="call_function", target=op)]
    return sum(
        replace(launch, halves=not earlier).seconds(tables.get(launch.part, machine.tiles), machine.processors)
        for call in calls
        for launch in Call(call, machine).listed or ()
    )


def muon_elements(shape: Shape) -> int:
    """Count the elements of the hidden matrices."""
    return shape.layers * 12 * shape.width**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="fewer than were measured, to see that it works")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = load_machine("h100")
    adamw_record, adamw_took = measured("adamw")
    record, muon_took = measured("muon")
    assert adamw_record["shape"] == record["shape"]
    shape = Shape(**record["shape"])
    if options.layers:
        shape = replace(shape, layers=options.layers)
    settings = {
        "ns_method": record["options"]["ns_method"],
        "ns_dtype": "bfloat16",  # "auto" of that day
        "ns_memory_limit": EARLIER_LIMIT,
    }
    adamw = captured(shape, "adamw", {}, machine).simulated(machine).seconds
    step = captured(shape, "muon", settings, machine)
    earlier_products = newton_schulz(step, machine, earlier=True)
    moved = EARLIER_BYTES * muon_elements(shape) / (machine.memory_bandwidth * machine.memory_fraction)
    muon = step.simulated(machine).seconds - newton_schulz(step, machine, earlier=False) + earlier_products + moved
    today = captured(shape, "muon", {}, machine)
    now = today.simulated(machine).seconds
    rows = [
        ("AdamW", adamw_took, adamw),
        ("Muon, as it ran", muon_took, muon),
        ("the difference", muon_took - adamw_took, muon - adamw),
    ]
    print("| | measured, ms | planned, ms | off | |\n|---|---|---|---|---|")
    for name, took, plan in rows:
        off = plan / took - 1
        print(f"| {name} | {took * 1e3:.1f} | {plan * 1e3:.1f} | {off:+.1%} | {'' if abs(off) <= BAR else 'MISSED'} |")
    print(f"| Muon by today's defaults | | {now * 1e3:.1f} | | {now / adamw - 1:+.0%} over AdamW |")
    print(f"\nproducts of Newton-Schulz: {earlier_products * 1e3:.1f} ms as it ran, ", end="")
    print(f"{newton_schulz(today, machine, earlier=False) * 1e3:.1f} today")
    if options.json:
        steps = {name: {"measured_s": took, "planned_s": plan} for name, took, plan in rows}
        steps["Muon by today's defaults"] = {"planned_s": now}
        options.json.write_text(json.dumps({"shape": record["shape"], "steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
