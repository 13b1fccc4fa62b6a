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
#: seconds that PyTorch gives a collective where one rank is made to fail
SHORT = 10
#: seconds that a rank compiles for longer than the other
LATE = 5


@dataclass(frozen=True)
class Setting:
    """How a case is run.

    Args:
        lazily: communicators are made when they are first used.
        second: ranks have the second device of their process, and the first one nothing to do.
        late: rank 1 compiles for longer.
    """

    case: Case
    lazily: bool = False
    second: bool = False
    late: bool = False

    @property
    def name(self) -> str:
        said = {"communicators made lazily": self.lazily, "second device": self.second, "rank 1 is late": self.late}
        return ", ".join([self.case.name, *(what for what, holds in said.items() if holds)])


_GRAPHS: dict[str, Any] = {"compile": {"cuda_graphs": True}}
_ONE_MATRIX: dict[str, Any] = {"muon_params": ["blocks.0.up.weight"]}
CASES = (
    *(Setting(Case(stage, 2)) for stage in range(4)),
    Setting(Case(3, 2, params={"checks": "next_step"}, more={"gradient_clipping": 1.0})),
    Setting(Case(2, 2, more={"gradient_accumulation_steps": 2})),
    Setting(Case(3, 4, more={"mesh": {"replicate": 2, "shard": 2}})),
    Setting(Case(2, 4, params={"checks": "next_step"}, more={"sequence_parallel": SHARED})),
    Setting(Case(3, 2, params={"checks": "next_step"}, more={"sequence_parallel": {**SHARED, "attention": "ring"}})),
    # Rows that three ranks have unequally many of, and one matrix, so that two ranks own none.
    *(Setting(Case(stage, 3, params=_ONE_MATRIX)) for stage in (1, 3)),
    *(Setting(Case(stage, 2, params={"checks": "next_step"}, more=_GRAPHS), lazily=True) for stage in (0, 3)),
    Setting(Case(2, 2, params={"checks": "next_step", "offload": FEW}), second=True, late=True),
)


@dataclass(frozen=True)
class Fault:
    """What one rank does in the midst of training, and what must be said of it.

    Args:
        does: "ends", "compiles for too long" or "another collective".
        said: a part of what the other rank, or the library, writes.
    """

    does: str
    said: str


FAULTS = (
    Fault("ends", "no collective has ended for 9 s: rank 1 was last seen in step"),
    Fault("compiles for too long", "no collective has ended for 9 s: rank 1 runs the loop's own code after"),
    Fault("another collective", "ranks ask for different collectives"),
)


def compile_slowly(seconds: float) -> None:
    """Have the first graph of this process take so much longer."""
    from compile_muon import backend
    from compile_muon.engine import frame, step_graph

    left = [seconds]
    for module in (frame, backend, step_graph):
        lower_and_compile = module.lower_and_compile

        def slowly(*args: Any, compiled: Any = lower_and_compile, **kwargs: Any) -> Any:
            time.sleep(left.pop() if left else 0)
            return compiled(*args, **kwargs)

        module.lower_and_compile = slowly  # type: ignore[attr-defined]


def train(setting: Setting, rank: int, fault: str) -> list[Any]:
    """One rank's training: the collectives of its last step over all communicators, in the order of the host, each with
    its stream and how many ranks and bytes it has.

    Where kernels of two wait for each other on a GPU's few places, that has to be the same on all ranks.
    """
    from run import Training

    case, device, own = setting.case, Device(), int(setting.second)
    torch.cuda.set_device(own)
    alone = Alone(device, alone=False)
    store = dist.FileStore(os.environ["REHEARSE_RANKS"] + "/store", case.world)
    limit = datetime.timedelta(seconds=SHORT if fault else 300)
    bound = None if setting.lazily else torch.device("cuda", own)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=case.world, timeout=limit, device_id=bound)
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
    if own:
        saved = compile_muon.Checkpointer(os.environ["REHEARSE_RANKS"] + "/saved", asynchronous=True)
        saved.save(STEPS, training.model, training.optimizer)
        saved.wait()
        strayed = device.lib.fg_noted_on(0)
        stray = threading.Thread(target=lambda: torch.empty(1 << 24, device="cuda"))  # a mistake that must be seen
        stray.start()
        stray.join()
        assert not strayed, f"{strayed} calls of some thread went to the first device"
        assert device.lib.fg_noted_on(0), "a thread that allocates on the first device is not noticed"
    # What one sends and another takes the library has compared.
    return [
        [op.name, op.stream, op.ranks, op.amount]
        for op in device.ops()
        if op.kind == "nccl" and not op.name.startswith(("ncclSend", "ncclRecv"))
    ]


def rehearsed(setting: Setting, fault: str = "") -> tuple[list[Any], list[str]]:
    """What each rank has to tell, None of one that has not come to its end; and what it wrote."""
    with tempfile.TemporaryDirectory(prefix="rehearse_ranks_") as folder:
        processes = []
        world = setting.case.world
        for rank in range(world):
            command = [sys.executable, __file__, "--rank", str(rank), "--case", setting.name, "--fault", fault]
            # PyTorch's watchdog would write what it knows for a minute before it ends the process.
            environment = os.environ | {"REHEARSE_RANKS": folder, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
            environment["REHEARSE_DEVICE"] = str(int(setting.second))
            with (Path(folder) / f"stderr{rank}").open("w") as errors:
                processes.append(subprocess.Popen(command, stdout=errors, stderr=errors, env=environment))
        for process in processes:
            try:
                process.wait(timeout=300)
            except subprocess.TimeoutExpired:
                process.kill()
        written = [(Path(folder) / f"stderr{rank}").read_text() for rank in range(world)]
        told = [Path(folder) / f"told{rank}" for rank in range(world)]
        return [json.loads(file.read_text()) if file.exists() else None for file in told], written


def problems_of(setting: Setting) -> list[str]:
    """What is wrong where ranks should train alike."""
    told, written = rehearsed(setting)
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
        (setting,) = (setting for setting in CASES if setting.name == options.case)
        told = train(setting, int(options.rank), options.fault)
        Path(os.environ["REHEARSE_RANKS"], f"told{options.rank}").write_text(json.dumps(told))
        return 0
    status = 0
    for setting in CASES:
        if options.only in setting.name:
            found = problems_of(setting)
            print(f"real ranks, {setting.name} ... {'; '.join(found) or 'train alike'}", flush=True)
            status |= bool(found)
    for fault in FAULTS if not options.only else ():
        told, written = rehearsed(Setting(Case(3, 2)), fault.does)
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
