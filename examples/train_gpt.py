"""Train a byte-level GPT with Muon under ZeRO, compiled, on one process or many.

    python examples/train_gpt.py                                      # one process
    torchrun --standalone --nproc_per_node=2 examples/train_gpt.py    # two ranks: one per GPU (NCCL), or on CPU (Gloo)

The text is the source code of Python's own standard library, which every machine has; --data takes your own.
Started again with the same --out it goes on from its last checkpoint there: after a crash, or with more --steps. Who
starts it again when a rank or a node dies, torchrun, SLURM or Kubernetes, is in docs/how-to/nodes.md.
--compare trains again from the same start on the same batches, with AdamW (adamw.json), and plots both.
"""

import argparse
import json
import os
import resource
import sysconfig
import time
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import LambdaLR

import compile_muon


# The model is an ordinary nn.Module: it knows nothing of ranks, shards or Muon.
class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(F.rms_norm(t, t.shape[-1:]), cos, sin) for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, context: int, head_width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, width // head_width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        angles = torch.outer(torch.arange(context), 10000 ** (-torch.arange(0, head_width, 2) / head_width))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        cos, sin = (t[: tokens.shape[1]].to(x.dtype) for t in (self.cos, self.sin))  # weights may be bfloat16
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# The data is one long tensor of bytes; every rank and step draws windows of its own from it.
def read_text(path: Path, limit: int = 16 << 20) -> Tensor:
    kinds, skipped = {".py", ".txt", ".md", ".rst"}, {"site-packages", "test", "tests"}
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in kinds)
    kept = [file.read_bytes() for file in files if not skipped & set(file.relative_to(path).parts)]
    return torch.frombuffer(bytearray(b"\n".join(kept)[:limit] or b"\n"), dtype=torch.uint8)


def windows(text: Tensor, args: argparse.Namespace, seed: tuple[int, ...], device: torch.device) -> list[Tensor]:
    dice = torch.Generator().manual_seed(hash(seed))
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=dice)
    chunk = text[starts + torch.arange(args.context + 1)].long().to(device)
    return [chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()]


# torchrun sets RANK, LOCAL_RANK and the world's size; without it there is one process and no process group.
# A rank that waits longer than the time-out for one that is gone fails, and torchrun can start all of them again.
def start(timeout: timedelta) -> tuple[int, torch.device]:
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo", timeout=timeout)
    return int(os.environ.get("RANK", 0)), device


def every_rank(value: float) -> list[float]:
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, args: argparse.Namespace, device: torch.device) -> str:
    # Reading a sharded weight is a collective, so every rank generates, with the same dice. `.forward` is the model
    # uncompiled: the text grows by a byte at a time, and each length would be one more shape to compile.
    dice, tokens = torch.Generator(device).manual_seed(args.seed), torch.tensor([list(prompt)], device=device)
    for _ in range(args.sample_bytes):
        chances = (model.forward(tokens[:, -args.context :])[0, -1].float() / 0.7).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(chances, 1, generator=dice)[None]), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def plot(histories: dict[str, dict], path: Path) -> None:
    units = ("step", "second") if len(histories) > 1 else ("step",)
    figure = Figure(figsize=(2 + 5 * len(units), 4), layout="constrained")
    for axes, unit in zip(figure.subplots(1, len(units), sharey=True, squeeze=False)[0], units, strict=True):
        for color, (name, history) in zip(("C0", "C1"), histories.items(), strict=False):
            typical = median(history["seconds"])  # a step that compiles counts as two
            clock = list(accumulate(min(seconds, 2 * typical) for seconds in history["seconds"]))
            at = clock if unit == "second" else range(1, len(clock) + 1)
            axes.plot(at, history["train"], color, alpha=0.25)
            steps, losses = zip(*history["val"].items(), strict=True)
            axes.plot([at[step - 1] for step in steps], losses, color + "o-", label=name)
        axes.set(xlabel=unit + "s", ylabel="loss (nats per byte)", ylim=(None, 1.25 * losses[0]))
        axes.legend(title="validation (faint: training)")
    figure.suptitle("Byte-level GPT under ZeRO")
    figure.savefig(path, dpi=150)


