"""Train on sequences that two ranks share: each has half of the positions, and half of the memory for them.

    torchrun --standalone --nproc_per_node=2 examples/train_long.py --context 4096

The model, the data and everything about ranks is train_gpt.py's; what is new is three lines, marked with an arrow.
"""

import argparse
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from train_gpt import GPT, read_text, start, windows

import compile_muon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="text file or folder")
    for name, default in dict(steps=50, context=4096, batch=1, layers=4, width=128, stage=3, share=2).items():
        parser.add_argument("--" + name, type=int, default=default, help=f"default {default}")
    args = parser.parse_args()

    _, device = start(timedelta(seconds=600))
    text = read_text(args.data)
    torch.manual_seed(0)
    config = {
        "compile": True,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.01}},
        "zero_optimization": {"stage": args.stage},
        "sequence_parallel": {"size": args.share, "blocks": ["blocks"]},  # <-
    }
    model, optimizer = compile_muon.initialize(GPT(args.layers, args.width, args.context).to(device), config)

    # Once: what the ranks compute of their positions is what each would compute of all.
    first = windows(text, args, (-1, optimizer.data_place.rank), device)
    error = compile_muon.check_sequence(model, first[0][:, :512])  # <-
    losses = []
    for step in range(args.steps):
        began = time.perf_counter()
        x, y = windows(text, args, (step, optimizer.data_place.rank), device)  # <- the same on ranks that share it
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step + 1:4}   loss {mean(losses[-10:]):.3f}   {seconds:.2f} s a step", flush=True)
    if dist.get_rank() == 0:
        sent = optimizer.totals()["bytes_sent"] / args.steps
        print(f"difference from one rank {error:.1e}; {sent:,.0f} bytes sent a step and rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
