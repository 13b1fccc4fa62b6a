"""The rank processes of one trial: they step on command, and their answers become one record."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from measure import RETURN_MEMORY

_WORKER = Path(__file__).with_name("worker.py")
_LOG_LINES = 25


@dataclass(frozen=True)
class Trial:
    """One contender at one stage, once. The ranks read it as JSON."""

    contender: str
    stage: int
    heat: int  # first stage of the contenders that take turns with it: its own, if stages are timed one by one
    repeat: int
    ranks: int
    preset: str
    micro_batches: int
    dtype: str
    device: str
    backend: str
    ns_method: str
    ns_dtype: str
    reshard_after_forward: bool
    weigh: bool
    timeout_s: int
    package: str | None = None  # folder with another version of compile_muon than the installed one
    layers: int | None = None  # in place of the preset's
    offload: dict[str, Any] | None = None  # `offload_optimizer` of compile_muon and DeepSpeed


class RankFailed(RuntimeError):
    """A rank ended or fell silent; `log` holds its last lines."""

    def __init__(self, reason: str, log: list[str]):
        super().__init__(reason)
        self.log = log


class Ranks:
    """The processes of one trial, blocked on a pipe between commands. A context manager that ends all of them."""

    def __init__(self, trial: Trial, folder: Path, inductor_cache: Path, threads: int):
        self.trial = trial
        self._folder = folder
        self._steps: list[list[dict]] = []  # for each step the answers of all ranks
        folder.mkdir(parents=True)  # takes the ranks' logs; must be new
        specification = folder / "trial.json"
        specification.write_text(json.dumps(asdict(trial)))
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(trial.ranks),
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": str(inductor_cache),  # kept for the trials of later repeats
            "PYTHONUNBUFFERED": "1",
        }
        if trial.package:
            environment["PYTHONPATH"] = trial.package
        if trial.weigh:
            environment |= RETURN_MEMORY
        if trial.backend == "gloo" and sys.platform.startswith("linux"):
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        self._processes: list[subprocess.Popen] = []
        self._channels: list[Connection] = []
        for rank in range(trial.ranks):
            own_end, worker_end = Pipe()
            with open(self._log(rank), "w") as log, worker_end:
                self._channels.append(own_end)
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, str(_WORKER), str(specification), str(worker_end.fileno())],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=[worker_end.fileno()],
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
                )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(grace_s=0 if exception[0] else 30)

    def close(self, grace_s: float) -> None:
        """Close the pipes, which ends ranks that wait for a command, and kill the others after `grace_s` seconds."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, command: str) -> list[Any]:
        """Return every rank's answer; RankFailed if a rank ends, or does not answer within the trial's timeout."""
        deadline = time.monotonic() + self.trial.timeout_s
        pending: dict[Any, int] = {channel: rank for rank, channel in enumerate(self._channels)}
        answers: dict[int, Any] = {}
        rank = 0  # last one sent to, heard of, or found silent
        try:
            for rank in range(len(self._channels)):
                self._channels[rank].send(command)
            while pending:
                ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
                if not ready:
                    rank = min(pending.values())
                    raise RankFailed(f"no answer to {command!r} within {self.trial.timeout_s} s", self._tail(rank))
                for channel in ready:
                    rank = pending.pop(channel)
                    answers[rank] = self._channels[rank].recv()
        except (EOFError, OSError):  # OSError: a broken or reset pipe
            status = self._processes[rank].wait()
            raise RankFailed(f"rank {rank} ended with status {status}", self._tail(rank)) from None
        return [answers[rank] for rank in range(len(self._channels))]

    def step(self) -> float:
        """Run one step of all ranks; return the slowest rank's seconds."""
        return self._timed("step")

    def turn(self) -> float:
        """Run two steps of all ranks; return the seconds of the second, as :meth:`step` does."""
        return self._timed("turn")

    def _timed(self, command: str) -> float:
        self._steps.append(self.ask(command))
        return max(answer["wall_s"] for answer in self._steps[-1])

    def record(self, warmup: int) -> dict:
        """Combine the ranks' measurements of all steps but the first `warmup`."""
        built = self.ask("describe")
        peaks = self.ask("weigh") if self.trial.weigh else [None]
        # Times are the slowest rank's, memory is the largest rank's; bytes, CPU time and loss are means.
        wall = [max(answer["wall_s"] for answer in answers) for answers in self._steps]
        cpu = [statistics.fmean(answer["cpu_s"] for answer in answers) for answers in self._steps]
        return record_of(self.trial) | {
            "setup_s": max(rank["setup_s"] for rank in built),
            "first_step_s": wall[0],
            "warmup_s": wall[:warmup],
            "step_s": wall[warmup:],
            "cpu_s": cpu[warmup:],
            "losses": [statistics.fmean(answer["loss"] for answer in answers) for answers in self._steps],
            "peak_bytes": max(peaks),
            "socket_bytes_per_step": self._per_step("socket_bytes", warmup),
            "counted_bytes_per_step": self._per_step("counted_bytes", warmup),
            "disk_bytes_per_step": self._per_step("disk_bytes", warmup),
            **{key: built[0][key] for key in ("muon_matrices", "parameters", "note")},
        }

    def _per_step(self, key: str, warmup: int) -> float | None:
        """Return the mean growth of a counter in a step after the warm-up, over ranks; None if a rank cannot count."""
        first, last = self._steps[warmup - 1], self._steps[-1]
        if any(answer[key] is None for answer in (*first, *last)):
            return None
        return statistics.fmean((b[key] - a[key]) / (b["steps"] - a["steps"]) for a, b in zip(first, last, strict=True))

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _tail(self, rank: int) -> list[str]:
        return self._log(rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]


def record_of(trial: Trial) -> dict:
    """Begin the record of a trial, without an error."""
    return {key: getattr(trial, key) for key in ("contender", "stage", "heat", "repeat")} | {"error": None}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
