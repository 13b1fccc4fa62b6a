"""The cost of optimizer state on a slow disk, beside resident state, and beside reading and writing around the step.

    python benchmarks/offload.py                     one process, a disk that takes 0.8 of a step's compute
    python benchmarks/offload.py --share 0.4         a disk twice as fast

The disk is limited by sleeping for each byte, one request after the other, which takes no core. Its rate is chosen so
that all reads and writes of a step take --share of a resident step. The three runs take turns of a few steps, of which
the first does not count, because its state was read while the others ran.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, PRESETS, read_corpus, sample_batch
from rich.console import Console
from rich.table import Table

import compile_muon
from compile_muon.offload import store as disk

_RESULTS = Path(__file__).parent / "results"
_TURN = 4  # steps


class Slow:
    """A limit on the disk: all calls together move at most `rate` bytes a second."""

    lock = threading.Lock()
    rate = float("inf")

    @classmethod
    def down(cls, call: Callable[..., int]) -> Callable[..., int]:
        """Slow down ``os.preadv`` or ``os.pwritev``, by which the store reads and writes."""

        def slowed(file: int, memories: Sequence[Any], place: int) -> int:
            with cls.lock:
                start = time.perf_counter()
                nbytes = call(file, memories, place)
                time.sleep(max(nbytes / cls.rate - (time.perf_counter() - start), 0))
            return nbytes

        return slowed


class Run:
    """The model in training, with its state resident, offloaded, or read and written around each step."""

    def __init__(self, args: argparse.Namespace, folder: str | None, *, around: bool = False) -> None:
        torch.manual_seed(0)
        settings = {} if folder is None or around else {"offload": {"device": "nvme", "nvme_path": folder}}
        if settings:
            settings["offload"] |= {"buffer_bytes": args.buffer_bytes, "buffer_count": args.buffer_count}
        model = GPT(PRESETS[args.preset])
        self.optimizer = compile_muon.MuonZero(model, stage=2, update=args.update, **settings)
        self.model = torch.compile(model, backend="muon_zero", options={"codegen": args.codegen})
        self.buckets = self._buckets() if around else []
        self.store = disk.FileStore(folder, self.buckets, buffers=2) if around and folder is not None else None
        self.generator, self.corpus, self.shape = torch.Generator().manual_seed(1), read_corpus(), PRESETS[args.preset]
        self.seconds: list[float] = []

    def _buckets(self) -> list[disk.Bucket]:
        """Make a bucket of the states of each parameter."""
        return [
            disk.Bucket([disk.Slot("", tuple(x.shape), x.dtype) for x in slots.values() if x.ndim])
            for slots in self.optimizer.state.values()
        ]

    def turn(self) -> None:
        """Train a turn of steps, and forget the time of the first."""
        for _ in range(_TURN):
            self.step()
        del self.seconds[-_TURN]

    def step(self) -> None:
        batch = sample_batch(self.corpus, self.shape, self.generator)
        start = time.perf_counter()
        self.model(*batch).backward()
        if self.store is not None:  # read everything, step, write everything
            for bucket in self.buckets:
                self.store.open(bucket)
                self.store.leave(bucket)
        self.optimizer.step()
        if self.store is not None:
            for bucket in self.buckets:
                self.store.open(bucket, read=False)
                self.store.close(bucket)
            self.store.finish()
            self.store.commit(self.buckets)
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--share", type=float, default=0.8, help="of a resident step that the disk takes; default 0.8")
    parser.add_argument("--steps", type=int, default=12, help="steps of each that count; default 12")
    parser.add_argument("--update", default="backward", help="when directions are made; default backward")
    parser.add_argument("--codegen", default="inductor")
    parser.add_argument("--buffer-bytes", type=int, default=4 << 20)
    parser.add_argument("--buffer-count", type=int, default=4)
    parser.add_argument("--json", type=Path, default=_RESULTS / "offload.json")
    args = parser.parse_args()
    for name in ("preadv", "pwritev"):
        setattr(os, name, Slow.down(getattr(os, name)))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        runs = {
            "resident": Run(args, None),
            "offloaded": Run(args, folder),
            "around the step": Run(args, folder, around=True),
        }
        for run in runs.values():
            for _ in range(3):  # compiles, and learns in which order states are fetched
                run.step()
            run.seconds.clear()
        before = _bytes(runs["offloaded"])
        for _ in range(2):
            runs["resident"].turn()
            runs["offloaded"].turn()
        moved = (_bytes(runs["offloaded"]) - before) / (2 * _TURN)
        resident = statistics.median(runs["resident"].seconds)
        Slow.rate = moved / (args.share * resident)
        for run in runs.values():
            run.seconds.clear()
        for _ in range(math.ceil(args.steps / (_TURN - 1))):
            for run in runs.values():
                run.turn()
        weights_equal = all(
            torch.equal(a, b)
            for a, b in zip(runs["resident"].model.parameters(), runs["offloaded"].model.parameters(), strict=True)
        )
    seconds = {name: statistics.median(run.seconds) for name, run in runs.items()}
    table = Table("run", "s a step", "of resident", title=f"{moved / 1e6:.0f} MB a step at {Slow.rate / 1e6:.0f} MB/s")
    for name, median in seconds.items():
        table.add_row(name, f"{median:.3f}", f"{median / seconds['resident']:.3f}")
    Console().print(table)
    print("weights are the same to the bit" if weights_equal else "WEIGHTS DIFFER")
    result = {
        "command": f"python {shlex.join(sys.argv)}",
        "torch": torch.__version__,
        "preset": args.preset,
        "share": args.share,
        "bytes_a_step": moved,
        "bytes_a_second": Slow.rate,
        "of_resident": {name: median / seconds["resident"] for name, median in seconds.items()},
        "same_weights": weights_equal,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def _bytes(run: Run) -> int:
    totals = run.optimizer.totals()
    return int(totals["disk_bytes_read"] + totals["disk_bytes_written"])


if __name__ == "__main__":
    main()
