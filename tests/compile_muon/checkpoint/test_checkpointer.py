"""One process: what is on the disk when, what is kept, and what damage does."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability.damage import KINDS, OLDER, REFUSED, Bomb, Run, States, attempt, empty, flip, resign, save_two
from torch import nn

import compile_muon
from compile_muon import Checkpointer, CheckpointError
from compile_muon.__main__ import main

Saved = tuple[Path, States]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with the checkpoints of steps 1 and 2, and what was saved in them."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, save_two(folder)


# ----------------------------------------------------------------------------------------------- the folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    run = Run()
    before = run.state()
    checkpointer = Checkpointer(tmp_path / "none")
    assert checkpointer.load(run.model, run.optimizer) is None
    assert checkpointer.steps() == [] and run.is_at(before) and not (tmp_path / "none").exists()
    with pytest.raises(CheckpointError, match="step = 3: .*none"):
        checkpointer.load(run.model, run.optimizer, step=3)


def test_the_last_ones_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    run = Run()
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    checkpointer.save(1, run.model, run.optimizer, at=1)
    for name in ("step-7.tmp", "step-1.removed.tmp", "step-9.replaced.removed.tmp"):
        shutil.copytree(tmp_path / "step-1", tmp_path / name)
    checkpointer._folder.begin(8)  # and killed
    for name in ("mine.tmp", "step-x"):
        (tmp_path / name).mkdir()
    for step in (2, 10):
        checkpointer.save(step, run.model, run.optimizer, at=step)
    assert names(tmp_path) == ["mine.tmp", "step-10", "step-2", "step-x"]
    assert checkpointer.steps() == [2, 10]
    assert checkpointer.load(run.model, run.optimizer, step=2) == {"at": 2}
    with pytest.warns(UserWarning, match="step 5 was saved, and step 10 of another run"):
        checkpointer.save(5, run.model, run.optimizer, at=5)
    assert checkpointer.steps() == [5, 10]
    with pytest.warns(UserWarning, match="step 10 of another run"):
        Checkpointer(tmp_path, keep_last=1).save(6, run.model, run.optimizer, at=6)
    assert checkpointer.steps() == [6, 10]  # the one just saved is not the one to go


#: what others may have put there, by what makes it
STRANGERS: dict[str, Any] = {
    "a folder": lambda path, other: (path.mkdir(), (path / ".metadata").write_text("theirs")),
    "a folder with a manifest": lambda path, other: (path.mkdir(), (path / "manifest.json").write_text("{}")),
    "a file": lambda path, other: path.write_text("theirs"),
    "a link to a checkpoint": lambda path, other: path.symlink_to(other),
    "a dangling link": lambda path, other: path.symlink_to("nowhere"),
    "a pipe": lambda path, other: os.mkfifo(path),
}


def everything(folder: Path) -> dict[str, Any]:
    """Each name below a folder, and what it is."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else path.stat().st_mode
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_others_put_there_stays_and_what_is_in_the_way_is_named(saved: Saved, tmp_path: Path, kind: str) -> None:
    run, folder, other = Run(), tmp_path / "mine", tmp_path / "other"
    shutil.copytree(saved[0] / "step-1", other)
    folder.mkdir()
    places = ["step-3", "step-4.tmp", "step-5.replaced", "step-6.removed.tmp"]
    for name in places:
        STRANGERS[kind](folder / name, other)
    before, outside = everything(folder), everything(other)
    checkpointer = Checkpointer(folder, keep_last=1)
    for step in (1, 2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*step 3 of another run")
            checkpointer.save(step, run.model, run.optimizer)
    assert {"step-2"} | set(places) == set(names(folder))
    for step, name in ((3, "step-3"), (4, "step-4.tmp"), (5, "step-5.replaced")):
        with pytest.raises(CheckpointError, match=f"{folder}/{name}: is in the way"):
            checkpointer.save(step, run.model, run.optimizer)
    now = everything(folder)
    assert {name: now.get(name) for name in before} == before and everything(other) == outside


def test_a_step_can_be_saved_again_and_a_crash_within_loses_nothing(tmp_path: Path) -> None:
    run = Run()
    checkpointer = Checkpointer(tmp_path)
    for text in ("first", "second"):
        checkpointer.save(4, run.model, run.optimizer, text=text)
    assert names(tmp_path) == ["step-4"] and checkpointer.load(run.model, run.optimizer) == {"text": "second"}
    (tmp_path / "step-4").rename(tmp_path / "step-4.replaced")  # killed between the two renames
    assert checkpointer.steps() == [4] and checkpointer.load(run.model, run.optimizer) == {"text": "second"}
    checkpointer.save(5, run.model, run.optimizer)
    assert names(tmp_path) == ["step-4", "step-5"]


def test_all_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    sync, rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        events.append(("sync", os.fstat(handle).st_ino))
        sync(handle)

    def renamed(self: Path, target: Path) -> Path:
        events.append(("rename", os.stat(self).st_ino))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    run = Run()
    Checkpointer(tmp_path).save(1, run.model, run.optimizer)
    place = tmp_path / "step-1"
    commit = events.index(("rename", os.stat(place).st_ino))
    within = {os.stat(path).st_ino for path in (place, *place.rglob("*"))}
    assert len(within) >= 8  # a manifest, three folders, and tensors and values in four files
    assert within <= {node for what, node in events[:commit] if what == "sync"}
    assert ("sync", os.stat(tmp_path).st_ino) in events[commit:]
    written = [node for what, node in events[:commit] if what == "sync" and node in within]
    files = [os.stat(path).st_ino for path in place.glob("*/*")]
    assert max(written.index(node) for node in files) < written.index(os.stat(place / "manifest.json").st_ino)


def test_what_cannot_be_saved_is_said_and_harms_nothing(tmp_path: Path) -> None:
    run = Run()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, run.model, run.optimizer)
    with pytest.raises(CheckpointError, match="step 2 was not saved: extra.a.b = <object"):
        checkpointer.save(2, run.model, run.optimizer, a={"b": object()})
    with pytest.raises(CheckpointError, match="model: does not hold 0.weight"):
        checkpointer.save(2, run.model[2], run.optimizer)
    for field, arguments in (("keep_last", {"keep_last": 0}), ("asynchronous", {"asynchronous": 1})):
        with pytest.raises(compile_muon.ConfigError, match=field):
            Checkpointer(tmp_path, **arguments)  # type: ignore[arg-type]
    assert names(tmp_path) == ["step-1"]


