"""The simulated time that Muon adds to AdamW's step: by model, GPUs, and tokens of a GPU and step.

    python benchmarks/price.py                        # an hour of a core, no GPU: results/price.json and price.svg
    python benchmarks/price.py --models 1B --worlds 1 8 --layers 2 --json /tmp/price.json

H100s in nodes of eight, `optimizer.type` "Muon" and `bf16`, defaults otherwise. 1 B is the preset "1b" of
train_step.py, 8 B and 70 B are the shapes of Llama 3.1, all without activation checkpointing; so micro-batches have
4,096 tokens, or 2,048 with 70 B. Stages are the lowest that fit with several micro-batches. The measured point is
`results/h200_step_1b.json`, of one H200.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, PRESETS
from pictures import write_svg
from plan_h100 import RESULTS
from torch import nn
from torch._subclasses import FakeTensorMode

from compile_muon.config import FrameOptions, load_config
from compile_muon.planning.candidates import Price, percent, planned_for, prices, with_micro_batches
from compile_muon.planning.models import Batch, load_subject
from compile_muon.planning.trace import Target, Trace, trace_step
from compile_muon.simulate.machine import load_machine

#: tokens of a GPU and step
TOKENS = tuple(4096 * 2**i for i in range(6))
WORLDS = (1, 8, 64, 512)
#: most ranks that weights are sharded over; more ranks are replicas
SHARDED = 64
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class Model:
    """A model to plan."""

    stage: int  # of ZeRO
    least: int  # GPUs, at least
    micro_batch: int  # tokens of a GPU
    shape: Mapping[str, int] | None = None  # of a Llama; None for the preset "1b"


def _llama(width: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (width, intermediate, layers, heads), strict=True))


MODELS = {
    "1B": Model(1, 1, 4096),
    "8B": Model(2, 8, 4096, _llama(4096, 14336, 32, 32)),
    "70B": Model(3, 64, 2048, _llama(8192, 28672, 80, 64)),
}


def subject(name: str, layers: int | None) -> tuple[Callable[[], nn.Module], Any]:
    """Return the function that builds a model, and its batch."""
    model = MODELS[name]
    if model.shape is None:
        gpt = replace(PRESETS["1b"], **({"layers": layers} if layers else {}))
        tokens = torch.zeros(model.micro_batch // gpt.context, gpt.context, dtype=torch.long)

        def build() -> nn.Module:
            with FakeTensorMode():
                return GPT(gpt)

        return build, (tokens, tokens)
    llama_config = {**LLAMA, **model.shape} | ({"num_hidden_layers": layers} if layers else {})
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(llama_config))
    loaded = load_subject(folder, Batch(model.micro_batch, model.micro_batch))
    return loaded.build, loaded.batch


def priced(name: str, worlds: Sequence[int], layers: int | None) -> dict[int, list[Price]]:
    """Return the prices of a model by number of GPUs, those of the rank with most to orthogonalize."""
    planned = MODELS[name]
    build, batch = subject(name, layers)
    machine = load_machine("h100")
    config = planned_for(
        load_config(
            {"zero_optimization": {"stage": planned.stage}, "bf16": {"enabled": True}, "optimizer": {"type": "Muon"}}
        ),
        machine,
        "h100",
    )
    options = FrameOptions(codegen="inductor")

    @cache
    def traced(count: int) -> Trace:
        return trace_step(build, batch, with_micro_batches(config, count), options)

    counts = [tokens // planned.micro_batch for tokens in TOKENS]
    prices_of = {}
    for world in worlds:
        if world < planned.least:
            continue
        axes = {"shard": world} if world <= SHARDED else {"replicate": world // SHARDED, "shard": SHARDED}
        target = Target(world, config, axes, "nccl")
        owned = traced(1 if 1 in counts else 3).owner_work(target)
        rank = max(range(world), key=owned.__getitem__)
        prices_of[world] = []
        for price in prices(traced, target, machine, rank=rank, tokens=planned.micro_batch, counts=counts):
            prices_of[world].append(price)
            print(f"{name}, {world} GPUs, {price.tokens:,} tokens: {price.share:+.1%}", flush=True)
    return prices_of


def measured() -> dict[str, Any]:
    """Return the measured point: 1 B on one H200."""
    record = json.loads((RESULTS / "h200_step_1b.json").read_text())
    seconds = {row["contender"]: row["step_s"] for row in record["rows"]}
    tokens = record["shape"]["batch"] * record["shape"]["context"]
    share = seconds["ours-muon-auto"] / seconds["ours-adamw"] - 1
    return {"model": "1B", "gpus": 1, "tokens": tokens, "share": share}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a Markdown table of the added time, and in brackets the part that waits for collectives."""
    lines = ["| model | stage | GPUs | " + " | ".join(f"{count:,}" for count in TOKENS) + " |"]
    lines.append("|" + "---|" * (3 + len(TOKENS)))
    for row in rows:
        cells = (
            f"{p['share']:+.1%} ({percent(p['exposed_share'])})" if p["fits"] else "does not fit" for p in row["prices"]
        )
        lines.append(f"| {row['model']} | {row['stage']} | {row['gpus']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(rows: Sequence[Mapping[str, Any]], point: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each model, a line for each number of GPUs."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for row in (row for row in rows if row["model"] == model):
            fitting = [price for price in row["prices"] if price["fits"]]
            percents = [100 * price["share"] for price in fitting]
            colour = f"C{WORLDS.index(row['gpus'])}"
            axes.plot(
                [p["tokens"] for p in fitting],
                percents,
                "o-",
                color=colour,
                label=f"{row['gpus']} GPU" + "s" * (row["gpus"] > 1),
            )
        if model == point["model"]:
            axes.plot([point["tokens"]], [100 * point["share"]], "k*", markersize=11, label="measured, 1 H200")
        axes.set_xscale("log", base=2)
        axes.set_xticks(TOKENS, [f"{count // 1024}k" for count in TOKENS])
        axes.set_title(f"{model}, simulated")
        axes.set_xlabel("tokens of a GPU and step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("% added to AdamW's step")
    write_svg(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--layers", type=int, help="fewer, to see that it works")
    parser.add_argument("--json", type=Path, default=RESULTS / "price.json", help="and the picture beside it, as SVG")
    options = parser.parse_args()
    rows = [
        {"model": name, "stage": MODELS[name].stage, "gpus": world, "prices": [asdict(price) for price in world_prices]}
        for name in options.models
        for world, world_prices in priced(name, options.worlds, options.layers).items()
    ]
    point = measured()
    options.json.write_text(json.dumps({"simulated": rows, "measured": point}, indent=1) + "\n")
    picture(rows, point, options.json.with_suffix(".svg"))
    print(f"\n{table(rows)}\n\nmeasured: {point['share']:+.1%} at {point['tokens']:,} tokens on one H200")


if __name__ == "__main__":
    main()
