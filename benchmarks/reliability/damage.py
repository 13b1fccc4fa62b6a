"""Damaged checkpoints: loading one must raise an error, or load the checkpoint before it as a whole.

Each kind of damage is a function of the checkpoint's folder and a random generator. Of the checkpoints of steps 1 and 2
the second is damaged. Loading step 2 must be an error; loading the newest one is tried then.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

import compile_muon
from compile_muon import Checkpointer, CheckpointError
from compile_muon.checkpoint.manifest import _digest_of

from .outcome import Request, Row, again

__all__ = [
    "KINDS",
    "MEANT",
    "TOLD",
    "Bomb",
    "Run",
    "States",
    "attempt",
    "campaign",
    "empty",
    "flip",
    "resign",
    "save_two",
]

ATTEMPTS, QUICK_ATTEMPTS = 200, 36
#: allowed outcomes of an attempt
OLDER, REFUSED = "an error, and the whole one before is loaded", "an error"

#: saved tensors, by step
States = dict[int, dict[str, Tensor]]


class Run:
    """A small model in training."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.optimizer = compile_muon.MuonZero(self.model, stage=0, update="step", **settings)

    def train(self) -> None:
        self.model(torch.randn(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        tensors = {name: value.clone() for name, value in self.model.state_dict().items()}
        for i, slots in enumerate(self.optimizer.state.values()):
            tensors |= {f"{i}/{slot}": value.clone() for slot, value in slots.items()}
        tensors |= {f"lr {i}": torch.tensor(group["lr"]) for i, group in enumerate(self.optimizer.param_groups)}
        return tensors | {"dice": torch.get_rng_state()}

    def is_at(self, state: dict[str, Tensor]) -> bool:
        now = self.state()
        return now.keys() == state.keys() and all(torch.equal(now[name], state[name]) for name in now)


def _files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def flip(place: Path, dice: random.Random) -> None:
    path = dice.choice(_files(place))
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def flip_two(place: Path, dice: random.Random) -> None:
    """Swap two bytes and invert both, which an XOR checksum would not notice."""
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


class Bomb:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def pickles(place: Path, dice: random.Random) -> None:
    """Replace a file by a pickle, with a matching checksum."""
    path = dice.choice([path for path in _files(place) if path.name != "manifest.json"])
    path.write_bytes(pickle.dumps(Bomb(place.parent / "exploded")))
    resign(place)


def foreign_files(place: Path, dice: random.Random) -> None:
    name = dice.choice([".metadata", "__0_0.distcp", "shard-00002-model-00001-of-00001.safetensors"])
    data = pickle.dumps(Bomb(place.parent / "exploded"))
    (place / "tensors" / name).write_bytes(save({"model/0.bias": torch.ones(6)}) if name.startswith("s") else data)


def facts_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def resign(place: Path, change: Callable[[dict[str, Any]], None] = lambda body: None) -> None:
    """Write a manifest with matching checksums and ``change``, as an attacker would."""
    body = json.loads((place / "manifest.json").read_text())
    for name in body["files"]:
        body["files"][name] = facts_of(place / name)
    change(body)
    del body["sha256"]
    (place / "manifest.json").write_text(json.dumps({**body, "sha256": _digest_of(body)}))


def leave_the_folder(place: Path, dice: random.Random) -> None:
    """Name files outside the folder in the manifest, with matching checksums."""
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


def strangers(place: Path, dice: random.Random) -> None:
    """Add files that the manifest does not list, under names that a reader would open."""
    path = place / dice.choice(["state/x.safetensors", "state/x.json", "tensors/x.safetensors", "link"])
    kind = dice.choice([os.mkfifo, Path.mkdir, Path.touch, lambda path: path.symlink_to("/dev/zero")])
    if path.name == "link":  # other notes than the manifest's may exist
        path, kind = place / "state" / "rank-00001.json", os.mkfifo
    kind(path)


def wrong_shapes(place: Path, dice: random.Random) -> None:
    resign(place, lambda body: body["tensors"]["model/0.weight"].update(shape=dice.choice([["x"], 5, None, [-1]])))


#: damage that checksums reveal, so the checkpoint before is loaded
TOLD = [
    flip, flip_two, truncate, empty, lengthen, remove, remove_a_folder, swap, from_the_other_step, all_of_another_step,
    edit_manifest, foreign_files, leave_the_folder, link, nonsense, a_pipe, strangers,
]  # fmt: skip
#: malice, with matching checksums: an error
MEANT = [pickles, wrong_shapes]
KINDS: list[Callable[[Path, random.Random], None]] = TOLD + MEANT


def save_two(folder: Path) -> States:
    """Save the checkpoints of steps 1 and 2, and return their tensors."""
    run, states = Run(), {}
    for step in (1, 2):
        run.train()
        run.optimizer.param_groups[0]["lr"] = 0.01 * step
        states[step] = run.state()
        Checkpointer(folder).save(step, run.model, run.optimizer, note=torch.ones(3))
    return states


def attempt(source: Path, states: States, folder: Path, kind: Callable[..., None], seed: int) -> str:
    """Damage a copy of ``source`` in ``folder``, load it both ways, and return the outcome, or what went wrong."""
    shutil.copytree(source, folder)
    kind(folder / "step-2", random.Random(seed))
    run = Run(seed=9)
    run.train()
    before = run.state()
    try:
        Checkpointer(folder).load(run.model, run.optimizer, step=2)
    except CheckpointError as error:
        if str(folder / "step-2") not in str(error):
            return f"WRONG: the error names no folder: {error}"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"
    else:
        return "WRONG: loaded"
    if not run.is_at(before):
        return "WRONG: an error that left something changed"
    outcome = _newest(states, folder, kind, run, before)
    return "WRONG: it ran code" if (folder / "exploded").exists() else outcome


def _newest(states: States, folder: Path, kind: Callable[..., None], run: Run, before: dict[str, Tensor]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            extra = Checkpointer(folder).load(run.model, run.optimizer)
        except CheckpointError:
            if not run.is_at(before):
                return "WRONG: an error that left something changed"
            # A revealed damage must not stop training, which can go on from the checkpoint before.
            return "WRONG: an error, and the one before was whole" if kind in TOLD else REFUSED
        except Exception as error:
            return f"WRONG: {type(error).__name__}: {error}"
    if extra is None or not torch.equal(extra["note"], torch.ones(3)) or not run.is_at(states[1]):
        return "WRONG: loaded something else"
    messages = [str(w.message) for w in caught if "step 1 is loaded instead" in str(w.message)]
    if len(messages) != 1 or str(folder / "step-2") not in messages[0]:
        return "WRONG: loaded the one before without a warning"
    return OLDER if kind in TOLD or kind is wrong_shapes else "WRONG: malice taken for damage"


def campaign(request: Request) -> Iterator[Row]:
    """Yield a row for each kind of damage."""
    chosen = [kind for kind in KINDS if request.wants(_name(kind))]
    total = request.runs or (QUICK_ATTEMPTS if request.quick else ATTEMPTS)
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "saved")
        states = save_two(source)
        for index, kind in enumerate(chosen):
            row = Row("damage", _name(kind), again("damage", request, _name(kind)))
            for number in range(total * index // len(chosen), total * (index + 1) // len(chosen)):
                folder = Path(place, "damaged")
                outcome = attempt(source, states, folder, kind, request.seed + number)
                shutil.rmtree(folder)
                row.count(outcome, wrong=outcome not in (OLDER, REFUSED))
            yield row


def _name(kind: Callable[..., None]) -> str:
    return kind.__name__.replace("_", " ")
