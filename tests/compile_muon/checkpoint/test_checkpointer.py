"""One process: what is on the disk when, what is kept, and what damage does."""

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from reliability.damage import KINDS, OLDER, REFUSED, Run, States, attempt, empty, facts_of, flip, resign, save_two
from torch import nn

import compile_muon
from compile_muon import Checkpointer, CheckpointError
from compile_muon.__main__ import main
from compile_muon.checkpoint.dice import check_random_state, random_state, set_random_state
from compile_muon.checkpoint.folder import LOCK
from compile_muon.checkpoint.optimizer_state import full_optimizer_state, load_full_optimizer_state

Saved = tuple[Path, States]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with the checkpoints of steps 1 and 2, and what was saved in them."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, save_two(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


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
        str(path): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else path.stat().st_mode
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
            warnings.simplefilter("error")
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
    assert len(within) == 7  # a manifest, three folders, and tensors and values in three files
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
            Checkpointer(tmp_path, **arguments)
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage_is_an_error_or_the_one_before(saved: Saved, tmp_path: Path, kind: Any, seed: int) -> None:
    """``benchmarks/faults.py damage`` tries 200."""
    assert attempt(*saved, tmp_path / "damaged", kind, seed) in (OLDER, REFUSED)


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


def edit_values(place: Path, name: str, change: Any) -> None:
    path = place / "state" / f"{name}.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    resign(place)


VALUES: dict[str, tuple[str, Any]] = {
    "no mapping": ("rank-00000", lambda body: body.update({"group.muon": [1]})),
    "a rate that is text": ("rank-00000", lambda body: body["group.muon"].update(lr="0.1")),
    "a rate that is NaN": ("rank-00000", lambda body: body["group.muon"].update(lr={"!": "float", "value": "nan"})),
    "betas of three": ("rank-00000", lambda body: body["group.adamw_no_decay"].update(betas=[0.9, 0.9, 0.9])),
    "another algorithm": ("rank-00000", lambda body: body["group.muon"].update(algorithm="adamw")),
    "no group": ("rank-00000", lambda body: body.pop("group.muon")),
    "one group more": ("rank-00000", lambda body: body.update({"group.more": {}})),
    "other members": ("rank-00000", lambda body: body["members"].update(muon=[], adamw_no_decay=["0.weight"])),
    "a word nobody knows": ("rank-00000", lambda body: body.update({"extra.note": {"!": "pickle", "items": 1}})),
    "Python's generator": ("rank-00000", lambda body: body["random"].update(python=[3])),
    "NumPy's generator": ("rank-00000", lambda body: body["random"].update(numpy=["PCG65", [1], 2, 0, 0.0])),
    "torch's generator": ("rank-00000", lambda body: body["random"].update(torch=1)),
    "no generators": ("rank-00000", lambda body: body.update(random=[])),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_cannot_be_taken_leaves_all_as_it_was(saved: Saved, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(saved[0], folder)
    edit_values(folder / "step-2", *VALUES[kind])
    run = Run(seed=9)
    run.train()
    before, dice, groups = run.state(), random.getstate(), [dict(g) for g in run.optimizer.param_groups]
    with pytest.raises(CheckpointError, match=f"{folder}/step-2"):
        Checkpointer(folder).load(run.model, run.optimizer)
    assert run.is_at(before) and dice == random.getstate()
    assert [{**g, "params": 0} for g in groups] == [{**g, "params": 0} for g in run.optimizer.param_groups]


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_any_generator_of_numpy_goes_on(tmp_path: Path, kind: str) -> None:
    run = Run()
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(getattr(numpy.random, kind)(3))
        numpy.random.normal()  # keeps a second number for the next call
        Checkpointer(tmp_path).save(1, run.model, run.optimizer)
        expected = numpy.random.normal(size=3).tolist()
        for other in (kind, "MT19937", "PCG64"):
            numpy.random.set_bit_generator(getattr(numpy.random, other)(4))
            Checkpointer(tmp_path).load(run.model, run.optimizer)
            assert numpy.random.normal(size=3).tolist() == expected
    finally:
        numpy.random.set_bit_generator(before)


def test_a_state_of_numpy_in_the_words_of_earlier_checkpoints_is_taken() -> None:
    numpy.random.seed(3)
    kind, key, *rest = numpy.random.get_state()
    state = random_state() | {"numpy": (kind, key.tolist(), *rest)}
    expected = numpy.random.rand()
    check_random_state(state)
    set_random_state(state)
    assert numpy.random.rand() == expected


def test_random_numbers_in_a_file_of_their_own_are_those_of_earlier_checkpoints(saved: Saved, tmp_path: Path) -> None:
    def drawn(folder: Path) -> tuple[float, list[float]]:
        run = Run()
        Checkpointer(folder).load(run.model, run.optimizer)
        return random.random(), torch.rand(3).tolist()

    shutil.copytree(saved[0], folder := tmp_path / "earlier")
    state = folder / "step-2" / "state"
    body = json.loads((state / "rank-00000.json").read_text())
    (state / "own-00000.json").write_text(json.dumps({"random": body.pop("random")}))
    (state / "rank-00000.json").write_text(json.dumps(body))
    shutil.copy(state / "rank-00000.safetensors", state / "own-00000.safetensors")
    own = {f"state/{path.name}": facts_of(path) for path in state.glob("own-*")}
    resign(folder / "step-2", lambda body: body["files"].update(own))
    assert drawn(folder) == drawn(saved[0])


def test_groups_that_differ_are_one_error_and_no_rate_is_left_behind(tmp_path: Path) -> None:
    run, other = Run(adamw_decay_vectors=True), Run()
    checkpointer, new = Checkpointer(tmp_path), "group adamw_no_decay: was not saved"
    checkpointer.save(1, run.model, run.optimizer)
    before, rates = other.state(), [dict(group, params=0) for group in other.optimizer.param_groups]
    with pytest.raises(CheckpointError, match=f"(?s){new}.* 0.bias, .*: was in group adamw, is in adamw_no_decay now"):
        checkpointer.load(other.model, other.optimizer)
    with pytest.raises(CheckpointError, match=new):
        other.optimizer.load_state_dict(run.optimizer.state_dict())
    with pytest.raises(CheckpointError, match=new):
        load_full_optimizer_state(other.optimizer, full_optimizer_state(run.optimizer))
    assert other.is_at(before)
    assert rates == [dict(group, params=0) for group in other.optimizer.param_groups]
    with pytest.warns(UserWarning, match=new):
        checkpointer.load(other.model, other.optimizer, strict=False)
    with pytest.raises(CheckpointError, match="group adamw_no_decay: was saved, and is not among"):
        Checkpointer(tmp_path / "other").save(1, other.model, other.optimizer)
        Checkpointer(tmp_path / "other").load(run.model, run.optimizer)


def test_what_was_unfrozen_joins_where_a_checkpoint_trains_it(tmp_path: Path) -> None:
    def unfrozen(*, before: bool) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        optimizer = compile_muon.MuonZero(model, stage=0, update="step")
        if before:
            model[0].requires_grad_(True)
        return model, optimizer

    model, optimizer = unfrozen(before=True)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, *unfrozen(before=False))
    assert checkpointer.load(model, optimizer) == {}  # frozen there: it joins in the next step
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.123
    checkpointer.save(2, model, optimizer)
    with pytest.raises(CheckpointError, match="0.weight: was muon in the checkpoint, is frozen now"):
        checkpointer.load(*unfrozen(before=False))
    for load in (
        lambda other: checkpointer.load(*other),
        lambda other: other[1].load_state_dict(optimizer.state_dict()),
        lambda other: load_full_optimizer_state(other[1], full_optimizer_state(optimizer)),
    ):
        other = unfrozen(before=True)
        load(other)
        here, there = (opt.state[next(model.parameters())] for model, opt in (other, (model, optimizer)))
        assert here.keys() == there.keys() and all(torch.equal(here[slot], there[slot]) for slot in there)
        assert any(state.any() for state in here.values())
        assert [group["lr"] for group in other[1].param_groups] == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_are_for_whom_the_umask_says(tmp_path: Path, mask: int) -> None:
    run, before = Run(), os.umask(mask)
    try:
        Checkpointer(tmp_path).save(1, run.model, run.optimizer, note=torch.ones(2))
        main(["checkpoint", "export", str(tmp_path), "--out", str(tmp_path / "out")])
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) == 6 and set(modes.values()) == {0o666 & ~mask}, modes


