"""One rank of two or three does something else in its fourth step. Outcomes:

    right       training went on, and every rank's parameters are those of one process that trains on all batches
    named       every survivor ended in time with an error that names the faulty rank, and the step if there was one
    unnamed     the same, but some survivor's error does not name them
    refused     an error, although training should have tolerated the fault
    WRONG       training went on with other parameters
    hung        a survivor still waited 5 s after the time-out
    aborted     a survivor was ended by a signal: Gloo's own thread received a message of another length
    aborted, named      the same, and every other rank ended as in "named"

"late" beside an error: some survivor was in a later step by then.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import compile_muon

from .outcome import Request, Row, again
from .processes import Board, Child, join, rendezvous, start, store_host
from .rank_faults import FAULTS, Fault

__all__ = ["FAULT_STEP", "Training", "campaign"]

STEPS, FAULT_STEP, FAULTY = 6, 3, 1
TIMEOUT = 5.0
#: seconds beyond the time-out after which a rank without an end or progress counts as hung
GRACE = 5.0
#: seconds for a whole run, with everything compiled on a busy machine
PATIENCE = 90.0
#: retries of a run that was over before its fault happened
AGAIN = 2
#: relative Frobenius error: other orders of summation reach 1e-6, the least of the faults 1e-4
TOLERANCE = 1e-5
RUNNING, COMPLETED = 0, 1
_KEPT = 400  # characters of a message in the record
#: places of faults that act before the first step
AT_START = ("settings", "model", "mode")
WIDTH = 10
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_HERE, _THERE = "10.213.0.1", "10.213.0.2"


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """A model of four equal blocks of width ``inner``, with Python between them where faults act."""

    def __init__(self, inner: int = 14, last: str = "head") -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(4))
        self.add_module(last, nn.Linear(WIDTH, 16))
        self.last = last
        self.order = list(range(4))
        self.between: Callable[[int, Tensor], None] | None = None

    def frames(self) -> list[nn.Module]:
        """Return the modules that are compiled, each by itself."""
        return [self.embedding, *self.blocks, getattr(self, self.last)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for place, index in enumerate(self.order):
            if self.between is not None:
                self.between(place, x)
            x = self.blocks[index](x)
        return getattr(self, self.last)(x)


@dataclass(frozen=True)
class Case:
    """The settings of one run."""

    fault: str  # name of the fault
    stage: int
    world: int
    mode: str  # "frames" compiles each block by itself, "eager" none
    arguments: dict[str, Any] = field(default_factory=dict)  # of the optimizer, on every rank

    @property
    def name(self) -> str:
        return f"{self.fault}, stage {self.stage}, {self.world} ranks, {self.mode}"


class Training:
    """A rank's training; with ``alone`` that of one process on the batches of all ranks."""

    def __init__(self, case: Case, rank: int, interface: str = "lo", *, alone: bool = False) -> None:
        self.case, self.rank, self.ranks, self.stage = case, rank, case.world, case.stage
        self.fault: Fault | None = FAULTS.get(case.fault)
        self.faulty = rank == FAULTY and not alone
        self.interface, self.alone = interface, alone
        self.step = 0
        self.longer = False
        self.calls_of_a_step = 0
        torch.manual_seed(5)
        settings = dict(
            lr=0.02, weight_decay=0.1, adamw_lr=3e-3, adamw_eps=1e-4, adamw_weight_decay=0.1, ns_dtype="float32",
            stage=0 if alone else case.stage,
        )  # fmt: skip
        settings |= case.arguments | (self.fault.everywhere if self.fault else {})
        if settings["stage"] == 3:
            settings.pop("check_replicas", None)  # stage 3 has no copies to compare
        self.micros = settings.get("gradient_accumulation_steps", 1)
        different = self._made_differently("model")
        self.model = Net(**different)
        settings |= self._made_differently("settings")
        self.optimizer = compile_muon.MuonZero(self.model, **settings)
        if case.mode == "frames" and not alone and not (self.faulty and self.fault and self.fault.place == "mode"):
            for module in self.model.frames():
                module.compile(backend="muon_zero", options={"codegen": "eager"})

    def _made_differently(self, place: str) -> dict[str, Any]:
        return self.fault.act(self) if self.faulty and self.fault and self.fault.place == place else {}

    def parameter(self, name: str) -> nn.Parameter:
        return dict(self.model.named_parameters())[name]

    def tokens(self, micro: int, rank: int, *, longer: bool) -> Tensor:
        generator = torch.Generator().manual_seed(10_000 * self.step + 100 * micro + rank)
        return torch.randint(0, 16, (4, 9 if longer else 5), generator=generator)

    def _loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / self.micros

    def forward(self, micro: int) -> Tensor:
        """Return the loss of a micro-batch; with ``alone`` the mean loss over all ranks' batches."""
        if not self.alone:
            return self._loss(self.tokens(micro, self.rank, longer=self.longer))
        longer = self.step == FAULT_STEP and self.case.fault == "a longer batch"
        losses = [self._loss(self.tokens(micro, rank, longer=longer and rank == FAULTY)) for rank in range(self.ranks)]
        return torch.stack(losses).mean()

    def _count_calls(self) -> None:
        def note(frame: Any, event: str, _: object) -> None:
            self.calls_of_a_step += event == "call"

        sys.setprofile(note)
        self.optimizer.step()
        sys.setprofile(None)

    def run_step(self, happened: Callable[[], None]) -> None:
        """Run a step of the loop, with the fault if this is its rank and step; call ``happened`` right before it."""
        fault, place = self.fault, None
        if fault is not None and self.step == FAULT_STEP:
            twin = self.alone and fault.twin is not None and self.stage >= fault.twin_from
            if twin or (self.faulty and fault.place not in AT_START):
                place = fault.place

        def act(where: str, otherwise: Callable[[], object]) -> None:
            if place != where:
                otherwise()
            elif fault is not None and fault.twin is not None and self.alone:
                fault.twin(self, FAULTY)
                otherwise()
            elif fault is not None:
                happened()
                fault.act(self)

        def batch() -> None:
            for micro in range(self.micros):
                self.forward(micro).backward()

        act("between", lambda: None)
        act("batch", batch)
        if self.faulty and self.step == FAULT_STEP - 1:
            act("update", self._count_calls)
        else:
            act("update", self.optimizer.step)
        act("zero_grad", self.optimizer.zero_grad)
        self.longer, self.model.between = False, None
        self.model.order = list(range(4))
        self.step += 1

    def held(self) -> dict[str, Tensor]:
        """Return this rank's parameters, and resident weights under their names with a colon in front."""
        tensors = {}
        for sharded in self.optimizer.engine.params:
            param = sharded.param.detach()
            tensors[sharded.name] = (param.to_local() if isinstance(param, DTensor) else param).clone()
            if sharded.resident is not None:
                sharded.await_refresh()
                tensors[f":{sharded.name}"] = sharded.resident.detach().clone()
        return tensors


