"""Kill ranks and nodes of examples/train_gpt.py under torchrun, and check that training goes on.

Two torchrun agents on loopback stand for two nodes; killing an agent kills its ranks with it, as losing a machine does.
A trial succeeds with exit code 0, every step done, and on the same number of ranks the losses, weights and optimizer
state of a run never killed, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from compile_muon import Checkpointer
from compile_muon.checkpoint.manifest import Manifest
from compile_muon.checkpoint.values import Values

from .outcome import Request, Row, again

__all__ = ["Job", "Node", "Store", "campaign", "differences", "ended", "free_port", "until"]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
TINY = ("--layers", "1", "--width", "64", "--context", "32", "--batch", "2", "--sample-bytes", "4", "--timeout", "60")
#: shorter than torchrun's 30 s of waiting for more nodes once it has enough, and 15 s for a heartbeat
QUICKLY = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
PATIENCE = 240.0


@dataclass(frozen=True)
class Job:
    """A training run of the example, over all its starts."""

    folder: Path  # made here; gets the run's text, configuration, logs and, in ``out``, the example's output
    steps: int = 60
    save_every: int = 5  # steps from checkpoint to checkpoint
    compile: Any = field(default_factory=lambda: {"codegen": "eager"})

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        optimizer = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.005}}
        config = {"compile": self.compile, "optimizer": optimizer, "zero_optimization": {"stage": 3}}
        (self.folder / "config.json").write_text(json.dumps(config))
        (self.folder / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 200)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "out" / "checkpoints"

    def steps_saved(self) -> list[int]:
        return Checkpointer(self.checkpoints).steps()

    def newest(self) -> int:
        return max(self.steps_saved(), default=0)

    def saving(self) -> bool:
        """Tell whether a checkpoint is being written, or was when its writer was killed."""
        return self.checkpoints.is_dir() and any(p.name.endswith(".tmp") for p in self.checkpoints.iterdir())

    def arguments(self) -> list[str]:
        paths = ("--config", self.folder / "config.json", "--data", self.folder / "text.txt", "--out", "out")
        return [*map(str, paths), *TINY, "--steps", str(self.steps), "--save-every", str(self.save_every)]

    def world(self) -> int:
        """Return the number of ranks that wrote the newest checkpoint; 0 if there is none."""
        newest = self.newest()
        return Manifest.read(self.checkpoints / f"step-{newest}").world if newest else 0

    def last(self) -> tuple[list[float], dict[int, float], dict[str, Any]]:
        """Read the newest checkpoint: rank 0's training losses, the validation losses, and every tensor by name."""
        place = self.checkpoints / f"step-{self.newest()}"
        values = Values.read(place, "state/rank-00000", Manifest.read(place).files)
        tensors = {path.name: load_file(path) for path in (place / "tensors").glob("*.safetensors")}
        return values.get("extra.train"), values.get("extra.val"), tensors


def differences(one: Job, other: Job) -> list[str]:
    """List the values in which the newest checkpoints of two runs differ by a bit."""
    (train, val, tensors), (train2, val2, tensors2) = one.last(), other.last()
    names = [name for name, a, b in (("training", train, train2), ("validation", val, val2)) if a != b]
    if tensors.keys() != tensors2.keys():
        return [*names, "files"]
    for file, content in tensors.items():
        for name, value in content.items():
            if value.tobytes() != tensors2[file][name].tobytes():
                names.append(name)
    return names


