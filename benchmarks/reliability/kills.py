"""SIGKILL at random moments of a training that saves every step; started again, it must go on as if never killed.

The model has dropout, the data come from a shuffling loader that resumes within an epoch, the rates from a LambdaLR.
Each training is killed several times, at moments drawn uniformly from the length of a run never killed. Weights,
momenta, moments, rates, losses and random numbers are compared with that run's, bit for bit, after every step. Where
state is in a file, nothing of it is left in its folder, and the bits are those of a run whose state is in memory.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import compile_muon
from compile_muon import Checkpointer

from .outcome import Request, Row, again
from .processes import Board, Child, join, rendezvous, start, watch

__all__ = ["campaign"]

STEPS = 12
TIMEOUT = 5.0
#: until a survivor must have ended: while a group is made, Gloo takes the time-out five times
PATIENCE = 40.0
KILLS, QUICK_KILLS = 200, 12
#: of one training, so that it comes to an end
AT_MOST = 6
PHASES = ("started", "made", "loading", "forward", "backward", "step", "saving", "finished")


class Net(nn.Module):
    """Uneven shards, an empty one, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 11)
        self.up, self.down = nn.Linear(11, 17), nn.Linear(17, 11, bias=False)
        self.norm, self.head = nn.LayerNorm(11), nn.Linear(11, 16)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) * self.scale
        h = h + F.dropout(self.down(F.dropout(self.up(h).relu(), 0.2)), 0.2)
        return self.head(self.norm(h))


