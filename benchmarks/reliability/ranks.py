"""One rank of two or three does something else in its fourth step: what do all of them end with?

    right       training went on, and every rank's parameters are those of one process that trains on all batches
    named       every survivor ended in time with an error that names the faulty rank, and the step if there was one
    unnamed     ... with an error that does not
    refused     the same, of something that training should have borne
    WRONG       it ran on with other parameters
    hung        a survivor still waited 5 s after the time-out
    aborted     a survivor was ended by a signal: Gloo's own thread meets a message of another length
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
#: seconds beyond the time-out after which a rank that neither ended nor went on hangs
GRACE = 5.0
#: for all of a run, with everything compiled on a busy machine
PATIENCE = 90.0
#: how often a run is tried anew that was over before its fault happened
AGAIN = 2
#: relative Frobenius: other orders of summation reach 1e-6, the least of the faults 1e-4
TOLERANCE = 1e-5
RUNNING, COMPLETED = 0, 1
_KEPT = 400  # characters of a message in the record
#: places of faults that are there before the first step
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
    """Four equal blocks, and plain Python between them where faults are put.

    Args:
        inner: width of a block.
        last: name of the last layer.
    """

    def __init__(self, inner: int = 14, last: str = "head") -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(4))
        self.add_module(last, nn.Linear(WIDTH, 16))
        self.last = last
        self.order = list(range(4))
        self.between: Callable[[int, Tensor], None] | None = None

    def frames(self) -> list[nn.Module]:
        """What is compiled, each by itself."""
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
    """One run.

    Args:
        fault: its name.
        mode: "frames" compiles each block by itself, "eager" none.
        arguments: of the optimizer, on every rank.
    """

    fault: str
    stage: int
    world: int
    mode: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.fault}, stage {self.stage}, {self.world} ranks, {self.mode}"


class Training:
    """A rank's training, or with ``alone`` that of one process on the batches of all ranks."""

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
            settings.pop("check_replicas", None)  # there are none
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
        dice = torch.Generator().manual_seed(10_000 * self.step + 100 * micro + rank)
        return torch.randint(0, 16, (4, 9 if longer else 5), generator=dice)

    def _loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / self.micros

    def forward(self, micro: int) -> Tensor:
        """The loss of a micro-batch; of all ranks, if this is the only process."""
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
        """One step of the loop, with the fault if this is its rank and step.

        Args:
            happened: called right before the fault is put in.
        """
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
        """This rank's parameters, and the whole copies of stages 1 and 2 under their names with a colon."""
        found = {}
        for sharded in self.optimizer.engine.params:
            param = sharded.param.detach()
            found[sharded.name] = (param.to_local() if isinstance(param, DTensor) else param).clone()
            if sharded.resident is not None:
                sharded.await_refresh()
                found[f":{sharded.name}"] = sharded.resident.detach().clone()
        return found


def train(case: Case, rank: int, port: int, board: Board, place: Path, address: str, interface: str) -> None:
    """A rank."""

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
    # A rank that left now would be the others' error.
    until = time.monotonic() + TIMEOUT + GRACE + 5.0
    while time.monotonic() < until:
        time.sleep(0.02)


def worst_error(case: Case, place: Path) -> float:
    """The largest relative error of a parameter of any rank, beside one process that trained on all batches."""
    twin = Training(replace(case, mode="eager"), 0, alone=True)
    while twin.step < STEPS:
        twin.run_step(lambda: None)
    ranks = [
        torch.load(place / f"rank-{rank}.pt") for rank in range(case.world) if (place / f"rank-{rank}.pt").exists()
    ]
    worst = 0.0
    for name, wanted in twin.model.named_parameters():
        whole = [held[name] for held in ranks]
        if whole[0].shape != wanted.shape:
            whole = [torch.cat(whole)]  # of shards, which are in the order of ranks
        for found in (*whole, *(held[f":{name}"] for held in ranks if f":{name}" in held)):
            if found.shape != wanted.shape:
                return float("inf")
            error = float((found.float() - wanted.detach()).norm() / wanted.detach().norm())
            worst = max(worst, error) if error == error else float("inf")
    return worst


