"""Count the kernels that Newton–Schulz of one training step launches, call by call, as a compiled step makes them.

    python benchmarks/call_launches.py                                  # the 1.01 G model of train_step.py: 3 minutes
    python benchmarks/call_launches.py --set ns_dtype=bfloat16 ns_memory_limit=1073741824
    python benchmarks/call_launches.py --preset small                   # seconds, to see that it works

Needs Triton and no GPU: the step is traced on fake tensors for one rank at stage 0 in bfloat16 on an H100, and the
launches of each call in its graphs, for 132 multiprocessors, are recorded instead of run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import torch
from gpt import GPT, PRESETS
from torch._subclasses import FakeTensorMode
from torch.fx import Node

from compile_muon.config import FrameOptions, load_config
from compile_muon.kernels.gpu.grouped import orthogonalize_list
from compile_muon.kernels.gpu.launch import noting
from compile_muon.kernels.gpu.newton_schulz import Products
from compile_muon.kernels.gpu.tiles import load_tables
from compile_muon.kernels.ops import plan_of
from compile_muon.passes.pipeline import tensor_value
from compile_muon.planning import capture_step
from compile_muon.planning.candidates import planned_for
from compile_muon.simulate.machine import load_machine

NORMALIZATION = ("partial_norms_kernel", "divide_kernel")


def calls_of(preset: str, settings: dict[str, str | int], bucket_bytes: int) -> list[Node]:
    """Trace a step of this preset, and return its ``muon_zero::newton_schulz`` calls."""
    shape, machine = PRESETS[preset], load_machine("h100")
    params = {"muon_lr": 0.02, "adam_lr": 3e-4, **settings}
    config = load_config(
        {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "optimizer": {"params": params}}
    )

    def model() -> GPT:
        with FakeTensorMode():
            return GPT(shape)

    tokens = torch.zeros(shape.batch, shape.context, dtype=torch.long)
    options = FrameOptions(codegen="inductor", bucket_bytes=bucket_bytes)
    step = capture_step(
        model, (tokens, tokens), world=1, rank=0, config=planned_for(config, machine, "h100"), options=options
    )
    op = torch.ops.muon_zero.newton_schulz.default
    return [node for played in step.graphs for node in played.gm.graph.find_nodes(op="call_function", target=op)]


def launches(call: Node) -> Counter[str]:
    """Count the launches of one call, by kernel."""
    xs, *settings = call.args
    plan = replace(plan_of(tuple(settings)), backend="triton")
    values = [torch.empty(tensor_value(x).shape, dtype=tensor_value(x).dtype) for x in xs]
    with noting(torch.device("cpu")) as recorded:
        norms = [value.new_empty(value.shape[:-1], dtype=torch.float32) for value in values] if settings[-1] else []
        orthogonalize_list(values, plan, Products(load_tables()["sm_90"], 132), norms)
    return Counter(launch.kernel.fn.__name__ for launch in recorded)


def setting(text: str) -> tuple[str, str | int]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdigit() else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="1b", choices=list(PRESETS))
    parser.add_argument(
        "--bucket-bytes", type=int, default=FrameOptions().bucket_bytes, help="of torch.compile's options"
    )
    parser.add_argument("--set", nargs="*", type=setting, default=[], metavar="NAME=VALUE", help="of optimizer.params")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for call in calls_of(options.preset, dict(options.set), options.bucket_bytes):
        counts = launches(call)
        products = sum(count for name, count in counts.items() if name not in NORMALIZATION)
        print(
            f"{len(call.args[0])} tensors, {call.args[2]} in {call.args[3]}, restarts {call.args[6]}, "
            f"{call.args[8] / 2**30:.2f} GiB: {products} products"
        )
        total += counts
    of_norms = sum(total[name] for name in NORMALIZATION)
    print(f"{total.total() - of_norms} launches of products, {of_norms} of normalization: {dict(total)}")


if __name__ == "__main__":
    main()
