"""Runs one trial as freshly started rank processes, and folds what the ranks measured into one record."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import RETURN_MEMORY

_WORKER = Path(__file__).with_name("worker.py")
_LOG_LINES = 25


@dataclass(frozen=True)
class Trial:
    """One contender at one stage, once. The ranks read it as JSON."""

    contender: str
    stage: int
    repeat: int
    ranks: int
    preset: str
    micro_batches: int
    dtype: str
    warmup: int
    steps: int
    device: str
    backend: str
    ns_method: str
    ns_dtype: str
    weigh: bool
    timeout_s: int


def run(trial: Trial, folder: Path, inductor_cache: Path, threads: int) -> dict:
    """Start the ranks, wait, and return the folded record; `error` holds the log's end if a rank failed."""
    folder.mkdir(parents=True)
    specification = folder / "trial.json"
    specification.write_text(json.dumps(asdict(trial)))
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(trial.ranks),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(inductor_cache),
        "PYTHONUNBUFFERED": "1",
    }
    if trial.weigh:
        environment |= RETURN_MEMORY
    if trial.backend == "gloo" and sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = []
    for rank in range(trial.ranks):
        with open(folder / f"rank{rank}.log", "w") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(_WORKER), str(specification), str(rank)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
    failure = _wait(ranks, trial.timeout_s)
    record = {"contender": trial.contender, "stage": trial.stage, "repeat": trial.repeat, "error": None}
    if failure is not None:
        rank, reason = failure
        lines = (folder / f"rank{rank}.log").read_text(errors="replace").splitlines()
        return record | {"error": reason, "log": lines[-_LOG_LINES:]}
    return record | _fold([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(trial.ranks)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(ranks: list[subprocess.Popen], timeout_s: int) -> tuple[int, str] | None:
    """None when all ranks ended well; otherwise the first to fail and why, with the others stopped."""
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            codes = [process.poll() for process in ranks]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    return rank, f"rank {rank} ended with status {code}"
            if None not in codes:
                return None
            if time.monotonic() > deadline:
                return codes.index(None), f"no end within {timeout_s} s"
            time.sleep(0.2)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _fold(ranks: list[dict]) -> dict:
    """A step lasts as long as its slowest rank; memory is the largest rank's; bytes and loss are rank means."""
    first = ranks[0]

    def largest(key: str) -> int | float | None:
        values = [rank[key] for rank in ranks]
        return None if None in values else max(values)

    def mean(key: str) -> float | None:
        values = [rank[key] for rank in ranks]
        return None if None in values else statistics.fmean(values)

    def per_step(key: str, fold: Callable[[tuple[float, ...]], float]) -> list[float]:
        return [fold(values) for values in zip(*(rank[key] for rank in ranks), strict=True)]

    return {
        "setup_s": largest("setup_s"),
        "first_step_s": largest("first_step_s"),
        "warmup_s": per_step("warmup_s", max),
        "step_s": per_step("step_s", max),
        "cpu_s": per_step("cpu_s", statistics.fmean),
        "losses": per_step("losses", statistics.fmean),
        "load": first["load"],
        "peak_bytes": largest("peak_bytes"),
        "socket_bytes_per_step": mean("socket_bytes_per_step"),
        "counted_bytes_per_step": mean("counted_bytes_per_step"),
        "muon_matrices": first["muon_matrices"],
        "parameters": first["parameters"],
        "note": first["note"],
    }