class Loader:
    """Shuffled batches of a rank's part of a data set, epoch after epoch; goes on in the middle of one."""

    def __init__(self, rank: int, world: int, sequences: int = 40, batch: int = 4) -> None:
        data = torch.randint(0, 16, (sequences, 6), generator=torch.Generator().manual_seed(1))
        self._data, self._batch = data[rank::world], batch
        self._dice = torch.Generator().manual_seed(2 + rank)
        self._begin()

    def _begin(self) -> None:
        self._before, self._taken = self._dice.get_state(), 0
        self._order = torch.randperm(len(self._data), generator=self._dice)

    def __next__(self) -> Tensor:
        if self._taken + self._batch > len(self._order):
            self._begin()
        self._taken += self._batch
        return self._data[self._order[self._taken - self._batch : self._taken]]

    def state_dict(self) -> dict[str, Any]:
        return {"dice": self._before, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dice.set_state(state["dice"])
        self._begin()
        self._taken = state["taken"]


@dataclass(frozen=True)
class Setting:
    """How a training runs."""

    world: int
    stage: int
    compiled: bool
    asynchronous: bool
    offload: bool = False

    @property
    def name(self) -> str:
        ranks = "1 rank" if self.world == 1 else f"{self.world} ranks"
        saving = "asynchronous" if self.asynchronous else "synchronous"
        where = ", state in a file" if self.offload else ""
        return f"{ranks}, stage {self.stage}, {saving}, {'compiled' if self.compiled else 'eager'}{where}"


@dataclass
class Course:
    """What a run never killed went through.

    Args:
        digests: by rank and step, of all that the rank holds after so many steps.
        seconds: from its start to its end.
        training: from its start to its first step.
    """

    digests: list[dict[int, str]] = field(default_factory=list)
    seconds: float = 0.0
    training: float = 0.0


def digest(model: nn.Module, optimizer: compile_muon.MuonZero, losses: list[float]) -> str:
    """Of the bits of what this rank holds: weights, state, rates, losses, random numbers."""
    found: dict[str, Any] = dict(model.state_dict())
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            found |= {f"{name}/{slot}": value for slot, value in optimizer.state[param].items()}
    total = hashlib.sha256(repr((losses, [group["lr"] for group in optimizer.param_groups])).encode())
    for name, value in sorted(found.items()):
        local = (value.to_local() if isinstance(value, DTensor) else value).detach().contiguous()
        total.update(f"{name} {tuple(local.shape)} {local.dtype}".encode())
        total.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    return total.hexdigest()


def train(
    setting: Setting, rank: int, folder: Path | None, meeting: Path, board: Board, course: dict[int, str] | None,
    files: Path,
) -> dict[int, str]:  # fmt: skip
    """A rank, from its first to its last line. Gives the digest after every step that it made.

    Args:
        folder: of the checkpoints; None for a run that saves none.
        meeting: a file for the ranks to find each other by.
        course: the digests that are to be met.
        files: where state is, if it is to be in a file.
    """
    step = 0

    def enter(phase: str) -> None:
        board.write(rank, step, PHASES.index(phase))

    enter("started")
    if setting.world > 1:
        rendezvous(dist.FileStore(str(meeting), setting.world), rank, setting.world, TIMEOUT)
    torch.manual_seed(3)
    model = Net()
    offload = {"device": "nvme", "nvme_path": str(files), "buffer_bytes": 1} if setting.offload else None
    optimizer = compile_muon.MuonZero(
        model, stage=setting.stage, lr=0.02, momentum=0.9, ns_dtype="float32", muon_params=["up.weight", "down.weight"],
        offload=offload,
    )  # fmt: skip
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if setting.compiled else model
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done)
    loader = Loader(rank, setting.world)
    torch.manual_seed(4 + rank)  # dropout of a rank's own
    losses: list[float] = []
    found: dict[int, str] = {}
    checkpointer = None
    enter("made")
    if folder is not None:
        enter("loading")
        checkpointer = Checkpointer(folder, keep_last=2, asynchronous=setting.asynchronous)
        extra = checkpointer.load(model, optimizer, scheduler=scheduler, loader=loader)
        if extra is not None:
            step, losses = extra["done"], extra["losses"]
    while True:
        found[step] = digest(model, optimizer, losses)
        if course is not None and found[step] != course[step]:
            raise AssertionError(f"rank {rank}: not what a run never killed was after step {step}")
        if step == STEPS:
            break
        enter("forward")
        tokens = next(loader)
        loss = F.cross_entropy(run(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        enter("backward")
        loss.backward()
        enter("step")
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
        step += 1
        if checkpointer is not None:
            enter("saving")
            checkpointer.save(step, model, optimizer, scheduler=scheduler, loader=loader, done=step, losses=losses)
    if checkpointer is not None:
        enter("saving")
        checkpointer.wait()
    enter("finished")
    if setting.world > 1:
        dist.barrier()
    return found


class Incarnation:
    """All ranks of a training, from one start to the next."""

    def __init__(self, setting: Setting, folder: Path | None, place: Path, course: Course | None) -> None:
        self.board = Board(setting.world)
        self.began = time.monotonic()
        meeting = Path(tempfile.mkdtemp(dir=place)) / "meeting"
        self.files = place / "files"
        self.files.mkdir(exist_ok=True)
        self.ranks: list[Child] = []
        for rank in range(setting.world):
            expected = course.digests[rank] if course is not None else None
            arguments = (setting, rank, folder, meeting, self.board, expected, self.files)
            self.ranks.append(start(train, *arguments, log=place / f"rank-{rank}.log"))


def never_killed(setting: Setting, place: Path) -> Course:
    """The course of a training, with checkpoints in a folder of its own (they take their time), and no kill."""
    run = Incarnation(setting, place / "never", place, None)
    training = 0.0
    while not watch(run.ranks, time.monotonic() + 0.005):
        if not training and run.board.read(0)[1] >= PHASES.index("forward"):
            training = time.monotonic() - run.began
        if time.monotonic() > run.began + 120:
            break
    join(run.ranks, 0.0)
    for rank, child in enumerate(run.ranks):
        if child.code != 0:
            raise RuntimeError(f"{setting.name}: rank {rank} of a run without any fault: {child.code} {child.error}")
    return Course([child.answer for child in run.ranks], time.monotonic() - run.began, training)


def killed_until_done(setting: Setting, course: Course, dice: random.Random, place: Path, row: Row, left: int) -> int:
    """One training, killed at most ``left`` times; gives how often it was."""
    folder, kills = place / "checkpoints", 0
    landed = row.details.setdefault("killed in", {})
    ended = row.details.setdefault("survivors ended with", {})
    while True:
        run = Incarnation(setting, folder, place, course)
        moment = None
        if kills < min(left, AT_MOST):
            # A start takes longer than a step here, and means less.
            early = dice.random() < 0.15
            moment = run.began + (
                dice.uniform(0, course.training) if early else dice.uniform(course.training, course.seconds)
            )
        doomed = dice.choice([[0], [1], [0, 1]]) if setting.world == 2 else [0]
        if moment is None or watch(run.ranks, moment):
            late = join(run.ranks, PATIENCE)
            finish = [child.code for child in run.ranks]
            if any(finish) or late:
                said = "; ".join(child.error[1] for child in run.ranks if child.error)
                row.note("did not come to its end", wrong=True)
                row.details.setdefault("wrong", []).append(f"{finish} {said}")
            else:
                row.note("trainings ended bit for bit as never killed")
            return kills
        writing = folder.is_dir() and any(entry.name.endswith(".tmp") for entry in folder.iterdir())
        for rank in doomed:
            run.ranks[rank].kill()
        at = time.monotonic()
        phase = PHASES[run.board.read(doomed[0])[1]]
        where = f"{phase}, while writing behind it" if writing and phase in ("forward", "backward", "step") else phase
        landed[where] = landed.get(where, 0) + 1
        kills += 1
        late = join(run.ranks, PATIENCE)
        seconds = max(child.ended for child in run.ranks) - at
        survivors = [rank for rank in range(setting.world) if rank not in doomed]
        if behind := [entry.name for entry in run.files.iterdir()]:
            row.note("left files behind", wrong=True)
            row.details.setdefault("wrong", []).append(", ".join(behind))
        outcome, wrong = "no survivor", False
        for rank in survivors:
            child = run.ranks[rank]
            outcome, wrong = _judged(child, late, PHASES[run.board.read(rank)[1]])
            kind = "nothing" if child.error is None else child.error[0][0]
            ended[kind] = ended.get(kind, 0) + 1
            if wrong:
                row.details.setdefault("wrong", []).append(f"{outcome}: {child.code} {child.error}")
        row.count(outcome, wrong=wrong, seconds=seconds)


def _judged(child: Child, late: list[Child], phase: str) -> tuple[str, bool]:
    """What became of a survivor, and whether it should not have."""
    if child in late:
        return "the survivor hung", True
    if child.code == 0:
        return "the survivor had finished", phase != "finished"
    if child.error is None:
        return f"the survivor was aborted ({child.code})", True
    if "AssertionError" in child.error[0]:
        return "the survivor had loaded something else", True
    # In training it is PyTorch's own error of a lost connection; in a checkpoint it must be ours.
    if phase in ("loading", "saving") and "CheckpointError" not in child.error[0]:
        return f"the survivor ended in a save with {child.error[0][0]}", True
    return "the survivor ended by itself", False


def settings(quick: bool) -> list[Setting]:
    """One rank or two, all stages, saving in front or behind; most eager, which is faster, some compiled."""
    found = [Setting(2, stage, False, behind) for stage in range(4) for behind in (False, True)]
    found += [Setting(1, 0, False, behind) for behind in (False, True)]
    found += [Setting(2, 3, True, True), Setting(2, 1, True, False)]
    found += [Setting(2, 3, True, True, True), Setting(2, 2, False, False, True), Setting(1, 0, False, True, True)]
    return [found[1], found[6], found[9], found[13]] if quick else found


def campaign(request: Request) -> Iterator[Row]:
    """A row for each setting."""
    chosen = [setting for setting in settings(request.quick) if request.wants(setting.name)]
    total = request.runs or (QUICK_KILLS if request.quick else KILLS)
    courses: dict[tuple[int, int, bool], Course] = {}
    for index, setting in enumerate(chosen):
        row = Row("kills", setting.name, again("kills", request, setting.name))
        wanted = total * (index + 1) // len(chosen) - total * index // len(chosen)
        with tempfile.TemporaryDirectory() as place:
            own = never_killed(setting, Path(place))
        # Saving in front or behind, and where state is, decide nothing but the time.
        key = setting.world, setting.stage, setting.compiled
        if setting.offload and key not in courses:
            with tempfile.TemporaryDirectory() as place:
                courses[key] = never_killed(replace(setting, offload=False), Path(place))
        course = courses.setdefault(key, own)
        if own.digests != course.digests:
            row.note("trained otherwise than with other saves, or with state in memory", wrong=True)
        own.digests = course.digests
        training = kills = 0
        while kills < wanted:
            dice = random.Random(f"{request.seed} {setting.name} {training}")
            training += 1
            with tempfile.TemporaryDirectory() as place:
                kills += killed_until_done(setting, own, dice, Path(place), row, wanted - kills)
        row.details |= {"trainings": training, "seconds of a run never killed": round(own.seconds, 2)}
        yield row
