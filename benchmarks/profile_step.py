"""Which NVTX ranges a training step pushes, and which kernels it launches: `"compile": {"nvtx": true}` on a small GPT.

    python benchmarks/profile_step.py --json profile.json
    nsys profile --trace cuda,nvtx python benchmarks/profile_step.py     # the timeline itself

torch.profiler does not see NVTX ranges, so each is mirrored as one of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch
from gpt import GPT, PRESETS, read_corpus, sample_batch

import compile_muon


class Mirror:
    """torch.cuda.nvtx.range_push and range_pop, with a profiler range for each; `names` counts what was pushed."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self._open: list[torch.profiler.record_function] = []
        self._push, self._pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = self.push, self.pop

    def push(self, name: str) -> int:
        self.names[name] += 1
        self._open.append(torch.profiler.record_function(name))
        self._open[-1].__enter__()
        return self._push(name)

    def pop(self) -> int:
        self._open.pop().__exit__(None, None, None)
        return self._pop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="full", choices=list(PRESETS))
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="a Chrome trace")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    config = {
        "compile": {"nvtx": True},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": True},
    }
    mirror, shape = Mirror(), PRESETS[options.preset]
    model, optimizer = compile_muon.initialize(GPT(shape).cuda(), config)
    corpus, generator = read_corpus(), torch.Generator().manual_seed(0)

    def step() -> None:
        x, y = sample_batch(corpus, shape, generator)
        model(x.cuda(), y.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    for _ in range(3):
        step()
    mirror.names.clear()
    with torch.profiler.profile() as profile:
        step()
    ranges = dict(mirror.names)
    averages = profile.key_averages()
    kernels = {e.key: e.self_device_time_total for e in averages if e.self_device_time_total and e.key not in ranges}
    longest = sorted(kernels.items(), key=lambda kernel: -kernel[1])[:30]
    print(f"{sum(ranges.values())} ranges of {len(ranges)} names in one step:")
    for name, count in ranges.items():
        print(f"  {count} × {name}")
    print("kernels, µs on the device:")
    for name, microseconds in longest:
        print(f"  {microseconds:10.0f}  {name[:120]}")
    if options.json:
        options.json.write_text(json.dumps({"ranges": ranges, "kernels_us": dict(longest)}, indent=1) + "\n")
    if options.trace:
        profile.export_chrome_trace(str(options.trace))
    if not ranges:
        print("no range was pushed: nvtx has no effect")
    return 0 if ranges else 1


if __name__ == "__main__":
    sys.exit(main())
