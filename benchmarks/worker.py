"""One rank of one trial, in a process of its own: `python worker.py TRIAL.json RANK`."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Plan, Session
from gpt import GPT, PRESETS, muon_names, read_corpus, sample_batch
from measure import peak_bytes, socket_bytes_sent


def choose_device(kind: str, rank: int) -> torch.device:
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def run_trial(trial: dict, rank: int) -> dict:
    """Build, warm up, time, then weigh; returns this rank's samples."""
    shape = PRESETS[trial["preset"]]
    device = choose_device(trial["device"], rank)
    torch.manual_seed(0)  # the same initial weights on every rank and for every contender
    model = GPT(shape).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    expected = len(muon_names(model))
    micro_batches = trial["micro_batches"]
    plan = Plan(
        stage=trial["stage"],
        ranks=trial["ranks"],
        micro_batches=micro_batches,
        sequences=shape.batch // micro_batches,
        device=device,
        dtype=getattr(torch, trial["dtype"]),
        ns_method=trial["ns_method"],
        ns_dtype=trial["ns_dtype"],
    )

    started = time.perf_counter()
    session = CONTENDERS[trial["contender"]].build(model, plan)
    setup_s = time.perf_counter() - started
    if "muon" in trial["contender"] and session.muon_matrices != expected:
        raise RuntimeError(f"{trial['contender']} gave Muon {session.muon_matrices} matrices, expected {expected}")

    corpus = read_corpus()
    generator = torch.Generator().manual_seed(1 + rank)

    def step() -> tuple[float, float, float]:
        """Wall seconds, CPU seconds of this process (all threads), loss."""
        x, y = (tensor.to(device) for tensor in sample_batch(corpus, shape, generator))
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = session.step(list(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - wall, time.process_time() - cpu, float(loss)

    warmup = [step() for _ in range(trial["warmup"])]
    sockets_before, counted_before = socket_bytes_sent(), _counted(session)
    load_before = os.getloadavg()[0]
    timed = [step() for _ in range(trial["steps"])]
    sockets_after, counted_after = socket_bytes_sent(), _counted(session)
    result = {
        "setup_s": setup_s,
        "first_step_s": warmup[0][0],
        "warmup_s": [wall for wall, _, _ in warmup],
        "step_s": [wall for wall, _, _ in timed],
        "cpu_s": [cpu for _, cpu, _ in timed],
        "losses": [loss for _, _, loss in warmup + timed],
        "load": [load_before, os.getloadavg()[0]],
        # Only Gloo's traffic goes through sockets; NCCL's goes through NVLink or PCIe.
        "socket_bytes_per_step": (
            _per_step(sockets_before, sockets_after, trial["steps"]) if dist.get_backend() == "gloo" else None
        ),
        "counted_bytes_per_step": _per_step(counted_before, counted_after, trial["steps"]),
        "muon_matrices": session.muon_matrices,
        "parameters": parameters,
        "note": session.note,
    }
    result["peak_bytes"] = peak_bytes(step, device) if trial["weigh"] else None
    return result


def _counted(session: Session) -> int | None:
    return session.counted_bytes() if session.counted_bytes else None


def _per_step(before: int | None, after: int | None, steps: int) -> float | None:
    return None if before is None or after is None else (after - before) / steps


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    trial = json.loads(path.read_text())
    dist.init_process_group(
        trial["backend"], rank=rank, world_size=trial["ranks"], timeout=timedelta(seconds=trial["timeout_s"])
    )
    try:
        result = run_trial(trial, rank)
        (path.parent / f"rank{rank}.json").write_text(json.dumps(result))
        print(f"rank {rank}: median step {statistics.median(result['step_s']):.3f} s", flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