def run(case: Case, place: Path) -> dict[str, Any]:
    """One run, in a process that forks the ranks, watches them and says what became of it."""
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
    survivors = [rank for rank in range(case.world) if not (fault and fault.lost and rank == FAULTY)]
    began = time.monotonic()

    def over(rank: int) -> bool:
        return children[rank].poll() or board.read(rank)[1] == COMPLETED

    # A rank that computes (it may have to compile anew, on a busy machine) does not hang.
    computed = {rank: 0.0 for rank in survivors}
    active = 0.0
    while not all([over(rank) for rank in survivors]):
        for rank in survivors:
            if (used := children[rank].cpu_seconds()) > computed[rank] + 0.5:
                computed[rank], active = used, time.monotonic()
        happened = board.read(case.world)[2]
        since = max([happened, active, *(board.read(rank)[2] for rank in survivors)])
        if time.monotonic() > min(since + TIMEOUT + GRACE if happened else math.inf, began + PATIENCE):
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
    # Where compiling on a busy machine takes longer than the time-out, a run may be over before.
    found: dict[str, Any] = {"ranks": ranks, "parameters differ by": None, "happened": bool(happened)}
    if all(ranks[rank]["ended"] == "completed" for rank in survivors):
        found["parameters differ by"] = worst_error(case, place)
    found |= classified(fault, [r for r in ranks if r["survivor"]], found["parameters differ by"])
    for record in ranks:
        record["message"] = record["message"][:_KEPT]
    return found


