"""Several ranks over NCCL without a GPU: processes whose collectives meet in shared memory, and faults of one of them.

    .venv-rehearse/bin/python rehearse/ranks.py                       # part of `make rehearse`
    .venv-rehearse/bin/python rehearse/ranks.py --only "stage 3"      # some cases

Each process has a device that computes nothing, see README.md. A collective is complete once all ranks have asked for
it; streams, events and PyTorch's watchdog wait for that as they would for GPUs.
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
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alone import Alone
from cases import FEW, SHARED, Case
from device import Device

import compile_muon

STEPS = 4
#: timeout of collectives in seconds, where one rank is made to fail
SHORT = 10
#: extra seconds that a late rank compiles for
LATE = 5


@dataclass(frozen=True)
class Setting:
    """A case, and the manner of its run."""

    case: Case
    lazily: bool = False  # communicators are made when they are first used
    second: bool = False  # ranks use the second device of their process, and never the first
    late: bool = False  # rank 1 compiles for longer

    @property
    def name(self) -> str:
        notes = {"communicators made lazily": self.lazily, "second device": self.second, "rank 1 is late": self.late}
        return ", ".join([self.case.name, *(what for what, holds in notes.items() if holds)])


_GRAPHS: dict[str, Any] = {"compile": {"cuda_graphs": True}}
_ONE_MATRIX: dict[str, Any] = {"muon_params": ["blocks.0.up.weight"]}
CASES = (
    *(Setting(Case(stage, 2)) for stage in range(4)),
    Setting(Case(3, 2, params={"checks": "next_step"}, more={"gradient_clipping": 1.0})),
    Setting(Case(2, 2, more={"gradient_accumulation_steps": 2})),
    Setting(Case(3, 4, more={"mesh": {"replicate": 2, "shard": 2}})),
    Setting(Case(2, 4, params={"checks": "next_step"}, more={"sequence_parallel": SHARED})),
    Setting(Case(3, 2, params={"checks": "next_step"}, more={"sequence_parallel": {**SHARED, "attention": "ring"}})),
    # Three ranks have unequal shards; with one matrix, two of them own none.
    *(Setting(Case(stage, 3, params=_ONE_MATRIX)) for stage in (1, 3)),
    *(Setting(Case(stage, 2, params={"checks": "next_step"}, more=_GRAPHS), lazily=True) for stage in (0, 3)),
    Setting(Case(2, 2, params={"checks": "next_step", "offload": FEW}), second=True, late=True),
)


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in the midst of training."""

    does: str  # "ends", "compiles for too long" or "another collective"
    said: str  # part of the message of the other rank, or of the library


FAULTS = (
    Fault("ends", "no collective has ended for 9 s: rank 1 was last seen in step"),
    Fault("compiles for too long", "no collective has ended for 9 s: rank 1 runs the loop's own code after"),
    Fault("another collective", "ranks ask for different collectives"),
)


def compile_slowly(seconds: float) -> None:
    """Delay the compilation of this process's first graph."""
    from compile_muon import backend
    from compile_muon.engine import frame, step_graph

    delays = [seconds]
    for module in (frame, backend, step_graph):
        lower_and_compile = module.lower_and_compile

        def slowly(*args: Any, compiled: Any = lower_and_compile, **kwargs: Any) -> Any:
            time.sleep(delays.pop() if delays else 0)
            return compiled(*args, **kwargs)

        module.lower_and_compile = slowly  # type: ignore[attr-defined]


