"""Peak memory of weights going in and out of a sharded model, per rank, beside what the rank holds anyway.

    torchrun --nproc-per-node 2 benchmarks/weights.py [--width 2048] [--layers 24] [--stage 3] [--folder DIR]

Prints, for each function, how far the resident set rose above where it stood before (VmHWM, reset through
/proc/self/clear_refs), in MiB and in units of the model's largest tensor. Mapped pages of the file being read count.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import compile_muon


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def measured(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float, float]:
    """The value, MiB by which the resident set rose at most, and seconds."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    value = function(*args, **kwargs)
    return value, _status("VmHWM") - before, time.perf_counter() - start


def main() -> None:
    """Measure and print, on rank 0 for all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--folder")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    torch.manual_seed(0)
    blocks = [nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
    model = nn.Sequential(nn.Embedding(8 * args.width, args.width), *blocks)
    sizes = [p.numel() * p.element_size() / 2**20 for p in model.parameters()]
    compile_muon.MuonZero(model, stage=args.stage)
    with tempfile.TemporaryDirectory(dir=args.folder) as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        rows = []
        for name, arguments in (
            ("full_state_dict", []), ("save_pretrained", folder), ("load_pretrained", folder),
        ):  # fmt: skip
            value, rise, seconds = measured(getattr(compile_muon, name), model, *arguments)
            rows.append((name, rise, seconds))
            if name == "full_state_dict":
                state = value
        _, rise, seconds = measured(compile_muon.load_full_state_dict, model, state)
        rows.append(("load_full_state_dict", rise, seconds))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, rows)
        if dist.get_rank() == 0:
            print(f"{sum(sizes):.0f} MiB of weights, largest tensor {max(sizes):.0f} MiB, stage {args.stage}")
            for i, (name, _, _) in enumerate(rows):
                for rank, found in enumerate(everyone):
                    rise, seconds = found[i][1:]
                    units = rise / max(sizes)
                    print(f"{name:22} rank {rank}: +{rise:6.0f} MiB = {units:5.2f} tensors, {seconds:.1f} s")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