def train(case: Case, rank: int, port: int, board: Board, place: Path, address: str, interface: str) -> None:
    """Train one rank to its last step, and save its tensors in ``place``."""

    def happened() -> None:
        board.write(case.world, FAULT_STEP, RUNNING)

    store = dist.TCPStore(address, port, case.world, False, timedelta(seconds=20))
    rendezvous(store, rank, case.world, TIMEOUT, interface)
    board.write(rank, 0, RUNNING)
    fault = FAULTS.get(case.fault)
    if fault and rank == FAULTY and fault.place in AT_START:
        happened()
    training = Training(case, rank, interface)
    while training.step < STEPS:
        board.write(rank, training.step, RUNNING)
        training.run_step(happened)
    torch.save(training.held(), place / f"rank-{rank}.pt")
    board.write(rank, STEPS, COMPLETED)
    # Stay, because a rank that leaves would cause errors in the others.
    until = time.monotonic() + TIMEOUT + GRACE + 5.0
    while time.monotonic() < until:
        time.sleep(0.02)


def worst_error(case: Case, place: Path) -> float:
    """Return the largest relative error of any rank's parameter to those of one process that trained on all batches."""
    twin = Training(replace(case, mode="eager"), 0, alone=True)
    while twin.step < STEPS:
        twin.run_step(lambda: None)
    ranks = [
        torch.load(place / f"rank-{rank}.pt") for rank in range(case.world) if (place / f"rank-{rank}.pt").exists()
    ]
    worst = 0.0
    for name, expected in twin.model.named_parameters():
        weights = [tensors[name] for tensors in ranks]
        if weights[0].shape != expected.shape:
            weights = [torch.cat(weights)]  # shards are in the order of ranks
        for weight in (*weights, *(tensors[f":{name}"] for tensors in ranks if f":{name}" in tensors)):
            if weight.shape != expected.shape:
                return float("inf")
            error = float((weight.float() - expected.detach()).norm() / expected.detach().norm())
            worst = max(worst, error) if error == error else float("inf")
    return worst


