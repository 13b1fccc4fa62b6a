"""A step with sequence parallelism: ours, over heads and around a ring, beside DeepSpeed's Ulysses, in turns.

    python benchmarks/sequence.py                                          two ranks
    ../shared/tools/slow_link 1600mbit python benchmarks/sequence.py       with a link of that rate

All train one model on one batch. DeepSpeed's ranks get their parts and positions from this script, and its blocks call
``DistributedAttention``, eagerly; compile_muon's ranks get the whole batch and the names of the blocks. Contenders take
turns, a step each. PyTorch's ``context_parallel`` is missing, because it has no kernel for CPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Plan, deepspeed_muon, ours
from gpt import GPT, PRESETS, Block, Shape, muon_names, read_corpus, sample_batch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

_RESULTS = Path(__file__).parent / "results"
Step = Callable[[Tensor, Tensor], Tensor]


def plan_of(shape: Shape, stage: int) -> Plan:
    """Make the plan of all contenders, with Newton-Schulz in bfloat16, DeepSpeed's only dtype."""
    return Plan(stage, dist.get_world_size(), 1, shape.batch, torch.device("cpu"), torch.float32, ns_dtype="bfloat16")


def over_ranks(shape: Shape, stage: int, attention: str) -> Step:
    """Build compile_muon's contender, with ``attention`` over "heads" or around a "ring"."""
    shared = {"size": dist.get_world_size(), "blocks": ["blocks"], "attention": attention, "check": False}
    session = ours(GPT(shape), plan_of(shape, stage), "Muon", sequence_parallel=shared)
    return lambda x, y: session.step([(x, y)])


class UlyssesBlock(Block):
    """A block with attention by DeepSpeed's ``DistributedAttention``, for a rank's positions."""

    exchanged: Any = None

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = (part.contiguous() for part in qkv.unbind(2))
        attended = self.exchanged(q, k, v, batch_dim_idx=0)
        x = x + self.out(attended.reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


def _whole(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Attend over whole sequences, ``[batch, positions, heads, size]``."""
    by_head = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)


class UlyssesGPT(GPT):
    """The model of a rank whose batch is its part of the positions."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(self.position_embed.num_embeddings).chunk(dist.get_world_size())[dist.get_rank()]
        x = self.token_embed(tokens) + self.position_embed(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ulysses(shape: Shape, stage: int) -> Step:
    """Build DeepSpeed's contender: its engine, its Muon, its sequence parallelism."""
    model, world, rank = UlyssesGPT(shape), dist.get_world_size(), dist.get_rank()
    session = deepspeed_muon(model, plan_of(shape, stage))
    from deepspeed.sequence.layer import DistributedAttention

    exchanged = DistributedAttention(_whole, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    for block in model.blocks:
        block.__class__ = UlyssesBlock
        object.__setattr__(block, "exchanged", exchanged)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = session.step([(x.chunk(world, 1)[rank].contiguous(), y.chunk(world, 1)[rank].contiguous())])
        dist.all_reduce(loss)
        return loss / world

    return step


def contenders(names: list[str]) -> dict[str, Callable[[Shape], Step]]:
    """Return the builders by name: all, or those whose name contains one of ``names``."""
    builders: dict[str, Callable[[Shape], Step]] = {}
    for stage in (1, 2, 3):
        for attention in ("heads", "ring"):
            builders[f"ours, {attention}, stage {stage}"] = lambda shape, s=stage, a=attention: over_ranks(shape, s, a)
        if importlib.util.find_spec("deepspeed") is not None:
            builders[f"DeepSpeed Ulysses, stage {stage}"] = lambda shape, s=stage: ulysses(shape, s)
    return {name: build for name, build in builders.items() if not names or any(part in name for part in names)}


def rank_of(rank: int, args: argparse.Namespace, address: str, out: str) -> None:
    """Build all contenders on one rank, and step them in turns; rank 0 writes the result to ``out``."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=args.ranks)
    shape = replace(PRESETS[args.preset], context=args.context, batch=args.batch)
    steps: dict[str, Step] = {}
    for name, build in contenders(args.only).items():
        torch.manual_seed(0)
        steps[name] = build(shape)
    corpus, generator = read_corpus(), torch.Generator().manual_seed(1)  # the same batch for all ranks
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.warm + args.rounds):
        x, y = sample_batch(corpus, shape, generator)
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            loss = float(step(x, y))
            dist.barrier()
            losses[name].append(loss)
            if number >= args.warm:
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        results = {
            name: {"seconds": statistics.median(seconds[name]), "least": min(seconds[name]), "losses": losses[name]}
            for name in steps
        }
        muon = len(muon_names(GPT(shape)))
        Path(out).write_text(json.dumps({"shape": vars(shape), "muon_matrices": muon, "contenders": results}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=sorted(PRESETS))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm", type=int, default=3, help="rounds that are not counted")
    parser.add_argument("--only", nargs="*", default=[], help="parts of contenders' names")
    parser.add_argument("--json", type=Path, default=_RESULTS / "sequence.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        torch.multiprocessing.spawn(rank_of, (args, f"file://{folder}/store", out), args.ranks)
        result = json.loads(Path(out).read_text())
    table = Table(title=f"{args.ranks} ranks, sequences of {args.context}")
    for column in ("contender", "step ms, median", "least", "first loss", "last loss"):
        table.add_column(column)
    for name, row in result["contenders"].items():
        losses = row["losses"]
        times = (f"{row[kind] * 1e3:.0f}" for kind in ("seconds", "least"))
        table.add_row(name, *times, f"{losses[0]:.4f}", f"{losses[-1]:.4f}")
    Console(width=110).print(table)
    args.json.write_text(json.dumps({"command": shlex.join(sys.argv), "ranks": args.ranks, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
