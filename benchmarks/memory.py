"""Qwen3-14B on 8 H200s: tokens at which a step fits, what a budget keeps, and the simulated time.

    python benchmarks/memory.py                              # half an hour of a core, no GPU: results/memory.json
    python benchmarks/memory.py --layers 4 --tokens 2048 --json /tmp/memory.json

The case is DeepCompile's for activations in host memory (DeepSpeed #8255): micro-batches of 4 sequences, ZeRO-3, 141 GB
a GPU. ``optimizer.type`` is "Muon", weights and activations are bfloat16 beside float32 masters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plan_h100 import RESULTS

from compile_muon.config import load_config, read_options
from compile_muon.memory import BudgetError
from compile_muon.planning import capture_step
from compile_muon.planning.models import Batch, Subject, load_subject
from compile_muon.simulate.machine import load_machine

SEQUENCES, WORLD, MACHINE = 4, 8, "h200"
TOKENS = (2048, 3072, 3328, 3584)
QWEN = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "use_cache": False,
}
#: seconds of a step that DeepSpeed #8255 reports: all activations moved, and 11.7 of 22.0 GB
PUBLISHED = {3328: {"without": "out of memory", "all moved": 8.67, "chosen": 7.38}, 2048: {"without": "fits"}}


def subject(tokens: int, layers: int) -> Subject:
    """Return the model and a batch of sequences with ``tokens`` each."""
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps({**QWEN, "num_hidden_layers": layers}))
    return load_subject(folder, Batch(SEQUENCES * tokens, tokens))


def rows(tokens: int, layers: int) -> Iterator[dict[str, Any]]:
    """Yield the step without a budget, and within what "auto" leaves of the GPU."""
    machine = load_machine(MACHINE)
    config = load_config(
        {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "optimizer": {"type": "Muon"},
            "machine": MACHINE,
            "gradient_accumulation_steps": 1,
        }
    )
    model = subject(tokens, layers)
    for memory in (None, "auto"):
        row: dict[str, Any] = {"tokens": tokens, "memory": memory}
        try:
            captured = capture_step(
                model.build, model.batch, world=WORLD, config=config, axes={"shard": WORLD}, backend="nccl",
                options=read_options({"codegen": "inductor"} | ({} if memory is None else {"memory": memory})),
            )  # fmt: skip
        except BudgetError as error:
            yield row | {"least": error.least}
            continue
        step = captured.simulated(machine)
        yield row | {
            "gib": round(step.peak.total / 2**30, 2),
            "fits": step.peak.total < machine.memory_bytes,
            "seconds": round(step.seconds, 3),
            "kept": list(captured.kept.values()),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a sequence")
    parser.add_argument("--layers", type=int, default=QWEN["num_hidden_layers"])
    parser.add_argument("--json", type=Path, default=RESULTS / "memory.json")
    options = parser.parse_args(arguments)
    found = []
    for tokens in options.tokens:
        for row in rows(tokens, options.layers):
            print(json.dumps(row), flush=True)
            found.append(row)
    record = {"layers": options.layers, "rows": found, "published": {str(k): v for k, v in PUBLISHED.items()}}
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
