"""Learning rates for the two configs that ``examples/train_gpt.py --compare`` compares, over a stated grid.

    python benchmarks/tune_example.py                         # one process, as many windows a step as two ranks draw
    python benchmarks/tune_example.py --steps 20 --layers 1 --json grid.json

Each point of the grid is one training of the example; its result is the last validation loss. Points that the JSON has
already are not trained again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
#: by config: names in optimizer.params, and the values tried
GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "config.json": {"lr": (0.01, 0.02, 0.04), "adam_lr": (0.0025, 0.005, 0.01)},
    "adamw.json": {"lr": (0.001, 0.002, 0.004, 0.008, 0.016)},
}


def train(config: dict[str, Any], steps: int, arguments: list[str]) -> float:
    """Train once; return the last validation loss, in nats per byte."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tried.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--config", str(path), "--out", f"{folder}/runs"]
        command += [f"--steps={steps}", f"--save-every={steps}", "--sample-bytes=1", "--batch=8", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (history,) = json.loads((Path(folder) / "runs" / "losses.json").read_text()).values()
    return history["val"][str(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "example_grid.json")
    args, rest = parser.parse_known_args()  # the rest is the example's
    grids = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name, axes in GRID.items():
        config = json.loads((EXAMPLES / name).read_text())
        losses = grids.setdefault(name, {})
        for point in product(*axes.values()):
            changed = dict(zip(axes, point, strict=True))
            key = ", ".join(f"{axis} {value}" for axis, value in changed.items())
            if key not in losses:
                config["optimizer"]["params"].update(changed)
                losses[key] = train(config, args.steps, rest)
                args.json.write_text(json.dumps(grids, indent=1) + "\n")
            print(f"{name:12} {key:24} {losses[key]:.4f}", flush=True)
        best = min(losses, key=losses.__getitem__)
        print(f"{name:12} best: {best}")


if __name__ == "__main__":
    main()
