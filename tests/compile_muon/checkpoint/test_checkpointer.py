"""One process: what is on the disk when, what is kept, and what damage does."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

import compile_muon
from compile_muon import Checkpointer, CheckpointError
from compile_muon.__main__ import main
from compile_muon.checkpoint.manifest import _digest_of


class Run:
    def __init__(self, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.optimizer = compile_muon.MuonZero(self.model, stage=0, update="step", **settings)

    def train(self) -> None:
        self.model(torch.randn(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for i, slots in enumerate(self.optimizer.state.values()):
            found |= {f"{i}/{slot}": value.clone() for slot, value in slots.items()}
        found |= {f"lr {i}": torch.tensor(group["lr"]) for i, group in enumerate(self.optimizer.param_groups)}
        return found | {"dice": torch.get_rng_state()}

    def is_at(self, state: dict[str, Tensor]) -> bool:
        now = self.state()
        return now.keys() == state.keys() and all(torch.equal(now[name], state[name]) for name in now)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Tensor]]]:
    """A folder with the checkpoints of steps 1 and 2, and what was saved in them."""
    folder, run, states = tmp_path_factory.mktemp("saved"), Run(), {}
    for step in (1, 2):
        run.train()
        run.optimizer.param_groups[0]["lr"] = 0.01 * step
        states[step] = run.state()
        Checkpointer(folder).save(step, run.model, run.optimizer, note=torch.ones(3))
    return folder, states


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
    for name in ("step-7.tmp/tensors", "step-1.removed.tmp", "step-9.replaced.removed.tmp", "mine.tmp", "step-x"):
        (tmp_path / name).mkdir(parents=True)
    for step in (1, 2, 10):
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


def _files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def flip(place: Path, dice: random.Random) -> None:
    path = dice.choice(_files(place))
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def flip_two(place: Path, dice: random.Random) -> None:
    """The same bit of two numbers, in opposite directions: a sum would not see it."""
    path = next(place.glob("tensors/*"))
    data = bytearray(path.read_bytes())
    first, second = dice.sample(range(len(data) // 2, len(data)), 2)
    data[first], data[second] = data[second] ^ 0xFF, data[first] ^ 0xFF
    path.write_bytes(data)


def truncate(place: Path, dice: random.Random) -> None:
    path = dice.choice(_files(place))
    os.truncate(path, dice.randrange(path.stat().st_size))


def empty(place: Path, dice: random.Random) -> None:
    os.truncate(dice.choice(_files(place)), 0)


def lengthen(place: Path, dice: random.Random) -> None:
    with open(dice.choice(_files(place)), "ab") as file:
        file.write(b"{}")


def remove(place: Path, dice: random.Random) -> None:
    dice.choice(_files(place)).unlink()


def remove_a_folder(place: Path, dice: random.Random) -> None:
    shutil.rmtree(place / dice.choice(["tensors", "state"]))


def swap(place: Path, dice: random.Random) -> None:
    one, other = dice.sample(_files(place), 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def from_the_other_step(place: Path, dice: random.Random) -> None:
    path = next(place.glob("tensors/*"))
    shutil.copy(path.parents[2] / "step-1" / "tensors" / path.name, path)


def all_of_another_step(place: Path, dice: random.Random) -> None:
    shutil.rmtree(place)
    shutil.copytree(place.with_name("step-1"), place)


def edit_manifest(place: Path, dice: random.Random) -> None:
    body = json.loads((place / "manifest.json").read_text())
    key = dice.choice(["step", "world", "stage", "tensors", "algorithms", "files", "sha256"])
    body[key] = 3 if isinstance(body[key], int) else "0" if isinstance(body[key], str) else {}
    (place / "manifest.json").write_text(json.dumps(body))


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def pickles(place: Path, dice: random.Random) -> None:
    """In place of one file, its checksum put right."""
    path = dice.choice([path for path in _files(place) if path.name != "manifest.json"])
    path.write_bytes(pickle.dumps(_Bomb(place.parent / "exploded")))
    resign(place)


def foreign_files(place: Path, dice: random.Random) -> None:
    name = dice.choice([".metadata", "__0_0.distcp", "shard-00002-model-00001-of-00001.safetensors"])
    data = pickle.dumps(_Bomb(place.parent / "exploded"))
    (place / "tensors" / name).write_bytes(save({"model/0.bias": torch.ones(6)}) if name.startswith("s") else data)


def facts_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def resign(place: Path, change: Callable[[dict[str, Any]], None] = lambda body: None) -> None:
    """What somebody would do who means it."""
    body = json.loads((place / "manifest.json").read_text())
    for name in body["files"]:
        body["files"][name] = facts_of(place / name)
    change(body)
    del body["sha256"]
    (place / "manifest.json").write_text(json.dumps({**body, "sha256": _digest_of(body)}))


def leave_the_folder(place: Path, dice: random.Random) -> None:
    """Files that exist, with the checksums they have."""
    outside = place.with_name("step-1") / "manifest.json"
    within = next(place.glob("tensors/*"))
    names = [
        "../step-1/manifest.json", "tensors/../../step-1/manifest.json", str(outside),
        f"tensors/./{within.name}", f"state/../tensors/{within.name}",
    ]  # fmt: skip
    resign(place, lambda body: body["files"].update({dice.choice(names): facts_of(outside)}))
    resign(place)


def link(place: Path, dice: random.Random) -> None:
    target = place.parent / "elsewhere"
    path = dice.choice([*_files(place), place / "tensors", place / "state", place])
    path.rename(target)
    path.symlink_to(target)


def nonsense(place: Path, dice: random.Random) -> None:
    text = dice.choice([b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": "compile_muon checkpoint"}'])
    (place / "manifest.json").write_bytes(text)


def a_pipe(place: Path, dice: random.Random) -> None:
    path = dice.choice(_files(place))
    path.unlink()
    os.mkfifo(path)


def wrong_shapes(place: Path, dice: random.Random) -> None:
    resign(place, lambda body: body["tensors"]["model/0.weight"].update(shape=dice.choice([["x"], 5, None, [-1]])))


#: damage that is told by the checksums, so the checkpoint before is taken
TOLD = [
    flip, flip_two, truncate, empty, lengthen, remove, remove_a_folder, swap, from_the_other_step, all_of_another_step,
    edit_manifest, foreign_files, leave_the_folder, link, nonsense, a_pipe,
]  # fmt: skip
#: malice, with checksums to match: an error
MEANT = [pickles, wrong_shapes]


def damage_and_load(
    saved: tuple[Path, dict[int, dict[str, Tensor]]], folder: Path, damage: Callable[..., None], seed: int
) -> None:
    source, states = saved
    shutil.copytree(source, folder)
    damage(folder / "step-2", random.Random(seed))
    run = Run(seed=9)
    run.train()
    before = run.state()
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(folder).load(run.model, run.optimizer, step=2)
    assert str(folder / "step-2") in str(caught.value), caught.value
    assert run.is_at(before)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            extra = Checkpointer(folder).load(run.model, run.optimizer)
        except CheckpointError:
            assert damage not in TOLD
            assert run.is_at(before)
        else:
            assert damage in TOLD or damage is wrong_shapes
            (message,) = (str(w.message) for w in told if "step 1 is loaded instead" in str(w.message))
            assert str(folder / "step-2") in message
            assert extra is not None and torch.equal(extra["note"], torch.ones(3))
            assert run.is_at(states[1])
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("damage", TOLD + MEANT, ids=lambda damage: damage.__name__)
def test_damage_is_an_error_or_the_one_before(saved: Any, tmp_path: Path, damage: Any, seed: int) -> None:
    damage_and_load(saved, tmp_path / "damaged", damage, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(200))
def test_damage_200_times(saved: Any, tmp_path: Path, seed: int) -> None:
    damage_and_load(saved, tmp_path / "damaged", random.Random(seed).choice(TOLD + MEANT), seed)


def test_a_pickle_that_is_unpickled_explodes(tmp_path: Path) -> None:
    """So the check above can fail."""
    pickle.loads(pickle.dumps(_Bomb(tmp_path / "exploded")))
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
