"""Adopt a GPU's measurements into the repository: results, tiles, machine file, plans beside them, pages.

    python benchmarks/adopt.py runs/gpu/lease.tar.gz runs/gpu/lease-2.tar.gz     # archives of `make gpu PART=...`
    python benchmarks/adopt.py runs/gpu                                          # the folder of a whole `make gpu`

Only steps that ended well are adopted. Tiles replace the card's where lists are faster with them. A rehearsal measures
nothing and is refused. Needs no GPU; about a minute of a core for each step of training.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import VARIANTS, Plan, our_config, varied
from expected import list_ms, peak_gb, step_ms
from gpt import Shape
from plan_h100 import on_one_rank
from tune_tiles import formatted

from compile_muon.config import load_config, read_options
from compile_muon.errors import MuonZeroError
from compile_muon.planning.candidates import planned_for
from compile_muon.simulate import Timeline
from compile_muon.simulate.machine import load_machine

ROOT = Path(__file__).resolve().parents[1]
CARDS = ("H100", "H200", "B200")
#: step of `make gpu` -> name of its result in benchmarks/results, after the card's name
RESULTS = {
    "lists": "lists",
    "step-8k": "step_1b",
    "step-65k": "step_1b_65k",
    "step-8k-graphs": "step_1b_graphs",
    "step-8k-momenta": "step_1b_momenta",
    "memory-1b": "memory_1b",
    "contention": "contention",
    "products": "products",
    "profile": "profile",
}
#: results that are compared with a plan -> title, and the figure of the plan to compare
PLANNED = {
    "step_1b": ("8,192 tokens", "seconds"),
    "step_1b_graphs": ("8,192 tokens, CUDA graphs or not", "seconds"),
    "step_1b_65k": ("65,536 tokens", "seconds"),
    "memory_1b": ("8,192 tokens", "bytes"),
}


def adopted(folder: Path, root: Path) -> tuple[str, list[str]]:
    """Copy results from a part's ``folder`` into the repository; return the card in lower case, and the files written.

    A MuonZeroError says that results were rehearsed, or that the card is unknown.
    """
    report = json.loads((folder / "steps.json").read_text())
    if report.get("rehearsed") or "nvidia-smi" not in report:
        raise MuonZeroError(f"{folder.name}: was rehearsed, which measures nothing; adopt what a GPU has run")
    card = next((name.lower() for name in CARDS if name in report["device"]), None)
    if card is None:
        raise MuonZeroError(f"{folder.name}: of {report['device']!r}; results are kept of {', '.join(CARDS)}")
    ended_well = {step["name"] for step in report["steps"] if step["result"] == "ok"}
    targets = {f"{step}.json": f"benchmarks/results/{card}_{name}.json" for step, name in RESULTS.items()}
    targets["calibrate.json"] = f"compile_muon/config/machines/{card}.json"
    written = []
    for name, target in targets.items():
        if name.removesuffix(".json") in ended_well and (folder / name).exists():
            (root / target).write_bytes((folder / name).read_bytes())
            written.append(target)
    if {"tune", "lists-tuned"} <= ended_well and is_faster(folder, root / targets["lists.json"]):
        tiles = root / "kernels" / "gpu" / "tiles.json"
        tiles.write_text(formatted(json.loads(tiles.read_text()) | json.loads((folder / "tiles.json").read_text())))
        written.append("kernels/gpu/tiles.json")
    return card, written


def is_faster(folder: Path, lists: Path) -> bool:
    """Tell whether a list takes less time with the tuned tiles than in the card's own results."""
    took = [
        list_ms("1b, 20 matrices", "auto", "list")(json.loads(file.read_text()))
        for file in (folder / "lists-tuned.json", lists)
        if file.exists()
    ]
    return len(took) == 2 and None not in took and took[0] < took[1]


def planned(record: dict[str, Any], contender: str, card: str) -> Timeline:
    """Simulate the step of one contender of a record of `train_step.py`, on the card's machine."""
    shape, options = Shape(**record["shape"]), record["options"]
    trial = options | {"stage": options["stages"][0], "reshard_after_forward": not options["keep_gathered"]}
    plan = Plan.of(trial, shape.batch, torch.device("cuda"))
    if contender in VARIANTS:
        plan = varied(plan, contender)
    machine = load_machine(card)
    algorithm = "AdamW" if contender == "ours-adamw" else "Muon"
    config = planned_for(load_config(our_config(plan, algorithm)), machine, card)
    frames = read_options(config.compile.options())
    return on_one_rank(shape, plan.sequences, config, frames).simulated(machine)


def beside(card: str, results: Path) -> Iterator[dict[str, Any]]:
    """Yield a row of the measured and the planned figure for each contender in the card's records."""
    for name, (title, figure) in PLANNED.items():
        file = results / f"{card}_{name}.json"
        if not file.exists():
            continue
        record = json.loads(file.read_text())
        for contender in dict.fromkeys(row["contender"] for row in record["rows"] if row["contender"][:4] == "ours"):
            timeline = planned(record, contender, card)
            if figure == "seconds":
                measured, simulated = step_ms(contender)(record), 1e3 * timeline.seconds
            else:
                measured, simulated = peak_gb(contender)(record), timeline.peak.total / 1e9
            unit = "ms" if figure == "seconds" else "GB at the peak"
            yield {"what": f"{title}, {contender}", "unit": unit, "measured": measured, "planned": simulated}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="*", help="archives or folders; none: plans and pages alone")
    options = parser.parse_args(argv)
    results, cards = ROOT / "benchmarks" / "results", set()
    for path in options.measured:
        with tempfile.TemporaryDirectory() as folder:
            if path.is_dir():
                source = path
            else:
                with tarfile.open(path) as packed:
                    packed.extractall(folder, filter="data")
                (source,) = Path(folder).iterdir()
            card, written = adopted(source, ROOT)
        cards.add(card)
        print(f"{path}: " + (", ".join(written) or "no step of it ended well"))
    for card in cards or [name.lower() for name in CARDS]:
        if rows := list(beside(card, results)):
            (results / f"{card}_planned.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
            for row in rows:
                took, plan = row["measured"], row["planned"]
                print(f"{card} {row['what']}: {took:.4g} {row['unit']}, planned {plan:.4g} ({plan / took - 1:+.1%})")
    return int(runpy.run_path(str(ROOT / "docs" / "figures.py"))["main"]())


if __name__ == "__main__":
    sys.exit(main())