def run(case: Case, place: Path) -> dict[str, Any]:
    """Run one case in a process that forks and watches the ranks; return the outcome."""
    place.mkdir(parents=True, exist_ok=True)
    fault = FAULTS.get(case.fault)
    board = Board(case.world + 1)
    with ExitStack() as stack:
        linked = fault is not None and fault.link
        address = interface = ""
        if linked:
            isolate()
            address, interface = _HERE, "here"
        children: list[Child] = []
        if linked:
            go, gone = os.pipe()
            behind = start(_behind_a_link, go, lambda port: train(case, FAULTY, port, board, place, _HERE, "there"),
                           log=place / f"rank-{FAULTY}.log")  # fmt: skip
            os.close(go)
            join_networks(behind.pid)
        port = stack.enter_context(store_host(address or "127.0.0.1"))
        for rank in range(case.world):
            if linked and rank == FAULTY:
                os.write(gone, str(port).encode())
                children.append(behind)
                continue
            arguments = (case, rank, port, board, place, address or "127.0.0.1", interface or "lo")
            children.append(start(train, *arguments, log=place / f"rank-{rank}.log"))
        return _supervised(case, fault, board, children, place)


def _supervised(case: Case, fault: Fault | None, board: Board, children: list[Child], place: Path) -> dict[str, Any]:
    """Watch the ranks until all survivors are over or hang; end them, and return the record of the run."""
    survivors = [rank for rank in range(case.world) if not (fault and fault.lost and rank == FAULTY)]
    begin = time.monotonic()

    def over(rank: int) -> bool:
        return children[rank].poll() or board.read(rank)[1] == COMPLETED

    # A rank that uses CPU time does not hang: it may be compiling anew, on a busy machine.
    cpu_seconds = {rank: 0.0 for rank in survivors}
    active = 0.0  # last time at which a survivor computed
    while not all([over(rank) for rank in survivors]):
        for rank in survivors:
            if (seconds := children[rank].cpu_seconds()) > cpu_seconds[rank] + 0.5:
                cpu_seconds[rank], active = seconds, time.monotonic()
        happened = board.read(case.world)[2]
        since = max([happened, active, *(board.read(rank)[2] for rank in survivors)])
        if time.monotonic() > min(since + TIMEOUT + GRACE if happened else math.inf, begin + PATIENCE):
            break
        time.sleep(0.005)
    hung = [rank for rank in survivors if not over(rank)]
    for rank in range(case.world):
        if board.read(rank)[1] == COMPLETED or rank not in survivors:
            children[rank].kill()
    happened = board.read(case.world)[2]
    join(children, 0.3)
    ranks = []
    for rank, child in enumerate(children):
        step, phase, since = board.read(rank)
        ended, kind, message = "completed", "", ""
        if phase == COMPLETED:
            pass
        elif rank in hung:
            ended = "hung"
        elif child.error is not None:
            ended, since = "raised", child.ended
            kind, message = child.error[0][0], " ".join(child.error[1].split())
        elif child.killed:
            ended = "lost"
        else:
            ended, since, message = f"ended with {child.code}", child.ended, _last_words(place / f"rank-{rank}.log")
        ranks.append(
            {"rank": rank, "survivor": rank in survivors, "ended": ended, "step": step, "error": kind,
             "message": message, "seconds": round(since - happened, 2)}
        )  # fmt: skip
    # A run may end before its fault happens, if compiling on a busy machine takes longer than the time-out.
    result: dict[str, Any] = {"ranks": ranks, "parameters differ by": None, "happened": bool(happened)}
    if all(ranks[rank]["ended"] == "completed" for rank in survivors):
        result["parameters differ by"] = worst_error(case, place)
    result |= classified(fault, [r for r in ranks if r["survivor"]], result["parameters differ by"])
    for record in ranks:
        record["message"] = record["message"][:_KEPT]
    return result


