"""Several ranks over NCCL without a GPU: processes whose collectives meet in shared memory, and faults of one of them.

    .venv-rehearse/bin/python rehearse/ranks.py                       # part of `make rehearse`
    .venv-rehearse/bin/python rehearse/ranks.py --only "stage 3"      # some cases

Each process has a device that computes nothing, see README.md. A collective is complete once all ranks have asked for
the same; streams, events and PyTorch's watchdog wait for that as they would for GPUs.
"""

from __future__ import annotations

from library import under_it

if __name__ == "__main__":
    under_it()

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alone import Alone
from cases import SHARED, Case
from device import Device

STEPS = 4
#: seconds that PyTorch gives a collective where one rank is made to fail
SHORT = 10
CASES = (
    *(Case(stage, 2) for stage in range(4)),
    Case(3, 2, params={"checks": "next_step"}, more={"gradient_clipping": 1.0}),
    Case(2, 2, more={"gradient_accumulation_steps": 2}),
    Case(3, 4, more={"mesh": {"replicate": 2, "shard": 2}}),
    Case(2, 4, params={"checks": "next_step"}, more={"sequence_parallel": SHARED}),
    Case(3, 2, params={"checks": "next_step"}, more={"sequence_parallel": {**SHARED, "attention": "ring"}}),
)


@dataclass(frozen=True)
class Fault:
    """What one rank does in the midst of training, and what must be said of it.

    Args:
        does: "ends" or "another collective".
        said: a part of what the other rank, or the library, writes.
    """

    does: str
    said: str


FAULTS = (
    Fault("ends", "no collective has ended for 9 s: rank 1 was last seen in step"),
    Fault("another collective", "ranks ask for different collectives"),
)


def train(case: Case, rank: int, fault: str) -> list[str]:
    """One rank's training: the collectives of its last step over all communicators, in the order of the host.

    Where kernels of two wait for each other on a GPU's few places, that has to be the same on all ranks.
    """
    from run import Training

    device = Device()
    alone = Alone(device, alone=False)
    store = dist.FileStore(os.environ["REHEARSE_RANKS"] + "/store", case.world)
    limit = datetime.timedelta(seconds=SHORT if fault else 300)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=case.world, timeout=limit, device_id=torch.device("cuda", 0)
    )
    training = Training(case, alone)
    for step in range(STEPS):
        device.clear()
        if fault and rank == 1 and step == STEPS - 1:
            if fault == "ends":
                os._exit(0)
            dist.all_reduce(torch.ones(3, device="cuda"))
        training.step()
        torch.cuda.synchronize()
    # What one sends and another takes the library has compared.
    return [op.name for op in device.ops() if op.kind == "nccl" and not op.name.startswith(("ncclSend", "ncclRecv"))]


def rehearsed(case: Case, fault: str = "") -> tuple[list[Any], list[str]]:
    """What each rank has to tell, None of one that has not come to its end; and what it wrote."""
    with tempfile.TemporaryDirectory(prefix="rehearse_ranks_") as folder:
        processes = []
        for rank in range(case.world):
            command = [sys.executable, __file__, "--rank", str(rank), "--case", case.name, "--fault", fault]
            # PyTorch's watchdog would write what it knows for a minute before it ends the process.
            environment = os.environ | {"REHEARSE_RANKS": folder, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
            with (Path(folder) / f"stderr{rank}").open("w") as errors:
                processes.append(subprocess.Popen(command, stdout=errors, stderr=errors, env=environment))
        for process in processes:
            try:
                process.wait(timeout=300)
            except subprocess.TimeoutExpired:
                process.kill()
        written = [(Path(folder) / f"stderr{rank}").read_text() for rank in range(case.world)]
        told = [Path(folder) / f"told{rank}" for rank in range(case.world)]
        return [json.loads(file.read_text()) if file.exists() else None for file in told], written


def problems_of(case: Case) -> list[str]:
    """What is wrong where ranks should train alike."""
    told, written = rehearsed(case)
    if missing := [rank for rank, found in enumerate(told) if found is None]:
        last = [line for line in written[missing[0]].splitlines() if line.strip()][-8:]
        return [f"ranks {missing} did not come to the end: " + "\n".join(last)]
    return [] if all(each == told[0] for each in told) else [f"collectives of a step by rank: {told}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this")
    for name in ("--rank", "--case", "--fault"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        (case,) = (case for case in CASES if case.name == options.case)
        told = train(case, int(options.rank), options.fault)
        Path(os.environ["REHEARSE_RANKS"], f"told{options.rank}").write_text(json.dumps(told))
        return 0
    status = 0
    for case in CASES:
        if options.only in case.name:
            found = problems_of(case)
            print(f"real ranks, {case.name} ... {'; '.join(found) or 'train alike'}", flush=True)
            status |= bool(found)
    for fault in FAULTS if not options.only else ():
        told, written = rehearsed(Case(3, 2), fault.does)
        seen = None in told and any(fault.said in text for text in written)
        print(f"{'found' if seen else 'NOT FOUND'}: rank 1 of 2 {fault.does}", flush=True)
        if not seen:
            print("\n".join(text[-2000:] for text in written))
        status |= not seen
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