def until(condition: Callable[[], Any], patience: float = PATIENCE) -> bool:
    """Wait until ``condition`` is true; tell whether that was within ``patience`` seconds."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Node:
    """A node: a torchrun agent, with the arguments ``launch``, and its ranks, which are lost together."""

    def __init__(self, job: Job, *launch: str) -> None:
        self._log = job.folder / f"node-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=5", "--monitor-interval=0.1", *launch]
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        # torchrun would reuse one store for all rounds, with the last round's keys in it: docs/how-to/nodes.md.
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(SCRIPT), *job.arguments()],
                cwd=job.folder,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """Return the process ids of the running ranks."""
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit():
                    continue
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    if SCRIPT.name.encode() in (entry / "cmdline").read_bytes():
                        pids.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return sorted(pids)

    def kill(self) -> None:
        """Kill the agent and its ranks at once."""
        if self.process.poll() is not None:
            return
        # Each by its id, because torchrun's ranks have sessions of their own; the stopped agent starts no others.
        self.process.send_signal(signal.SIGSTOP)
        doomed = self.ranks()
        self.process.kill()
        for rank in doomed:
            kill(rank)
        self.process.wait()

    def wait(self, patience: float = PATIENCE) -> int | None:
        """Return the agent's exit code; None if it has none after ``patience`` seconds."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None

    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Store:
    """The rendezvous's store in a process of its own, which no fault kills."""

    def __init__(self, port: int) -> None:
        serve = (
            "import torch.distributed as d, time; "
            f"s = d.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False); print('.', flush=True); "
            "time.sleep(1e6)"
        )
        self._process = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None and self._process.stdout.read(1) == b"."

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def kill(process: int) -> bool:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------ faults


def one_node(job: Job) -> Node:
    return Node(job, "--standalone", "--nproc-per-node=2")


def of_two(job: Job, address: str, port: int, nodes: str, *, host: bool | None = None) -> Node:
    """Start one of two nodes of a rank each, ``nodes`` is "2" or "1:2"; ranks follow the order of the addresses."""
    # Without ``host`` torchrun lets the first node host the rendezvous's store.
    settings = QUICKLY if host is None else f"{QUICKLY},is_host={int(host)}"
    store = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run", f"--rdzv-conf={settings}")
    return Node(job, f"--nnodes={nodes}", "--nproc-per-node=1", *store, f"--local-addr={address}")


def ended(code: int | None, job: Job, reference: Job, worlds: tuple[int, ...] = (2,)) -> str:
    """Return the outcome of a run in words; ``code`` is torchrun's, ``worlds`` are its world's sizes over time."""
    if code != 0:
        return "hangs" if code is None else f"ends with {code}"
    if job.newest() != job.steps:
        return "ends before the last step"
    if job.world() != worlds[-1]:
        return f"ends with a world of {job.world()}"
    if len(set(worlds)) > 1:
        return "goes on with " + ", then ".join(map(str, worlds[1:]))
    # Only with a world of one size must numbers be the reference's.
    return "goes on with other numbers" if differences(job, reference) else "goes on, bit for bit"