def _last_words(log: Path) -> str:
    """Return the line that C++ prints for an uncaught exception."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if "what():" in line), "")


def names_rank(message: str) -> bool:
    """Tell whether a message names the faulty rank: "rank 1", "ranks 0, 1", "ranks [1]"."""
    lists = re.findall(r"\branks? \[?((?:\d+(?:, | and |,)?)+)", message)
    return any(str(FAULTY) in re.findall(r"\d+", numbers) for numbers in lists)


def names_step(message: str, *, late: bool) -> bool:
    """Tell whether a message names the fault's step, counted from 0 or 1; or the next one if a rank was ``late``."""
    steps = {int(number) for number in re.findall(r"\bstep (\d+)\b", message)}
    return not steps.isdisjoint(range(FAULT_STEP, FAULT_STEP + 2 + late))


def classified(fault: Fault | None, survivors: list[dict[str, Any]], error: float | None) -> dict[str, Any]:
    """Return the outcome, one of those in the module's docstring, and whether it is bad."""
    ends = {rank["ended"] for rank in survivors}
    legitimate = fault is None or fault.legitimate
    if "hung" in ends:
        return {"outcome": "hung", "bad": True}
    at_start = fault is not None and fault.place in AT_START
    raised = [rank["message"] for rank in survivors if rank["ended"] == "raised"]
    late = any(rank["step"] > (0 if at_start else FAULT_STEP) for rank in survivors)
    named = all(names_rank(message) and (at_start or names_step(message, late=late)) for message in raised)
    if any(end.startswith("ended with") for end in ends):
        others_named = named and bool(raised) and ends <= {"raised", "ended with -6"}
        return {"outcome": "aborted, named" if others_named else "aborted", "bad": not others_named}
    if error is not None:
        right = error <= TOLERANCE
        return {"outcome": "right" if right else "WRONG", "bad": not right}
    if "completed" in ends:
        # Some survivors finished, without those that raised.
        return {"outcome": "WRONG", "bad": True}
    if legitimate:
        return {"outcome": "refused", "bad": True}
    return {"outcome": ("named" if named else "unnamed") + (", late" if late else ""), "bad": not named}


# --------------------------------------------------------------------------------------------- networks


def cannot_isolate() -> str:
    """Return why no rank can have a network of its own here; empty if it can."""
    if shutil.which("ip") is None:
        return "there is no ip command"

    def attempt() -> None:
        isolate()
        _ip("link add here type veth peer name there")

    child = start(attempt)
    join([child], 10.0)
    return "" if child.code == 0 else f"no network namespaces: {child.error[1] if child.error else child.code}"


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def isolate() -> None:
    """Give this process and its forks user and network namespaces of their own."""
    user, group = os.getuid(), os.getgid()
    _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _ip("link set lo up")


