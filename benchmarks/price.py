"""What Muon's step costs over AdamW's, simulated: by tokens a GPU and step, and by GPUs, for models of several sizes.

    python benchmarks/price.py 1b 8b --json results/price.json --picture ../docs/price.png      # minutes, no GPU
    python benchmarks/price.py --from results/price.json --picture ../docs/price.png       # the table and the picture

Every point is simulated on nodes of eight H100s, stage 1, bfloat16, Muon's defaults, micro-batches of 4,096 tokens: a
step is played with one micro-batch, Muon and AdamW, and with two once, whose difference is what another one takes.
Beyond 64 GPUs each 64 are a replica. Whether a model fits is not asked. What was measured is read from
results/h100_step_1b_*.json: 8 x 1,024 tokens in one batch, by earlier kernels.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Shape
from plan_h100 import measured
from torch import nn
from torch._subclasses import FakeTensorMode

from compile_muon.config import Config, FrameOptions, load_config
from compile_muon.planning.candidates import planned_for, with_adamw
from compile_muon.planning.machine import load_machine
from compile_muon.planning.trace import Target, Trace, trace_step

MICRO = 4096
TOKENS = (4096, 16384, 65536, 131072)
WORLDS = (1, 8, 64, 512)
#: 1.0, 8.1 and 70 G parameters
SHAPES = {
    "1b": Shape(layers=20, width=2048, heads=16, context=MICRO, batch=1),
    "8b": Shape(layers=40, width=4096, heads=32, context=MICRO, batch=1),
    "70b": Shape(layers=87, width=8192, heads=64, context=MICRO, batch=1),
}


def traced(shape: Shape, micro_batches: int) -> tuple[Trace, Config]:
    machine = load_machine("h100")
    settings = {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}},
    }
    config = planned_for(load_config(settings), machine, "h100")

    def model() -> nn.Module:
        with FakeTensorMode():
            return GPT(shape)

    tokens = torch.zeros(shape.batch, shape.context, dtype=torch.long)
    return trace_step(model, (tokens, tokens), config, FrameOptions(codegen="inductor")), config


def axes(world: int) -> dict[str, int]:
    return {"replicate": world // 64, "shard": 64} if world > 64 else {"shard": world}


def played(trace: Trace, config: Config, world: int) -> dict[str, float]:
    """Seconds of a step of the first of the ranks with most to orthogonalize, of them exposed, and Newton-Schulz's."""
    target = Target(world, config, axes(world), "nccl")
    work = trace.owner_work(target)
    rank = max(range(world), key=work.__getitem__)
    timeline = trace.captured(target, rank=rank).simulated(load_machine("h100"))
    of_ns = [event for event in timeline.events if event.category == "newton_schulz"]
    return {
        "seconds": timeline.seconds,
        "exposed": sum(timeline.exposed.values()),
        "newton_schulz": sum(event.end - event.start for event in of_ns),
    }


def simulated(name: str, worlds: list[int], write: Any) -> None:
    """Tell ``write`` every number of ranks as soon as it is played."""
    once, config = traced(SHAPES[name], 1)
    twice, config_twice = traced(SHAPES[name], 2)
    some = min(8, max(worlds))
    another = played(twice, with_adamw(config_twice), some)["seconds"]
    micro = another - played(once, with_adamw(config), some)["seconds"]
    for world in worlds:
        muon, adamw = played(once, config, world), played(once, with_adamw(config), world)
        write({"model": name, "ranks": world, "micro_seconds": micro, "muon": muon, "adamw": adamw})


def price(point: dict[str, Any], tokens: int) -> float:
    """Muon's step over AdamW's, less one."""
    behind = (tokens // MICRO - 1) * point["micro_seconds"]
    return (point["muon"]["seconds"] + behind) / (point["adamw"]["seconds"] + behind) - 1


def table(points: list[dict[str, Any]]) -> str:
    head = ["model", "GPUs", *(f"{tokens:,} tokens" for tokens in TOKENS), "computed apart, ms", "exposed, ms"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for point in points:
        muon, adamw = point["muon"], point["adamw"]
        exposed = muon["exposed"] - adamw["exposed"]
        apart = muon["seconds"] - adamw["seconds"] - exposed
        cells = [point["model"].replace("b", " B"), str(point["ranks"])]
        cells += [f"{price(point, tokens):+.1%}" for tokens in TOKENS]
        lines.append("| " + " | ".join([*cells, f"{apart * 1e3:+.1f}", f"{exposed * 1e3:+.1f}"]) + " |")
    return "\n".join(lines)


def picture(points: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(point["model"] for point in points))
    figure, panels = pyplot.subplots(1, len(models), figsize=(4.2 * len(models), 3.6), sharey=True, squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for point in (point for point in points if point["model"] == model):
            line = [100 * price(point, tokens) for tokens in TOKENS]
            panel.plot(TOKENS, line, marker="o", label=f"{point['ranks']} GPUs")
        if model == "1b":
            took = 100 * (measured("muon")[1] / measured("adamw")[1] - 1)
            panel.plot([8192], [took], marker="*", markersize=12, linestyle="", color="black", label="measured, 1 GPU")
        panel.set(xscale="log", title=f"{model.replace('b', ' B')}, simulated", xlabel="tokens a GPU and step")
        panel.set_yscale("symlog", linthresh=1)
        panel.set_xticks(TOKENS, [f"{tokens // 1024}k" for tokens in TOKENS], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0][0].set_ylabel("Muon's step over AdamW's, %")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*SHAPES, []], default=[])
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS))
    parser.add_argument("--from", dest="given", type=Path, nargs="*", default=[], help="points of earlier runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    points = [point for path in options.given for point in json.loads(path.read_text())["points"]]

    def write(point: dict[str, Any]) -> None:
        points.append(point)
        if options.json:
            options.json.write_text(json.dumps({"simulated": True, "points": points}, indent=1) + "\n")

    for name in options.models:
        simulated(name, options.worlds, write)
    print(table(points))
    if options.json and not options.models:
        options.json.write_text(json.dumps({"simulated": True, "points": points}, indent=1) + "\n")
    if options.picture:
        picture(points, options.picture)


if __name__ == "__main__":
    main()