def kill_a_rank(job: Job, reference: Job, dice: random.Random, moment: str) -> str:
    """Kill one of two ranks or both, while they are ``starting``, ``training`` or ``saving``."""
    with one_node(job) as node:
        until(lambda: len(node.ranks()) == 2)
        if moment == "starting":
            time.sleep(dice.uniform(0.0, 6.0))
        else:
            after = dice.randrange(job.save_every, job.steps // 2, job.save_every)
            until(lambda: job.newest() >= after)
            if moment == "saving":
                until(job.saving)
            else:
                time.sleep(dice.uniform(0.0, 0.5))
        doomed = node.ranks()
        if not doomed:
            return "ends before the kill"
        for rank in dice.sample(doomed, dice.randint(1, len(doomed))):
            kill(rank)
        return ended(node.wait(), job, reference)


def kill_a_node(job: Job, reference: Job, dice: random.Random, back: bool) -> str:
    """Kill the second of two nodes in the middle of training, and with ``back`` start another in its place."""
    port = free_port()
    with of_two(job, "127.0.0.1", port, "2" if back else "1:2", host=True) as first:
        with of_two(job, "127.0.0.2", port, "2" if back else "1:2", host=False) as second:
            if not until(lambda: job.world() == 2):
                return "does not start"
            time.sleep(dice.uniform(0.0, 0.3))
            second.kill()
        if not back:
            return ended(first.wait(), job, reference, (2, 1))
        with of_two(job, "127.0.0.2", port, "2", host=False):
            return ended(first.wait(), job, reference)


def kill_a_node_for_a_while(job: Job, reference: Job, dice: random.Random) -> str:
    """Kill one of two nodes, let the other train alone, and start the first again; numbers are not compared."""
    job, port = replace(job, steps=100_000), free_port()  # so that the run does not end before the node is back
    with of_two(job, "127.0.0.1", port, "1:2", host=True):
        with of_two(job, "127.0.0.2", port, "1:2", host=False) as second:
            if not until(lambda: job.world() == 2):
                return "does not start"
            time.sleep(dice.uniform(0.0, 0.3))
            second.kill()
        if not until(lambda: job.world() == 1):
            return "does not go on alone"
        with of_two(job, "127.0.0.2", port, "1:2", host=False):
            return "goes on with 1, then 2" if until(lambda: job.world() == 2) else "does not let it in again"


def kill_the_first_node(job: Job, reference: Job, dice: random.Random) -> str:
    """Kill rank 0's node and start it again; the rendezvous's store is elsewhere."""
    port = free_port()
    with Store(port), of_two(job, "127.0.0.2", port, "2", host=False) as second:
        with of_two(job, "127.0.0.1", port, "2", host=False) as first:
            if not until(lambda: job.world() == 2):
                return "does not start"
            time.sleep(dice.uniform(0.0, 0.3))
            first.kill()
        with of_two(job, "127.0.0.1", port, "2", host=False):
            return ended(second.wait(), job, reference)


def kill_the_host(job: Job, reference: Job, dice: random.Random) -> str:
    """Kill the node that hosts the store, wait for the other's torchrun to end, and start both again."""
    port = free_port()
    with of_two(job, "127.0.0.1", port, "2", host=True) as first:
        with of_two(job, "127.0.0.2", port, "2", host=False) as second:
            if not until(lambda: job.world() == 2):
                return "does not start"
            time.sleep(dice.uniform(0.0, 0.3))
            first.kill()
            if second.wait() != 1:
                return "the other node does not notice"
        with of_two(job, "127.0.0.1", port, "2", host=True) as first:
            with of_two(job, "127.0.0.2", port, "2", host=False):
                return ended(first.wait(), job, reference)


Trial = Callable[[Job, Job, random.Random], str]

#: (fault, attempts, attempts of --quick, trial)
FAULTS: tuple[tuple[str, int, int, Trial], ...] = (
    ("a rank or both, while starting", 3, 0, lambda *a: kill_a_rank(*a, moment="starting")),
    ("a rank or both, while training", 4, 0, lambda *a: kill_a_rank(*a, moment="training")),
    ("a rank or both, while saving", 4, 1, lambda *a: kill_a_rank(*a, moment="saving")),
    ("one of two nodes, which comes back", 3, 0, lambda *a: kill_a_node(*a, back=True)),
    ("one of two nodes, which does not, --nnodes=1:2", 2, 0, lambda *a: kill_a_node(*a, back=False)),
    ("one of two nodes, which comes back later, --nnodes=1:2", 2, 0, kill_a_node_for_a_while),
    ("the node of rank 0, the store elsewhere", 2, 0, kill_the_first_node),
    ("the node with the store, both started again", 2, 0, kill_the_host),
)


def good(outcome: str) -> bool:
    """Tell whether a trial may end so."""
    return outcome.startswith("goes on") and "other numbers" not in outcome


def campaign(request: Request) -> Iterator[Row]:
    """Yield a row for each fault; the seed draws victims and moments, but a machine's speed decides what they hit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = Job(folder / "never killed")
        with one_node(reference) as node:
            assert node.wait() == 0, node.printed()
        for number, (fault, often, quickly, trial) in enumerate(FAULTS):
            attempts = request.runs or (quickly if request.quick else often)
            if not attempts or not request.wants(fault):
                continue
            dice = random.Random(f"{request.seed} {fault}")
            row = Row("elastic", fault, again("elastic", request, fault))
            for attempt in range(attempts):
                start = time.monotonic()
                outcome = trial(Job(folder / f"{number}-{attempt}"), reference, dice)
                row.count(outcome, wrong=not good(outcome), seconds=round(time.monotonic() - start, 1))
            yield row