def _behind_a_link(go: int, then: Callable[[int], None]) -> None:
    """Run a rank with a network of its own, once the port of the store arrives on ``go``."""
    _unshare(_CLONE_NEWNET)
    _ip("link set lo up")
    port = int(os.read(go, 16))
    _ip(f"addr add {_THERE}/24 dev there")
    _ip("link set there up")
    then(port)


def join_networks(pid: int) -> None:
    """Link this process's network with that of ``pid``, once it has one."""
    ours = os.stat("/proc/self/ns/net").st_ino
    until = time.monotonic() + 10.0
    while os.stat(f"/proc/{pid}/ns/net").st_ino == ours and time.monotonic() < until:
        time.sleep(0.01)
    _ip(f"link add here type veth peer name there netns {pid}")
    _ip(f"addr add {_HERE}/24 dev here")
    _ip("link set here up")


# ---------------------------------------------------------------------------------------------- campaign


def cases(request: Request) -> list[Case]:
    """List all faults at all stages, compiled on two ranks; at stage 3 also on three ranks, and eagerly."""
    faults = [name for name in FAULTS if (FAULTS[name].quick or not request.quick) and request.wants(name)]
    if request.quick or request.stages or request.world:
        ways = [(stage, request.world or 2, "frames") for stage in request.stages or (3,)]
    else:
        ways = [*((stage, 2, "frames") for stage in range(4)), (3, 3, "frames"), (3, 2, "eager")]
    return [Case(name, *way, request.arguments) for way in ways for name in faults]


def campaign(request: Request) -> Iterator[Row]:
    """Yield a row for each fault, over all stages, worlds and modes, with the runs in its details."""
    chosen = cases(request)
    random.Random(request.seed).shuffle(chosen)  # so that runs that wait are beside runs that compute
    alone = cannot_isolate() if any(FAULTS[case.fault].link for case in chosen) else ""
    rows: dict[str, Row] = {}
    for case in chosen:
        rows.setdefault(case.fault, Row("ranks", case.fault, again("ranks", request, case.fault)))
    with tempfile.TemporaryDirectory() as place:
        for case, result in _side_by_side(chosen, Path(place), request.jobs, alone):
            row = rows[case.fault]
            if "skipped" in result:
                row.details["skipped"] = result["skipped"]
                continue
            if not result.pop("happened"):
                result["outcome"], result["bad"] = "over before the fault", True
            seconds = [rank["seconds"] for rank in result["ranks"] if rank["survivor"]]
            row.count(result["outcome"], wrong=result["bad"], seconds=max(seconds))
            settings = {"stage": case.stage, "world": case.world, "mode": case.mode}
            row.details.setdefault("runs", []).append(settings | result)
    for fault in FAULTS:
        if fault in rows:
            rows[fault].details.get("runs", []).sort(key=lambda r: (r["mode"] == "eager", r["world"], r["stage"]))
            yield rows[fault]


def _side_by_side(chosen: list[Case], place: Path, jobs: int, alone: str) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Run the cases, ``jobs`` at a time; retry a run that is over before its fault, :data:`AGAIN` times."""
    waiting = [(case, AGAIN) for case in reversed(chosen)]
    running: list[tuple[Case, int, Child]] = []
    runs_started = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            case, retries = waiting.pop()
            if alone and FAULTS[case.fault].link:  # ``alone``: why no rank can have a network of its own
                yield case, {"skipped": alone}
                continue
            runs_started += 1
            child = start(run, case, place / str(runs_started), log=place / f"{runs_started}.log")
            running.append((case, retries, child))
        for case, retries, child in list(running):
            if child.poll():
                running.remove((case, retries, child))
                if child.code != 0:
                    raise RuntimeError(f"{case.name}: the run itself failed: {child.code} {child.error}")
                if not child.answer["happened"] and retries:
                    waiting.append((case, retries - 1))
                else:
                    yield case, child.answer
        time.sleep(0.01)