def train(
    config: Path, out: Path, args: argparse.Namespace, texts: tuple[Tensor, Tensor], rank: int, device: torch.device
) -> dict:
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    settings = compile_muon.load_config(config)
    if args.method and settings.algorithm == "muon":
        settings = replace(settings, method=args.method)
    model, optimizer = compile_muon.initialize(GPT(args.layers, args.width, args.context).to(device), settings)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1, 2 * (1.02 - step / args.steps)))
    checkpointer = compile_muon.Checkpointer(out / "checkpoints", asynchronous=True)
    save_every = args.save_every or max(args.steps // 8, 1)
    name = {"muon": "Muon", "adamw": "AdamW"}.get(optimizer.param_groups[0]["algorithm"], args.method)
    history = {"algorithm": name, "train": [], "val": {}, "seconds": []}
    history.update(checkpointer.load(model, optimizer, scheduler=schedule) or {})
    losses, val, seconds = history["train"], history["val"], history["seconds"]

    sent, console, first = 0, Console(quiet=rank != 0), len(losses)
    if first:
        console.print(f"going on from step {first}: {out}/checkpoints")
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=rank != 0) as progress:
        bar = progress.add_task("compiling", total=args.steps, completed=first)
        for step in range(first, args.steps):
            began, sent_before = time.perf_counter(), optimizer.traffic.bytes_sent
            x, y = windows(texts[0], args, (args.seed, step, rank), device)

            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            losses.append(loss.item())  # waits for the device, so the time is the step's
            seconds.append(time.perf_counter() - began)
            sent = optimizer.traffic.bytes_sent - sent_before
            progress.update(bar, advance=1, description=f"loss {losses[-1]:.3f}")
            if (step + 1) % save_every == 0 or step + 1 == args.steps:
                with torch.no_grad():
                    here = mean(model(*windows(texts[1], args, (i, rank), device)).item() for i in range(4))
                val[step + 1] = mean(every_rank(here))
                console.print(f"step {step + 1:5}   training {mean(losses[-10:]):.3f}   validation {val[step + 1]:.3f}")
                checkpointer.save(step + 1, model, optimizer, scheduler=schedule, **history)

    checkpointer.wait()
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = every_rank(torch.cuda.max_memory_allocated() if device.type == "cuda" else resident)
    summary, pace = optimizer.summary(), median(seconds)
    table = Table("ZeRO stage | world size", f"{summary.stage} | {summary.world_size} ({device.type})")
    table.add_row("tokens per second", f"{args.batch * args.context * summary.world_size / pace:,.0f}")
    table.add_row("step time", f"{1000 * pace:,.0f} ms (the first, with compilation: {seconds[0]:.0f} s)")
    table.add_row("sent per step and rank", f"{sent:,} bytes")
    table.add_row("peak memory per rank", " | ".join(f"{peak / 2**20:,.0f} MiB" for peak in peaks))
    table.add_row("parameters by Muon | AdamW", f"{summary.muon_parameters:,} | {summary.adamw_parameters:,}")
    table.add_row("loss: training | validation", f"{mean(losses[-10:]):.3f} | {list(val.values())[-1]:.3f}")
    table.add_row("saved", f"{out}/checkpoints | {args.out}/loss.png")
    console.print(table)
    console.print(generate(model, b"def ", args, device), markup=False, highlight=False, emoji=False)
    return history


@record  # a rank's traceback ends up in torchrun's report
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=Path(__file__).parent / "config.json", help="optimizer and ZeRO stage")
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="text file or folder")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where checkpoints and the plot go")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step; default 4")
    parser.add_argument("--save-every", type=int, help="steps from checkpoint to checkpoint; default: an eighth of all")
    parser.add_argument("--method", help="of the matrices, in place of Muon: normuon, adamuon, muonh, heavy_ball")
    parser.add_argument("--compare", action="store_true", help="then AdamW from the same start; plots both")
    parser.add_argument("--timeout", type=float, default=600, help="seconds to wait for another rank; default 600")
    for name, default in dict(steps=500, context=256, layers=4, width=128, seed=0, sample_bytes=400).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=f"default {default}")
    args = parser.parse_args()

    text = read_text(args.data)
    train_text, val_text = text.tensor_split([len(text) * 9 // 10])
    if len(val_text) <= args.context:
        parser.error(f"--data {args.data}: {len(text)} bytes of text are too few for --context {args.context}")

    rank, device = start(timedelta(seconds=args.timeout))
    trainings, histories = {args.config: args.out}, {}
    if args.compare:
        trainings[Path(__file__).parent / "adamw.json"] = args.out / "adamw"
    for config, out in trainings.items():
        history = train(config, out, args, (train_text, val_text), rank, device)
        histories[history["algorithm"]] = history
    if rank == 0:
        plot(histories, args.out / "loss.png")
        (args.out / "losses.json").write_text(json.dumps(histories))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