def train(setting: Setting, rank: int, fault: str) -> list[Any]:
    """Train as one rank; return the collectives of the last step over all communicators, with stream, ranks and bytes.

    They are in the host's order, which has to be the same on all ranks: kernels of two collectives may wait for each
    other on a GPU's few places.
    """
    from run import Training

    case, device, device_index = setting.case, Device(), int(setting.second)
    torch.cuda.set_device(device_index)
    alone = Alone(device, alone=False)
    store = dist.FileStore(os.environ["REHEARSE_RANKS"] + "/store", case.world)
    limit = datetime.timedelta(seconds=SHORT if fault else 300)
    device_id = None if setting.lazily else torch.device("cuda", device_index)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=case.world, timeout=limit, device_id=device_id)
    if rank == 1 and (setting.late or fault.startswith("compiles")):
        compile_slowly(3 * SHORT if fault else LATE)
    training = Training(case, alone)
    for step in range(STEPS):
        device.clear()
        if fault and rank == 1 and step == STEPS - 1:
            if fault == "ends":
                os._exit(0)
            if fault == "another collective":
                dist.all_reduce(torch.ones(3, device="cuda"))
        training.step()
        torch.cuda.synchronize()
    if device_index:
        checkpointer = compile_muon.Checkpointer(os.environ["REHEARSE_RANKS"] + "/saved", asynchronous=True)
        checkpointer.save(STEPS, training.model, training.optimizer)
        checkpointer.wait()
        calls_on_first = device.lib.fg_noted_on(0)
        thread = threading.Thread(target=lambda: torch.empty(1 << 24, device="cuda"))  # a deliberate mistake
        thread.start()
        thread.join()
        assert not calls_on_first, f"{calls_on_first} calls of some thread went to the first device"
        assert device.lib.fg_noted_on(0), "a thread that allocates on the first device is not noticed"
    # Sends and receives differ by rank; the library compares each pair.
    return [
        [op.name, op.stream, op.ranks, op.amount]
        for op in device.ops()
        if op.kind == "nccl" and not op.name.startswith(("ncclSend", "ncclRecv"))
    ]


def rehearsed(setting: Setting, fault: str = "") -> tuple[list[Any], list[str]]:
    """Run all ranks; return the collectives of each, None of a rank that did not finish, and their output."""
    with tempfile.TemporaryDirectory(prefix="rehearse_ranks_") as folder:
        processes = []
        world = setting.case.world
        for rank in range(world):
            command = [sys.executable, __file__, "--rank", str(rank), "--case", setting.name, "--fault", fault]
            # By default PyTorch's watchdog dumps for a minute before it ends the process.
            environment = os.environ | {"REHEARSE_RANKS": folder, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
            environment["REHEARSE_DEVICE"] = str(int(setting.second))
            with (Path(folder) / f"stderr{rank}").open("w") as errors:
                processes.append(subprocess.Popen(command, stdout=errors, stderr=errors, env=environment))
        for process in processes:
            try:
                process.wait(timeout=300)
            except subprocess.TimeoutExpired:
                process.kill()
        outputs = [(Path(folder) / f"stderr{rank}").read_text() for rank in range(world)]
        files = [Path(folder) / f"told{rank}" for rank in range(world)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files], outputs


def problems_of(setting: Setting) -> list[str]:
    """List what went wrong where ranks should train alike."""
    by_rank, outputs = rehearsed(setting)
    if missing := [rank for rank, steps in enumerate(by_rank) if steps is None]:
        last = [line for line in outputs[missing[0]].splitlines() if line.strip()][-8:]
        return [f"ranks {missing} did not come to the end: " + "\n".join(last)]
    return [] if all(each == by_rank[0] for each in by_rank) else [f"collectives of a step by rank: {by_rank}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this")
    for name in ("--rank", "--case", "--fault"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        (setting,) = (setting for setting in CASES if setting.name == options.case)
        collectives = train(setting, int(options.rank), options.fault)
        Path(os.environ["REHEARSE_RANKS"], f"told{options.rank}").write_text(json.dumps(collectives))
        return 0
    status = 0
    for setting in CASES:
        if options.only in setting.name:
            problems = problems_of(setting)
            print(f"real ranks, {setting.name} ... {'; '.join(problems) or 'train alike'}", flush=True)
            status |= bool(problems)
    for fault in FAULTS if not options.only else ():
        collectives, outputs = rehearsed(Setting(Case(3, 2)), fault.does)
        detected = None in collectives and any(fault.said in text for text in outputs)
        print(f"{'found' if detected else 'NOT FOUND'}: rank 1 of 2 {fault.does}", flush=True)
        if not detected:
            print("\n".join(text[-2000:] for text in outputs))
        status |= not detected
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
