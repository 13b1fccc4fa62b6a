"""SIGKILL at random moments of a training that saves every step; restarted, it must go on as if never killed.

The model has dropout, the data come from a shuffling loader that resumes within an epoch, the rates from a LambdaLR.
Each training is killed several times, at moments drawn uniformly from the length of a run never killed. Weights,
momenta, moments, rates, losses and random numbers are compared with that run's, bit for bit, after every step. State in
a file must leave nothing in its folder, and give the bits of state in memory.
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
#: seconds until a survivor must have ended: while a group is made, Gloo waits for five time-outs
PATIENCE = 40.0
KILLS, QUICK_KILLS = 200, 12
#: kills of one training, so that it ends
AT_MOST = 6
PHASES = ("started", "made", "loading", "forward", "backward", "step", "saving", "finished")


class Net(nn.Module):
    """A model with uneven shards, an empty one, and dropout."""

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
    """A loader of shuffled batches of a rank's part of a data set, which resumes within an epoch."""

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
    """The setting of a training."""

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
    """The course of a run never killed."""

    digests: list[dict[int, str]] = field(default_factory=list)  # of each rank, by number of steps
    seconds: float = 0.0  # from start to end
    training: float = 0.0  # seconds from start to first step


def digest(model: nn.Module, optimizer: compile_muon.MuonZero, losses: list[float]) -> str:
    """Hash the bits that this rank holds: weights, state, rates, losses, random numbers."""
    tensors: dict[str, Any] = dict(model.state_dict())
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            tensors |= {f"{name}/{slot}": value for slot, value in optimizer.state[param].items()}
    total = hashlib.sha256(repr((losses, [group["lr"] for group in optimizer.param_groups])).encode())
    for name, value in sorted(tensors.items()):
        local = (value.to_local() if isinstance(value, DTensor) else value).detach().contiguous()
        total.update(f"{name} {tuple(local.shape)} {local.dtype}".encode())
        total.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    return total.hexdigest()


def train(
    setting: Setting, rank: int, folder: Path | None, meeting: Path, board: Board, course: dict[int, str] | None,
    files: Path,
) -> dict[int, str]:  # fmt: skip
    """Run a rank from start to end; return the digest after every step, which has to be that of ``course``.

    ``folder`` takes checkpoints, None saves none; ``files`` takes offloaded state.
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
    torch.manual_seed(4 + rank)  # each rank has its own dropout
    losses: list[float] = []
    digests: dict[int, str] = {}
    checkpointer = None
    enter("made")
    if folder is not None:
        enter("loading")
        checkpointer = Checkpointer(folder, keep_last=2, asynchronous=setting.asynchronous)
        extra = checkpointer.load(model, optimizer, scheduler=scheduler, loader=loader)
        if extra is not None:
            step, losses = extra["done"], extra["losses"]
    while True:
        digests[step] = digest(model, optimizer, losses)
        if course is not None and digests[step] != course[step]:
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
    return digests


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
    """Return the course of a training without a kill; it saves checkpoints, too, for their time."""
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
    """Run one training to its end, killed at most ``left`` times; return the number of kills."""
    folder, kills = place / "checkpoints", 0
    phases = row.details.setdefault("killed in", {})
    errors = row.details.setdefault("survivors ended with", {})
    while True:
        run = Incarnation(setting, folder, place, course)
        moment = None
        if kills < min(left, AT_MOST):
            # Few kills before the first step: a start takes longer than a step here, but tests less.
            early = dice.random() < 0.15
            moment = run.began + (
                dice.uniform(0, course.training) if early else dice.uniform(course.training, course.seconds)
            )
        doomed = dice.choice([[0], [1], [0, 1]]) if setting.world == 2 else [0]
        if moment is None or watch(run.ranks, moment):
            late = join(run.ranks, PATIENCE)
            finish = [child.code for child in run.ranks]
            if any(finish) or late:
                messages = "; ".join(child.error[1] for child in run.ranks if child.error)
                row.note("did not come to its end", wrong=True)
                row.details.setdefault("wrong", []).append(f"{finish} {messages}")
            else:
                row.note("trainings ended bit for bit as never killed")
            return kills
        writing = folder.is_dir() and any(entry.name.endswith(".tmp") for entry in folder.iterdir())
        for rank in doomed:
            run.ranks[rank].kill()
        at = time.monotonic()
        phase = PHASES[run.board.read(doomed[0])[1]]
        where = f"{phase}, while writing behind it" if writing and phase in ("forward", "backward", "step") else phase
        phases[where] = phases.get(where, 0) + 1
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
            errors[kind] = errors.get(kind, 0) + 1
            if wrong:
                row.details.setdefault("wrong", []).append(f"{outcome}: {child.code} {child.error}")
        row.count(outcome, wrong=wrong, seconds=seconds)


def _judged(child: Child, late: list[Child], phase: str) -> tuple[str, bool]:
    """Return the outcome of a survivor, and whether it is wrong."""
    if child in late:
        return "the survivor hung", True
    if child.code == 0:
        return "the survivor had finished", phase != "finished"
    if child.error is None:
        return f"the survivor was aborted ({child.code})", True
    if "AssertionError" in child.error[0]:
        return "the survivor had loaded something else", True
    # In training PyTorch raises its error of a lost connection; in a checkpoint the error must be a CheckpointError.
    if phase in ("loading", "saving") and "CheckpointError" not in child.error[0]:
        return f"the survivor ended in a save with {child.error[0][0]}", True
    return "the survivor ended by itself", False


def settings(quick: bool) -> list[Setting]:
    """List settings: one rank or two, all stages, both ways to save; most are eager, which is faster."""
    everything = [Setting(2, stage, False, asynchronous) for stage in range(4) for asynchronous in (False, True)]
    everything += [Setting(1, 0, False, asynchronous) for asynchronous in (False, True)]
    everything += [Setting(2, 3, True, True), Setting(2, 1, True, False)]
    everything += [Setting(2, 3, True, True, True), Setting(2, 2, False, False, True), Setting(1, 0, False, True, True)]
    return [everything[1], everything[6], everything[9], everything[13]] if quick else everything


def campaign(request: Request) -> Iterator[Row]:
    """Yield a row for each setting."""
    chosen = [setting for setting in settings(request.quick) if request.wants(setting.name)]
    total = request.runs or (QUICK_KILLS if request.quick else KILLS)
    courses: dict[tuple[int, int, bool], Course] = {}
    for index, setting in enumerate(chosen):
        row = Row("kills", setting.name, again("kills", request, setting.name))
        kill_count = total * (index + 1) // len(chosen) - total * index // len(chosen)
        with tempfile.TemporaryDirectory() as place:
            unkilled = never_killed(setting, Path(place))
        # The way to save and the place of the state change times only, so digests are those of any such course.
        key = setting.world, setting.stage, setting.compiled
        if setting.offload and key not in courses:
            with tempfile.TemporaryDirectory() as place:
                courses[key] = never_killed(replace(setting, offload=False), Path(place))
        course = courses.setdefault(key, unkilled)
        if unkilled.digests != course.digests:
            row.note("trained otherwise than with other saves, or with state in memory", wrong=True)
        unkilled.digests = course.digests
        training = kills = 0
        while kills < kill_count:
            dice = random.Random(f"{request.seed} {setting.name} {training}")
            training += 1
            with tempfile.TemporaryDirectory() as place:
                kills += killed_until_done(setting, unkilled, dice, Path(place), row, kill_count - kills)
        row.details |= {"trainings": training, "seconds of a run never killed": round(unkilled.seconds, 2)}
        yield row
