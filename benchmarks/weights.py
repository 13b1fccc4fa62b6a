"""Peak memory of saving and loading whole weights of a sharded model, per rank, beyond the rank's own tensors.

    torchrun --nproc-per-node 2 benchmarks/weights.py [--width 2048] [--layers 24] [--stage 3] [--folder DIR]

The model is built on the meta device and initialized shard by shard; then, unless --init-only, weights are saved and
loaded. Prints for each operation and rank the rise of the resident set to its peak (VmHWM, reset through
/proc/self/clear_refs), in MiB and in units of the model's largest tensor; for the initialization without the bytes of
the rank's shards and optimizer state. Mapped pages of a file that is read count.
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
from compile_muon.engine.dtensors import local_tensor


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def measured(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float, float]:
    """Call ``function``; return its value, the rise of the resident set to its peak in MiB, and seconds."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    value = function(*args, **kwargs)
    return value, _status("VmHWM") - before, time.perf_counter() - start


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--init-only", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    with torch.device("meta"):
        blocks = [nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
        model = nn.Sequential(nn.Embedding(8 * args.width, args.width), *blocks)
    sizes = [p.numel() * p.element_size() / 2**20 for p in model.parameters()]
    optimizer, rise, seconds = measured(compile_muon.MuonZero, model, stage=args.stage, init=_init)
    states = [tensor for slots in optimizer.state.values() for tensor in slots.values()]
    local_tensors = [local_tensor(tensor) for tensor in (*model.parameters(), *states)]
    held_size = sum(tensor.numel() * tensor.element_size() for tensor in local_tensors) / 2**20
    rows = [("MuonZero(init=...)", rise - held_size, seconds)]
    with tempfile.TemporaryDirectory(dir=args.folder) as own_folder:
        folder = [own_folder]  # rank 0's, for all ranks
        dist.broadcast_object_list(folder)
        state: dict[str, Any] = {}
        for name, arguments in (
            () if args.init_only
            else (("full_state_dict", []), ("save_pretrained", folder), ("load_pretrained", folder))
        ):  # fmt: skip
            value, rise, seconds = measured(getattr(compile_muon, name), model, *arguments)
            rows.append((name, rise, seconds))
            if name == "full_state_dict":
                state = value
        if not args.init_only:
            _, rise, seconds = measured(compile_muon.load_full_state_dict, model, state)
            rows.append(("load_full_state_dict", rise, seconds))
        rows_of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows_of_ranks, rows)
        del state
        if dist.get_rank() == 0:
            print(
                f"{sum(sizes):.0f} MiB of weights, largest tensor {max(sizes):.0f} MiB, stage {args.stage}; "
                f"rank 0 holds {held_size:.0f} MiB of shards and optimizer state"
            )
            for i, (name, _, _) in enumerate(rows):
                for rank, rank_rows in enumerate(rows_of_ranks):
                    rise, seconds = rank_rows[i][1:]
                    units = rise / max(sizes)
                    print(f"{name:22} rank {rank}: +{rise:6.0f} MiB = {units:5.2f} tensors, {seconds:.1f} s")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