def test_module_state_and_scheduler_come_back(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    model = nn.Sequential(Counting(3, 3), nn.Linear(3, 3))
    optimizer = compile_muon.MuonZero(model, stage=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    model[0].seen = 5
    optimizer.step()
    schedule.step()
    checkpointer, rates = Checkpointer(tmp_path), [group["lr"] for group in optimizer.param_groups]
    checkpointer.save(1, model, optimizer, scheduler=schedule)
    model[0].seen = 6
    schedule.step()
    assert checkpointer.load(model, optimizer, scheduler=schedule) == {}
    assert model[0].seen == 5 and schedule.last_epoch == 1
    assert rates == [group["lr"] for group in optimizer.param_groups]


# -------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage_is_an_error_or_the_one_before(saved: Saved, tmp_path: Path, kind: Any, seed: int) -> None:
    """``benchmarks/faults.py damage`` tries 200."""
    assert attempt(*saved, tmp_path / "damaged", kind, seed) in (OLDER, REFUSED)


def test_what_does_no_damage_is_told_apart(saved: Saved, tmp_path: Path) -> None:
    """So the check above can fail; and a pickle that is unpickled explodes."""
    assert attempt(*saved, tmp_path / "whole", lambda place, dice: None, 0) == "WRONG: loaded"
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


def test_when_none_is_whole_training_does_not_begin_anew(saved: Any, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved[0], folder)
    for step in (1, 2):
        empty(folder / f"step-{step}", random.Random(step))
    run = Run()
    with pytest.raises(CheckpointError, match="no checkpoint is whole.*step-2.*step-1"):
        Checkpointer(folder).load(run.model, run.optimizer)


def test_a_later_format_is_not_passed_over(saved: Any, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    shutil.copytree(saved[0], folder)
    resign(folder / "step-2", lambda body: body.update(version=2))
    run = Run()
    with pytest.raises(CheckpointError, match="format version = 2: .*knows version 1"):
        Checkpointer(folder).load(run.model, run.optimizer)


# ------------------------------------------------------------------------------------------ the command line


def test_commands(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved[0], folder)

    def said(*arguments: str) -> tuple[int, str]:
        code = main(["checkpoint", *arguments])
        return code, capsys.readouterr().out

    assert said("verify", str(folder)) == (0, "step 1: whole, 5 files\nstep 2: whole, 5 files\n")
    flip(folder / "step-2", random.Random(0))
    code, text = said("verify", str(folder))
    assert code == 1 and text.startswith("step 1: whole") and f"step 2: damaged: {folder}" in text
    assert said("verify", str(folder), "--step", "1")[0] == 0
    assert said("list", str(folder))[1].count("\n") == 3
    code, text = said("inspect", str(folder), "--step", "1")
    assert code == 0 and "0.weight" in text and "muon" in text and "1 ranks at ZeRO stage 0" in text
    assert said("export", str(folder), "--out", str(tmp_path / "out"))[0] == 1
    assert not (tmp_path / "out").exists()
    assert said("export", str(folder), "--step", "1", "--out", str(tmp_path / "out"))[0] == 0
    assert said("list", str(tmp_path / "nothing")) == (1, f"{tmp_path}/nothing: no checkpoint\n")
    assert said("verify", str(folder), "--step", "9")[0] == 1


@pytest.mark.full
def test_an_error_behind_training_is_told_at_the_end(tmp_path: Path) -> None:
    code = f"""
import torch, compile_muon
model = torch.nn.Sequential(torch.nn.Linear(2, 3))
optimizer = compile_muon.MuonZero(model, stage=0)
open({str(tmp_path / "file")!r}, "w").close()
checkpointer = compile_muon.Checkpointer({str(tmp_path / "file" / "folder")!r}, asynchronous=True)
checkpointer.save(1, model, optimizer)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "CheckpointError: checkpoint of step 1 was not saved: NotADirectoryError" in done.stderr