def _last_words(log: Path) -> str:
    """What C++ says of an exception that nothing caught."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if "what():" in line), "")


def names_rank(message: str) -> bool:
    """Whether a message names the faulty rank: "rank 1", "ranks 0, 1", "ranks [1]"."""
    lists = re.findall(r"\branks? \[?((?:\d+(?:, | and |,)?)+)", message)
    return any(str(FAULTY) in re.findall(r"\d+", numbers) for numbers in lists)


def names_step(message: str, *, late: bool) -> bool:
    """Whether a message names the step of the fault, counted from 0 or 1; one more if a rank was ``late``."""
    named = {int(number) for number in re.findall(r"\bstep (\d+)\b", message)}
    return not named.isdisjoint(range(FAULT_STEP, FAULT_STEP + 2 + late))


def classified(fault: Fault | None, survivors: list[dict[str, Any]], error: float | None) -> dict[str, Any]:
    """The outcome, as the top of this file says, and whether it should not have been."""
    ways = {rank["ended"] for rank in survivors}
    borne = fault is None or fault.legitimate
    if "hung" in ways:
        return {"outcome": "hung", "bad": True}
    at_start = fault is not None and fault.place in AT_START
    raised = [rank["message"] for rank in survivors if rank["ended"] == "raised"]
    late = any(rank["step"] > (0 if at_start else FAULT_STEP) for rank in survivors)
    named = all(names_rank(message) and (at_start or names_step(message, late=late)) for message in raised)
    if any(way.startswith("ended with") for way in ways):
        told = named and bool(raised) and ways <= {"raised", "ended with -6"}
        return {"outcome": "aborted, named" if told else "aborted", "bad": not told}
    if error is not None:
        right = error <= TOLERANCE
        return {"outcome": "right" if right else "WRONG", "bad": not right}
    if "completed" in ways:
        # Those that ended well did so without the others.
        return {"outcome": "WRONG", "bad": True}
    if borne:
        return {"outcome": "refused", "bad": True}
    return {"outcome": ("named" if named else "unnamed") + (", late" if late else ""), "bad": not named}


# --------------------------------------------------------------------------------------------- networks


def cannot_isolate() -> str:
    """Why no rank can have a network of its own here; empty if it can."""
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
    """Give this process, and its forks, users and a network of their own."""
    user, group = os.getuid(), os.getgid()
    _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _ip("link set lo up")


def _behind_a_link(go: int, then: Callable[[int], None]) -> None:
    """A rank with a network of its own; waits for the port of the store."""
    _unshare(_CLONE_NEWNET)
    _ip("link set lo up")
    port = int(os.read(go, 16))
    _ip(f"addr add {_THERE}/24 dev there")
    _ip("link set there up")
    then(port)


def join_networks(pid: int) -> None:
    """A cable between our network and that of ``pid``, once it has one."""
    ours = os.stat("/proc/self/ns/net").st_ino
    until = time.monotonic() + 10.0
    while os.stat(f"/proc/{pid}/ns/net").st_ino == ours and time.monotonic() < until:
        time.sleep(0.01)
    _ip(f"link add here type veth peer name there netns {pid}")
    _ip(f"addr add {_HERE}/24 dev here")
    _ip("link set here up")


# ---------------------------------------------------------------------------------------------- campaign


def cases(request: Request) -> list[Case]:
    """All faults at all stages, compiled on two ranks; at stage 3 on three, too, and eagerly."""
    wanted = [name for name in FAULTS if (FAULTS[name].quick or not request.quick) and request.wants(name)]
    if request.quick or request.stages or request.world:
        ways = [(stage, request.world or 2, "frames") for stage in request.stages or (3,)]
    else:
        ways = [*((stage, 2, "frames") for stage in range(4)), (3, 3, "frames"), (3, 2, "eager")]
    return [Case(name, *way, request.arguments) for way in ways for name in wanted]


def campaign(request: Request) -> Iterator[Row]:
    """A row for each fault, over all stages, worlds and modes; the runs are in its details."""
    chosen = cases(request)
    random.Random(request.seed).shuffle(chosen)  # those that wait and those that compute, mixed
    alone = cannot_isolate() if any(FAULTS[case.fault].link for case in chosen) else ""
    rows: dict[str, Row] = {}
    for case in chosen:
        rows.setdefault(case.fault, Row("ranks", case.fault, again("ranks", request, case.fault)))
    with tempfile.TemporaryDirectory() as place:
        for case, found in _side_by_side(chosen, Path(place), request.jobs, alone):
            row = rows[case.fault]
            if "skipped" in found:
                row.details["skipped"] = found["skipped"]
                continue
            if not found.pop("happened"):
                found["outcome"], found["bad"] = "over before the fault", True
            seconds = [rank["seconds"] for rank in found["ranks"] if rank["survivor"]]
            row.count(found["outcome"], wrong=found["bad"], seconds=max(seconds))
            how = {"stage": case.stage, "world": case.world, "mode": case.mode}
            row.details.setdefault("runs", []).append(how | found)
    for fault in FAULTS:
        if fault in rows:
            rows[fault].details.get("runs", []).sort(key=lambda r: (r["mode"] == "eager", r["world"], r["stage"]))
            yield rows[fault]


def _side_by_side(chosen: list[Case], place: Path, jobs: int, alone: str) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Run them, ``jobs`` at a time; again where a run is over before its fault happened, :data:`AGAIN` times."""
    waiting = [(case, AGAIN) for case in reversed(chosen)]
    running: list[tuple[Case, int, Child]] = []
    started = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            case, left = waiting.pop()
            if alone and FAULTS[case.fault].link:
                yield case, {"skipped": alone}
                continue
            started += 1
            child = start(run, case, place / str(started), log=place / f"{started}.log")
            running.append((case, left, child))
        for case, left, child in list(running):
            if child.poll():
                running.remove((case, left, child))
                if child.code != 0:
                    raise RuntimeError(f"{case.name}: the run itself failed: {child.code} {child.error}")
                if not child.answer["happened"] and left:
                    waiting.append((case, left - 1))
                else:
                    yield case, child.answer
        time.sleep(0.01)
