"""Checkpoints of several ranks: bit for bit, on any world and stage, and what fails on one rank fails on all."""

import contextlib
import copy
import io
import json
import os
import random
import re
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.harness import RanksOf, on_ranks
from support.reference import DEVICE, full, placed, refusal, train_step, world_and_rank
from support.zoo import Uneven
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import compile_muon
from compile_muon import Checkpointer, CheckpointError, UnsupportedModelError
from compile_muon.__main__ import main
from compile_muon.integrations.buffers import take_those_of_rank_0


class Net(Uneven):
    """Beside what is uneven: statistics that differ between ranks, and dropout."""

    def __init__(self, rows: int = 9) -> None:
        super().__init__(rows)
        self.low = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)

    def hidden(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(super().forward(x).bfloat16()).float() + self.frozen.sum()


class Loader:
    """Batches of a rank, in an order of its own."""

    def __init__(self) -> None:
        self.dice = torch.Generator().manual_seed(7 + world_and_rank()[1])
        self.taken = 0

    def __next__(self) -> Tensor:
        self.taken += 1
        return torch.randn(5, 6, generator=self.dice)

    def state_dict(self) -> dict[str, Any]:
        return {"dice": self.dice.get_state(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dice.set_state(state["dice"])
        self.taken = state["taken"]


class Run:
    """A model in training."""

    def __init__(self, stage: int, seed: int = 0, rows: int = 9, codegen: str | None = None, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = Net(rows).to(DEVICE)
        settings.setdefault("muon_params", ["up.weight", "down.weight", "low.weight"])
        self.optimizer = compile_muon.MuonZero(self.model, stage=stage, ns_dtype="float32", **settings)
        self.forward: Any = self.model
        if codegen is not None:
            self.forward = torch.compile(self.model, backend="muon_zero", options={"codegen": codegen})
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.loader = Loader()
        torch.manual_seed(100 + world_and_rank()[1])  # every rank has dropout of its own

    def train(self, steps: int) -> None:
        for _ in range(steps):
            train_step(self.optimizer, self.forward(placed(next(self.loader))).square().mean())
            self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def state(self, *, whole: bool = False) -> dict[str, Tensor]:
        """All tensors; as this rank has them, or put together."""
        found: dict[str, Any] = dict(self.model.state_dict())
        for group in self.optimizer.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                found |= {f"{name}/{slot}": value for slot, value in self.optimizer.state[param].items()}
            found[f"{group['algorithm']} lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        bare = full if whole else (lambda t: t.to_local() if isinstance(t, DTensor) else t)
        return {name: bare(value).detach().cpu().clone() for name, value in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of what is not equal, bit for bit."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]


def go_on(folder: str, stopped: bool, stage: int, codegen: str | None) -> dict[str, Any]:
    """Three steps and a checkpoint of them, or what has been ``stopped`` and begins with it; then three more."""
    rank, checkpointer = world_and_rank()[1], Checkpointer(folder, asynchronous=stage > 0)
    run = Run(stage, seed=5 * stopped, codegen=codegen)
    if stopped:
        run.train(1)
        extra = checkpointer.load(run.model, run.optimizer, **run.parts())
        assert extra is not None and list(extra) == ["losses", "mine", "pair"]
        assert extra["losses"][0] == 1.0 and extra["losses"][1] != extra["losses"][1]
        assert torch.equal(extra["mine"], torch.arange(rank + 2)) and extra["pair"] == (1, {2: "two"})
    else:
        random.seed(rank)
        numpy.random.seed(rank)
        run.train(3)
        extra = {"losses": [1.0, float("nan")], "mine": torch.arange(rank + 2), "pair": (1, {2: "two"})}
        checkpointer.save(3, run.model, run.optimizer, **run.parts(), **extra)
    run.train(3)  # over what a copy that is none would read
    checkpointer.wait()
    state = run.state() | {"taken": torch.tensor(run.loader.taken)}
    return {"state": state, "dice": (random.random(), numpy.random.rand(), torch.rand(3))}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full), pytest.param(0, marks=pytest.mark.full)])
def test_a_run_goes_on_as_if_never_stopped(ranks: RanksOf, tmp_path: Path, stage: int) -> None:
    how = {"folder": str(tmp_path), "stage": stage, "codegen": "eager" if stage in (0, 3) else None}
    both = [ranks(2).run(go_on, stopped=stopped, **how) for stopped in (False, True)]
    for never, stopped in zip(*both, strict=True):
        assert not same(stopped["state"], never["state"])
        assert stopped["dice"][:2] == never["dice"][:2] and torch.equal(stopped["dice"][2], never["dice"][2])


def save_for_others(folder: str, stage: int) -> None:
    run = Run(stage)
    run.train(2)
    Checkpointer(folder).save(2, run.model, run.optimizer, **run.parts(), rank=world_and_rank()[1])
    whole = run.state(whole=True)
    if world_and_rank()[1] == 0:
        torch.save(whole, f"{folder}.pt")


@pytest.fixture(scope="module")
def saved(ranks: RanksOf, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with a checkpoint of two ranks at stage 2."""
    folder = str(tmp_path_factory.mktemp("of two ranks") / "saved")
    ranks(2).run(save_for_others, folder=folder, stage=2)
    return folder


def load_elsewhere(folder: str, stage: int, saved_by: int) -> tuple[list[str], int]:
    run = Run(stage, seed=3)
    rank = world_and_rank()[1]
    torch.rand(())  # the run that saved took some, but not where dropout is a GPU's
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = Checkpointer(folder).load(run.model, run.optimizer, **run.parts())
    kept = [str(w.message) for w in caught if re.search(rf"rank {rank}: .* no random-number state", str(w.message))]
    assert len(kept) == (rank >= saved_by) and torch.equal(before, torch.get_rng_state()) == (rank >= saved_by)
    assert extra is not None and extra["rank"] == (rank if rank < saved_by else 0)
    state = run.state(whole=True)
    saved = torch.load(f"{folder}.pt")
    statistics = [name for name in state if name.startswith("norm.running")] if 0 < rank < saved_by else []
    for name in statistics:  # this rank's own
        del state[name], saved[name]
    run.train(1)
    return same(saved, state), len(statistics)


@pytest.mark.parametrize(
    ("saved_by", "stage", "targets"),
    [(2, 3, ((3, 1), (1, 0))), pytest.param(3, 1, ((2, 3), (1, 2)), marks=pytest.mark.full)],
)
def test_any_world_and_stage_loads_what_another_saved(
    ranks: RanksOf, tmp_path: Path, saved_by: int, stage: int, targets: tuple[tuple[int, int], ...]
) -> None:
    folder = str(tmp_path / "saved")
    ranks(saved_by).run(save_for_others, folder=folder, stage=stage)
    for world, other in targets:
        found = ranks(world).run(load_elsewhere, folder=folder, stage=other, saved_by=saved_by)
        assert not any(different for different, _ in found), (world, other, found)


def load_what_does_not_fit(folder: str) -> tuple[str, str, bool, bool]:
    run = Run.__new__(Run)
    torch.manual_seed(4)
    model: Any = Net(rows=10)
    run.model = model
    model.more = nn.Linear(2, 2)
    del model.frozen
    model.register_buffer("frozen", torch.zeros(3, 2))
    run.optimizer = compile_muon.MuonZero(model, stage=3, muon_params=["low.weight"])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [9], gamma=0.1)
    checkpointer = Checkpointer(folder)
    before = run.state() | {"dice": torch.get_rng_state()}
    message = refusal(checkpointer.load, model, run.optimizer, scheduler=scheduler)
    untouched = not same(before, run.state() | {"dice": torch.get_rng_state()}) and scheduler.gamma == 0.1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer.load(model, run.optimizer, scheduler=scheduler, strict=False)
    warning = " ".join(str(w.message) for w in caught if "do not fit" in str(w.message))
    saved, now = torch.load(f"{folder}.pt"), run.state(whole=True)
    fits = ("head.weight", "low.weight/momentum_buffer", "down.weight", "scale", "scale/exp_avg", "low.bias")
    loaded = all(torch.equal(saved[name], now[name]) for name in fits) and scheduler.gamma == 0.5
    loaded &= torch.equal(before["up.bias"], run.state()["up.bias"])
    return message, warning, untouched, loaded


def test_what_does_not_fit_is_listed_and_changes_nothing(ranks: RanksOf, saved: str) -> None:
    for rank, (message, warning, untouched, loaded) in enumerate(ranks(2).run(load_what_does_not_fit, folder=saved)):
        for text in (message,) if rank else (message, warning):  # rank 0 warns for all
            assert "up.weight: shape is [9, 6] in the checkpoint, [10, 6] in the model" in text
            assert "down.weight: was muon in the checkpoint, is adamw now" in text
            assert "frozen: was frozen in the checkpoint, is a buffer now" in text
            assert "more.weight: the checkpoint has no such parameter" in text
            assert "loader: one was saved, and load() was given none" in text
        assert "strict=False" in message and ("all else was loaded" in warning) == (rank == 0)
        assert untouched and loaded


def load_unlike_steps(folder: str) -> tuple[str, bool]:
    run, checkpointer = Run(2), Checkpointer(f"{folder}-by-step")
    for step in (1, 2):
        run.train(1)
        checkpointer.save(step, run.model, run.optimizer)
    before = run.state()
    step = 1 + dist.get_rank()
    return refusal(checkpointer.load, run.model, run.optimizer, step=step), not same(before, run.state())


def load_from_what_may_not_be_listed(folder: str) -> tuple[str, bool]:
    run, scandir = Run(2, seed=4), os.scandir
    before, refused = run.state(), mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    with mock.patch.object(os, "scandir", refused if dist.get_rank() == 1 else scandir):
        return refusal(Checkpointer(folder).load, run.model, run.optimizer), not same(before, run.state())


def load_with_a_loader_that_stays_broken(folder: str) -> tuple[str, bool]:
    """The scheduler, which took its state before, gets it back all the same."""
    run = Run(2, seed=4)
    run.train(1)
    before, last = run.state(), run.scheduler.last_epoch
    if dist.get_rank() == 1:
        run.loader.load_state_dict = mock.Mock(side_effect=ValueError("on purpose"))
    message = refusal(Checkpointer(folder).load, run.model, run.optimizer, **run.parts())
    assert "rank 1: ValueError: on purpose; and what had taken" in message
    return message, not same(before, run.state()) and run.scheduler.last_epoch == last


def load_with_a_broken_loader(folder: str) -> tuple[str, bool]:
    run = Run(2, seed=4)
    run.train(1)
    before, taken = run.state(), run.loader.taken

    def broken(state: dict[str, Any]) -> None:
        type(run.loader).load_state_dict(run.loader, state)
        if dist.get_rank() == 1 and state["taken"] != taken:
            raise ValueError("on purpose")

    run.loader.load_state_dict = broken
    last = run.scheduler.last_epoch
    message = refusal(Checkpointer(folder).load, run.model, run.optimizer, **run.parts())
    return message, not same(before, run.state()) and run.loader.taken == taken and run.scheduler.last_epoch == last


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (load_unlike_steps, "step = 1 on rank 0, 2 on rank 1: nothing was loaded; load the same step on every rank"),
        (load_with_a_broken_loader, "rank 1: ValueError: on purpose"),
        (load_from_what_may_not_be_listed, "nothing was loaded: rank 1: PermissionError"),
        (load_with_a_loader_that_stays_broken, "did not take back what it had: rank 1: ValueError: on purpose"),
    ],
)
def test_a_load_that_cannot_be_on_one_rank_changes_nothing_on_any(
    ranks: RanksOf, saved: str, load: Any, said: str
) -> None:
    for message, untouched in ranks(2).run(load, folder=saved):
        assert said in message and untouched


@pytest.mark.parametrize(
    ("how", "asynchronous", "said"),
    [
        ("tensors", False, "No space left"),
        pytest.param("read back", False, "No space left", marks=pytest.mark.full),
        pytest.param("read back", True, "No space left", marks=pytest.mark.full),
        ("value", False, "extra.thing = <object object"),
        ("dtype", False, "extra.thing = tensor([1.+0.j], dtype=torch.complex128): a Tensor"),
        ("step", True, "other ranks save step"),
        ("no step", False, "step = 'x'"),
    ],
)
@on_ranks(2)
def test_what_fails_on_one_rank_is_one_error_on_all(tmp_path: Path, how: str, asynchronous: bool, said: str) -> None:
    from compile_muon.checkpoint import checkpointer as module
    from compile_muon.files import tensors

    run = Run(3)
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
    checkpointer.save(1, run.model, run.optimizer)
    checkpointer.wait()
    run.train(1)
    failing = how if dist.get_rank() == 1 else ""
    extra = {"thing": {"value": object(), "dtype": torch.ones(1, dtype=torch.complex128)}.get(failing, 1)}
    step = {"step": 3, "no step": "x"}.get(failing, 2)
    full_disk = mock.Mock(side_effect=OSError(28, "No space left on device"))
    broken: Any = {"tensors": (tensors, "write_whole"), "read back": (module, "describe_file")}
    with mock.patch.object(*broken[failing], full_disk) if failing in broken else contextlib.nullcontext():
        message = refusal(checkpointer.save, step, run.model, run.optimizer, **extra)
        if not message:
            message = refusal(checkpointer.save, 2, run.model, run.optimizer)
    there = checkpointer.steps()
    dist.barrier()
    checkpointer.save(4, run.model, run.optimizer)
    checkpointer.wait()
    dist.barrier()
    assert said in message and "rank 1" in message and "was not saved" in message
    assert there == [1]
    assert {path.name for path in tmp_path.iterdir()} == {".writer", "step-1", "step-4"}


@on_ranks(2)
def test_folders_that_are_not_shared_are_said_to_be(tmp_path: Path) -> None:
    """Where only another machine held checkpoints, training began anew without a word."""
    folder = str(tmp_path)
    run, rank = Run(3), dist.get_rank()
    own = Path(folder, str(rank))
    said = {"save": refusal(Checkpointer(own).save, 1, run.model, run.optimizer)}
    # A crash of an earlier run has left the very place that rank 0 makes on its machine.
    own.joinpath("step-2.tmp", "tensors").mkdir(parents=True, exist_ok=True)
    own.joinpath("step-2.tmp", "begun-0123456789abcdef").touch()
    said["save again"] = refusal(Checkpointer(own).save, 2, run.model, run.optimizer)
    for holder in (0, 1):
        whole, here = Path(folder, f"whole-{holder}"), Path(folder, f"{holder}-{rank}")
        Checkpointer(whole).save(3, run.model, run.optimizer)
        if rank == holder:
            whole.rename(here)
        dist.barrier()
        said[f"load, rank {holder} has it"] = refusal(Checkpointer(here).load, run.model, run.optimizer)
    for what, message in said.items():
        assert "use a folder that all ranks share" in message, (what, message)
    for holder, blind in ((0, 1), (1, 0)):
        message = said[f"load, rank {holder} has it"]
        assert f"holds checkpoints for some ranks, and none for rank {blind}; " in message


@on_ranks(2)
def test_what_one_rank_has_alone_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    """A buffer of one rank alone, many checkpointers, a shard that is pickled, and where a save says that it is."""
    folder, run, rank = str(tmp_path), Run(3), dist.get_rank()
    for name, values in (("alone", torch.zeros(2) if rank else None), ("longer", torch.zeros(2 + rank))):
        if values is not None:
            run.model.register_buffer(name, values)
        with pytest.raises(CheckpointError, match=f"{name}: ranks hold different ones"):
            Checkpointer(folder).save(1, run.model, run.optimizer)
        with pytest.raises(UnsupportedModelError, match=f"{name}: ranks have different buffers"):
            take_those_of_rank_0(run.model)
        run.model._buffers.pop(name, None)
    counts = []
    for number in range(4):
        checkpointer = Checkpointer(f"{folder}/{number}", asynchronous=number % 2 == 0)
        checkpointer.save(number, run.model, run.optimizer)
        other = Checkpointer(f"{folder}/{number}")
        assert number % 2 == 0 or other.load(run.model, run.optimizer) == {}
        other.save(number + 1, run.model, run.optimizer)  # while the first may be under way
        checkpointer.wait()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))))
    # A thread that was joined is a task for a moment more, so that one count may be too high.
    assert all(min(late) <= early for early, *late in zip(*counts, strict=True)), counts
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Checkpointer(f"{folder}/quiet").save(1, run.model, run.optimizer)
        copy.deepcopy(run.model), copy.deepcopy(run.model.state_dict()), copy.copy(run.model.up.weight)
        assert not [w for w in caught if "pickled" in str(w.message)]
        torch.save({name: value.clone() for name, value in run.model.state_dict().items()}, io.BytesIO())
        torch.save(run.model.state_dict(), io.BytesIO())
        next(run.model.parameters()).origin[1].clear()
        copy.deepcopy(run.optimizer.state_dict())
        torch.save(run.optimizer.state_dict(), io.BytesIO())
    of_weights, of_state = (str(w.message) for w in caught if "pickled" in str(w.message))
    assert f"holds the rows of rank {rank} and no others; save whole weights with full_state" in of_weights
    assert re.match(rf"rank {rank}: \w+ of [\w.]+: is pickled", of_state)


def content(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return {name: (str(value.dtype), value.tolist()) for name, value in load_file(path).items()}


@on_ranks(2)
def test_saving_behind_training_writes_the_same_files(tmp_path: Path) -> None:
    """Training, with collectives, while a writer is held up; then the same checkpoint written in front."""
    from compile_muon.checkpoint import checkpointer as module

    folder = str(tmp_path)
    run = Run(3)
    run.train(1)
    held = threading.Event()
    write = module.write_tensors

    def slowly(*args: Any) -> Any:
        assert held.wait(30)
        return write(*args)

    behind, front = Checkpointer(f"{folder}/behind", asynchronous=True), Checkpointer(f"{folder}/front")
    front.save(1, run.model, run.optimizer, **run.parts(), note="x")
    with mock.patch.object(module, "write_tensors", slowly):
        behind.save(1, run.model, run.optimizer, **run.parts(), note="x")
        run.train(2)
        during = behind.steps()
        began = time.monotonic()
        threading.Timer(0.3, held.set).start()
        behind.save(3, run.model, run.optimizer)  # one in flight: waits for the first
        waited = time.monotonic() - began > 0.25
    behind.wait()
    dist.barrier()
    names = [path.relative_to(f"{folder}/front") for path in Path(folder, "front/step-1").glob("*/*")]
    # Compared by content: safetensors writes a file's metadata in any order.
    pairs = [(content(Path(folder, "front", name)), content(Path(folder, "behind", name))) for name in names]
    assert len(pairs) >= 6 and all(a == b for a, b in pairs)
    assert waited and during == [] and behind.steps() == [1, 3]


def test_export_is_the_whole_model(ranks: RanksOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2).run(save_for_others, folder=str(tmp_path / "saved"), stage=3)
    saved = torch.load(tmp_path / "saved.pt")
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--out", str(tmp_path / "out")]) == 0
    fresh = Net()
    whole = {name: saved[name] for name in fresh.state_dict()}
    assert not same(load_file(tmp_path / "out" / "model.safetensors"), whole)
    fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert main(["checkpoint", "inspect", str(tmp_path / "saved")]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tied.weight", "is", "head.weight"] in printed
    assert ["up.weight", "muon", "shard(0)", "float32", "[9,", "6]"] in printed
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--out", str(tmp_path / "out")]) == 1
