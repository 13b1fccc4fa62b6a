"""One rank of one trial, in a process of its own: `python worker.py TRIAL.json PIPE`.

It builds the contender, then executes the commands of the pipe (a file descriptor) until the pipe is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Plan
from gpt import fresh, muon_names, read_corpus, sample_batch, shape_of
from measure import disk_bytes, peak_bytes, socket_bytes_sent


def choose_device(kind: str, rank: int) -> torch.device:
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


class Rank:
    """A contender, built and ready to step."""

    def __init__(self, trial: dict, rank: int):
        self._shape = shape_of(trial["preset"], trial.get("layers"))
        self._device = choose_device(trial["device"], rank)
        self._micro_batches = trial["micro_batches"]
        torch.manual_seed(0)  # the same initial weights on every rank and for every contender
        model = fresh(self._shape, self._device)
        self._parameters = sum(p.numel() for p in model.parameters())
        expected = len(muon_names(model))
        plan = Plan.of(trial, self._shape.batch, self._device)
        start = time.perf_counter()
        self._session = CONTENDERS[trial["contender"]].build(model, plan)
        self._setup_s = time.perf_counter() - start
        matrices = self._session.muon_matrices
        if "muon" in trial["contender"] and matrices != expected:
            raise RuntimeError(f"{trial['contender']} gave Muon {matrices} matrices, expected {expected}")
        self._corpus = read_corpus()
        self._generator = torch.Generator().manual_seed(1 + rank)
        self._steps = 0

    def turn(self) -> dict:
        """Train an untimed step, then a timed one right after it, as in training."""
        batch = self._batch()
        # The timed step waits for transfers that this one leaves in flight. Those of the last turn would have ended
        # while others had theirs, over another link, or under a barrier.
        self.step()
        return self._timed(batch)

    def step(self) -> dict:
        """Train one step; return wall seconds, CPU seconds of this process (all threads), loss, and totals so far."""
        batch = self._batch()
        dist.barrier()
        return self._timed(batch)

    def _batch(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Draw the micro-batches of the next step, outside any step's time."""
        x, y = (tensor.to(self._device) for tensor in sample_batch(self._corpus, self._shape, self._generator))
        return list(zip(x.chunk(self._micro_batches), y.chunk(self._micro_batches), strict=True))

    def _timed(self, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> dict:
        wall, cpu = time.perf_counter(), time.process_time()
        loss = self._session.step(batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        count = self._session.counted_bytes
        self._steps += 1
        return {
            "steps": self._steps,
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "loss": float(loss),
            # Only Gloo's traffic goes through sockets; NCCL's goes through NVLink or PCIe.
            "socket_bytes": socket_bytes_sent() if dist.get_backend() == "gloo" else None,
            "counted_bytes": count() if count else None,
            "disk_bytes": disk_bytes(),
        }

    def weigh(self) -> int:
        """Return the peak memory of one more step, in bytes."""
        return peak_bytes(self.step, self._device)

    def describe(self) -> dict:
        return {
            "setup_s": self._setup_s,
            "muon_matrices": self._session.muon_matrices,
            "parameters": self._parameters,
            "note": self._session.note,
        }


def main() -> None:
    trial, channel = json.loads(Path(sys.argv[1]).read_text()), Connection(int(sys.argv[2]))
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        trial["backend"], rank=rank, world_size=trial["ranks"], timeout=timedelta(seconds=trial["timeout_s"])
    )
    try:
        built = Rank(trial, rank)
        commands = {"step": built.step, "turn": built.turn, "weigh": built.weigh, "describe": built.describe}
        with contextlib.suppress(EOFError):  # the pipe was closed: this trial is over
            while True:
                channel.send(commands[channel.recv()]())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