#: a field of a manifest, and what strangers write there
HOSTILE: list[tuple[str, Any]] = [
    ("step", value) for value in (float("inf"), float("nan"), -1, True, "1", None, 10**400, [[]])
] + [
    ("world", 0), ("stage", 9), ("written", 5), ("versions", {"torch": {}}), ("configuration", []),
    ("tensors", {"model/x": {"shape": [2**70], "dtype": "float32"}}),
    ("tensors", {"model/x": {"shape": [1.5], "dtype": "float32"}}),
    ("tensors", {"model/x": {"shape": [2, 2], "dtype": "nn"}}),
    ("tensors", {"model/\x1b[2J\ud800": {"shape": [2, 2], "dtype": "float32"}}),
    ("tensors", {"model/x": 3}), ("algorithms", {"x": []}), ("placements", {"x": None}),
    ("aliases", {"x\x07": "nowhere"}), ("files", {"tensors/a": {"size": -1, "sha256": "0" * 64}}),
    ("files", {"state/\n": {"size": 1, "sha256": "0" * 64}}), ("files", {"/dev/zero": {"size": 1, "sha256": "0" * 64}}),
    ("files", {"tensors/a": {"size": 1, "sha256": float("nan")}}), ("version", "x"), ("format", "another"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_manifest_is_one_line_that_names_file_and_field(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    field, value = HOSTILE[number]
    folder = tmp_path / "hostile"
    shutil.copytree(saved[0] / "step-1", folder / "step-1")
    resign(folder / "step-1", lambda body: body.update({field: value}))
    for command in ("list", "verify", "inspect", "export"):
        more = ["--out", str(tmp_path / "out")] if command == "export" else []
        code = main(["checkpoint", command, str(folder), *more])
        out = capsys.readouterr()
        lines = [line for line in out.out.splitlines() if str(folder / "step-1") in line]
        if command in ("list", "inspect") and "x1b" in str(value):
            continue  # a name is a name; it is what is printed that counts
        assert code == 1 and len(lines) == 1 and out.err == "", (command, out)
        assert field in lines[0] or "model/" in lines[0], lines
        assert all(char.isprintable() for char in lines[0])


def test_names_that_move_the_cursor_are_escaped(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "escapes"
    shutil.copytree(saved[0] / "step-1", folder / "step-1")
    resign(folder / "step-1", lambda body: body["aliases"].update({"\x1b[2J\ud800": "0.weight"}))
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    assert "\\x1b[2J\\ud800" in capsys.readouterr().out


def test_commands(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved[0], folder)

    def said(*arguments: str) -> tuple[int, str]:
        code = main(["checkpoint", *arguments])
        return code, capsys.readouterr().out

    assert said("verify", str(folder)) == (0, "step 1: whole, 3 files\nstep 2: whole, 3 files\n")
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
