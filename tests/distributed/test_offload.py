"""Offloaded optimizer state: the bits of the resident run, at every stage, through every fault."""

import copy
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from support.harness import RanksOf
from support.odd import Odd, data, loss
from support.reference import DEVICE, full, placed, train_step, world_and_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import compile_muon
from compile_muon import kernels, passes
from compile_muon.engine import step as engine_step
from compile_muon.engine.dtensors import local_tensor
from compile_muon.errors import OffloadError
from compile_muon.offload import store
from compile_muon.offload.device_buffers import DeviceBuffers
from compile_muon.offload.shown import OffloadedStateView
from compile_muon.passes.methods import adamw

pytestmark = pytest.mark.filterwarnings("ignore:.*O_DIRECT")  # which a file system may not have; said once
SMALL = {"buffer_bytes": 1}  # so that there are many buckets


def offload(where: str | None, folder: Path | str, **more: Any) -> dict[str, Any]:
    if where is None:
        return {}
    place = {"device": "nvme", "nvme_path": str(folder)} if where == "nvme" else {"device": where}
    return {"offload": {**place, **SMALL, **more}}


class Tall(Odd):
    """Two parameters of several pages, so that their states are provided by rows; the last rows are fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 8)
        self.tall = nn.Linear(16, 600, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = super().forward(tokens)
        return h + self.table(37 * tokens)[..., :1] + self.tall(h).tanh().mean(-1, keepdim=True)


def made(
    *, mesh: tuple[int, int] | None = None, tall: bool = False, **settings: Any
) -> tuple[nn.Module, compile_muon.MuonZero]:
    torch.manual_seed(0)
    model = (Tall() if tall else Odd()).to(DEVICE)
    if "param_dtype" in settings:  # gradients of several uses add up in the parameter's dtype
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    if mesh is not None:
        settings["mesh"] = init_device_mesh(DEVICE.type, mesh, mesh_dim_names=("replicate", "shard"))
    return model, compile_muon.MuonZero(model, ns_dtype="float32", **settings)


def run(
    model: nn.Module,
    optimizer: compile_muon.MuonZero,
    steps: range,
    *,
    codegen: str | None = None,
    micro: int = 1,
    clip: float | None = None,
) -> None:
    _, rank = world_and_rank()
    called = model if codegen is None else torch.compile(model, backend="muon_zero", options={"codegen": codegen})
    for step in steps:
        for k in range(micro):
            (loss(called, placed(data(step, k, rank))) / micro).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def as_on_the_host(given: dict[str, Any]) -> AbstractContextManager[Any]:
    """Inside this block a resident AdamW is the host's, torch's fused, where ``adamw_on`` says so."""
    if given.get("adamw_on") != "cpu":
        return nullcontext()
    step = adamw.adamw
    return mock.patch.object(adamw, "adamw", lambda *args, **rates: step(*args, **{**rates, "fused": True}))


def everything(model: nn.Module, optimizer: compile_muon.MuonZero) -> dict[str, Tensor]:
    """Master weights and states, whole."""
    found = {name: full(param.detach()).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        states = {slot: full(value).clone() for slot, value in optimizer.state[param].items()}
        rounded, found[name] = found[name], states.pop("master_weight", found[name])
        assert torch.equal(found[name].to(rounded.dtype), rounded)
        found |= {f"{slot} of {name}": value for slot, value in states.items()}
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def beside_the_resident_run(where: str, folder: str, ratio: float = 1.0, **given: Any) -> None:
    loop = {name: given.pop(name) for name in ("codegen", "micro", "clip") if name in given}
    what = {"momentum": given.pop("momentum_too", True), "masters": "param_dtype" in given}
    what["adamw_on"] = given.pop("adamw_on", "device")
    weights = {"offload_param": given.pop("weights", None)}
    found = []
    for place in (None, where):
        torch._dynamo.reset()
        fused = as_on_the_host(what if place is None or ratio < 1 else {})
        with fused:
            pair = made(**given, **offload(place, folder, ratio=ratio, **what), **({} if place is None else weights))
            assert place is None or {p.dtype for p in pair[0].parameters()} >= {given.get("param_dtype", torch.float32)}
            run(*pair, range(3), **loop)
        if place is not None and given.get("tall"):
            states: Any = pair[1].engine.state_provider
            assert (len(states.layout.chunks_of["table.weight"]) > 1) == (what["adamw_on"] == "device")
            momenta = what["momentum"] and not what["masters"] and ratio == 1.0
            assert (len(states.layout.chunks_of.get("tall.weight", [])) > 1) == momenta
        found.append(everything(*pair))
        if not given.get("tall"):  # momenta that are fetched share fewer exchanges, which are padded
            found[-1]["bytes"] = torch.tensor(pair[1].traffic.bytes_sent)
        used = pair[1].totals()["directions_used"]
    assert bool(used) == ("codegen" in loop and given.get("update") != "step" and "clip" not in loop)
    assert not differing(*found)


def test_gradients_that_are_clipped_beside_masters_are_rounded_once_more() -> None:
    """So says the page: the weights are those of a resident run whose clipped gradients are rounded."""
    limit, found, norms = 0.05, [], list[float]()
    for offloaded in (True, False):
        torch._dynamo.reset()
        clipping = {"gradient_clipping": limit, **offload("cpu", "", masters=True)} if offloaded else {}
        model, optimizer = made(stage=0, update="step", param_dtype=torch.bfloat16, **clipping)
        for step in range(3):
            loss(model, placed(data(step, 0, 0))).backward()
            if not offloaded:
                factor = (torch.tensor(limit) / (torch.tensor(norms[step]) + 1e-6)).clamp(max=1.0)
                for param in model.parameters():
                    param.grad.copy_((param.grad * factor).bfloat16())
            optimizer.step()
            if offloaded:
                norms.append(optimizer.metrics()["grad_norm"])
            optimizer.zero_grad()
        found.append(everything(model, optimizer))
    assert min(norms) > limit
    assert differing(*found) == []


STEP, COMPILED = {"update": "step"}, {"update": "backward", "codegen": "eager"}
HOST = {"adamw_on": "cpu"}
MASTERS = {"param_dtype": torch.bfloat16}
#: methods in memory and in files, with master weights, at every stage and on meshes: test_methods.py
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "compiled": (2, {"where": "nvme", "stage": 3, **COMPILED, "weights": "cpu", "tall": True}),
    "partly": (1, {"where": "nvme", "stage": 2, **STEP, "ratio": 0.4}),
    "moments": (1, {"where": "cpu", "stage": 2, **STEP, "momentum_too": False}),
    "masters": (2, {"where": "nvme", "stage": 3, **STEP, **MASTERS, "method": "muonh", "tall": True}),
    "on the host": (2, {"where": "cpu", "stage": 2, **STEP, **HOST, "clip": 0.05, "ratio": 0.2}),
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "clipped": (3, {"where": "nvme", "stage": 3, **STEP, "clip": 0.05, "tall": True}),
    "accumulated": (2, {"where": "cpu", "stage": 2, **COMPILED, "micro": 3, "gradient_accumulation_steps": 3}),
    "alone": (1, {"where": "cpu", "stage": 3, **COMPILED, **MASTERS, "weights": "cpu"}),
    "nvme, tall": (2, {"where": "nvme", "stage": 3, **COMPILED, **MASTERS, "tall": True}),
    "masters, on the host": (2, {"where": "nvme", "stage": 3, **COMPILED, **MASTERS, **HOST}),
    "masters, stage 2": (3, {"where": "cpu", "stage": 2, **STEP, **MASTERS, "momentum_too": False, "tall": True}),
    "masters, partly": (2, {"where": "nvme", "stage": 1, **STEP, **MASTERS, "ratio": 0.5, "method": "muown"}),
    "inductor": (2, {"where": "nvme", "stage": 2, "update": "backward", "codegen": "inductor"}),
    "replicas": (4, {"where": "cpu", "stage": 3, **STEP, "weights": "cpu", "mesh": (2, 2), "method": "normuon"}),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_offloaded_training_is_the_resident_one(ranks: RanksOf, tmp_path: Path, name: str) -> None:
    world, case = (CASES | MORE)[name]
    ranks(world).run(beside_the_resident_run, folder=str(tmp_path), **case)
    assert not list(tmp_path.iterdir())


def a_step_reads_a_state_once(folder: str) -> None:
    """What is read ahead is what is wanted, and as it is wanted, once the order of buckets is known."""
    model, optimizer = made(stage=2, update="backward", **offload("nvme", folder, buffer_count=2))
    called = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    run(called, optimizer, range(2))
    found: Counter[store.Bucket] = Counter()
    requests = store.FileStore._requests

    def counted(self: store.FileStore, held: Any, bucket: store.Bucket, ready: Any, *, write: bool) -> Any:
        found[bucket] += not write
        return requests(self, held, bucket, ready, write=write)

    with mock.patch.object(store.FileStore, "_requests", counted):
        run(called, optimizer, range(2, 4))
    assert len(found) > 4
    assert {*found.values()} == {2}, found


def host_memory_is_read_ahead_in_the_order_of_backward_and_of_the_step(folder: str) -> None:
    """They open the same momenta, in another order: none that has not begun to be read, once their order is known."""
    model, optimizer = made(stage=2, update="backward", **offload("cpu", "", buffer_count=2))
    called = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    run(called, optimizer, range(2))
    begun: set[store.Bucket] = set()
    found, opened = [], []
    start, opening = DeviceBuffers.start, DeviceBuffers.open

    def started(self: DeviceBuffers, bucket: store.Bucket) -> bool:
        begun.add(bucket)
        return start(self, bucket)

    def asked(self: DeviceBuffers, bucket: store.Bucket) -> Any:
        if bucket not in begun and bucket not in opened[-1:]:
            found.append(bucket.slots[0].name)
        begun.discard(bucket)
        opened.append(bucket)
        return opening(self, bucket)

    with mock.patch.object(DeviceBuffers, "start", started), mock.patch.object(DeviceBuffers, "open", asked):
        run(called, optimizer, range(2, 4))
    assert len({*opened}) > 4
    momenta = [name for name in found if name.startswith("momentum")]
    assert momenta[1:] == [], momenta  # the first was begun ahead of these steps


def resumed(way: tuple[str | None, ...], folder: str) -> dict[str, Tensor]:
    """Runs that go on from one another's checkpoints, each with its state somewhere else."""
    for part, where in enumerate(way):
        model, optimizer = made(stage=(3, 1, 2)[part], update="step", **MASTERS, **offload(where, folder, masters=True))
        checkpointer = compile_muon.Checkpointer(Path(folder) / str(way), asynchronous=where == "nvme")
        if part:
            checkpointer.load(model, optimizer)
        run(model, optimizer, range(part, part + 1))
        checkpointer.save(part + 1, model, optimizer)
        run(model, optimizer, range(part + 1, part + 2))  # while it is written
        checkpointer.wait()
    return everything(model, optimizer)


def test_a_run_goes_on_wherever_its_state_is(ranks: RanksOf, tmp_path: Path) -> None:
    ways = (("nvme", "cpu", None), (None, "cpu", "nvme"))
    assert not differing(*(ranks(1).run(resumed, way=way, folder=str(tmp_path))[0] for way in ways))


def written_by_users(where: str | None, folder: str) -> dict[str, Tensor]:
    model, optimizer = made(stage=2, update="auto", **offload(where, folder))
    compiled = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    vector, matrix = (dict(model.named_parameters())[name] for name in ("uneven.bias", "experts"))
    for step in range(4):
        loss(compiled, data(step, 0, world_and_rank()[1])).backward()
        if step == 2:  # behind a backward that made directions
            local_tensor(optimizer.state[vector]["exp_avg"]).mul_(0.5)
            local_tensor(optimizer.state[matrix]["momentum_buffer"]).zero_()
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.state[vector]["exp_avg_sq"] = optimizer.state[vector]["exp_avg_sq"] * 4
            del optimizer.state[vector]["exp_avg"]
            optimizer.state[matrix].clear()
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer)


def with_averages(where: str | None, folder: str) -> dict[str, Tensor]:
    """Averages of the weights are swapped in and out, then a weight is halved for good."""
    model, optimizer = made(stage=3, update="step", **MASTERS, **offload(where, folder, masters=True))
    for step in range(2):
        run(model, optimizer, range(step, step + 1))
        before = [param.detach().clone() for param in model.parameters()]
        for param in model.parameters():
            param.data.copy_(param.data * 0.5)
        for param, own in zip(model.parameters(), before, strict=True):
            param.data.copy_(own)
    halved = dict(model.named_parameters())["uneven.weight"]
    with torch.no_grad():
        halved.mul_(0.5)
    if where is None:  # what is edited is the rounded weight
        halved.data.copy_(halved.data.bfloat16().to(halved.dtype))
    run(model, optimizer, range(3, 4))
    return everything(model, optimizer)


@pytest.mark.parametrize("given", [{"reduce_dtype": torch.float32}, {"gradient_accumulation_steps": 2}, {"qk_clip": 1}])
def test_rounded_weights_have_rounded_gradients(given: dict[str, Any]) -> None:
    with pytest.raises(compile_muon.ConfigError, match="OffloadConfig.masters = True: ") as error:
        made(**MASTERS, **given, offload={"device": "cpu", "masters": True})
    assert next(iter(given)) in str(error.value) or "micro-batches" in str(error.value)


def test_the_host_computes_adamw_and_nothing_else() -> None:
    with pytest.raises(compile_muon.ConfigError, match="OffloadConfig.adamw_on = 'cpu': finds no moments of AdamW"):
        made(auxiliary="lion", offload={"device": "cpu", **HOST})


def test_the_host_steps_weights_in_any_memory_format() -> None:
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu", **HOST}}}
        _, optimizer = compile_muon.initialize(model, config)
        weight = next(param for param in model.parameters() if param.ndim == 4)
        weight.grad = torch.randn(4, 3, 3, 3)
        optimizer.step()
        found.append(torch.stack([weight.detach(), optimizer.state[weight]["exp_avg"]]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("loop", "world"), [(with_averages, 1), pytest.param(written_by_users, 2, marks=pytest.mark.full)]
)
def test_states_and_master_weights_follow_edits(
    ranks: RanksOf, tmp_path: Path, loop: Callable[..., Any], world: int
) -> None:
    places = (None, "nvme")
    assert not differing(*(ranks(world).run(loop, where=x, folder=str(tmp_path))[0] for x in places))


def failing(call: Callable[..., int], after: int, error: Exception) -> Callable[..., int]:
    """Calls of the disk, one of which fails."""
    calls = iter(range(after + 1))

    def called(*args: Any, **kwargs: Any) -> int:
        if next(calls, None) == after:
            raise error
        return call(*args, **kwargs)

    return called


def through_a_fault(
    folder: str, what: str, after: int, number: int, rank: int, adamw_on: str = "device", **given: Any
) -> dict[str, Any]:
    """A step, one that the disk of a rank fails in, and the same step again."""
    offloaded = offload("nvme", folder, buffer_count=2, masters=True, adamw_on=adamw_on)
    model, optimizer = made(stage=2, update="step", **given, **offloaded)
    run(model, optimizer, range(1))
    before = everything(model, optimizer)
    loss(model, data(1, 0, world_and_rank()[1])).backward()
    call, reason = getattr(os, what), os.strerror(number)
    if world_and_rank()[1] == rank:
        call = failing(call, after, OSError(number, reason))
    error = ""
    commit = engine_step.commit

    def failing_commit(*args: Any) -> Any:  # a read ahead of that fails amid an exchange, which others wait in
        with mock.patch.object(os, what, call):
            return commit(*args)

    with mock.patch.object(engine_step, "commit", failing_commit):
        try:
            optimizer.step()
        except OffloadError as found:
            error = str(found)
    if not error:
        return {"error": ""}
    wrong = differing(before, everything(model, optimizer))
    optimizer.step()
    optimizer.zero_grad()
    run(model, optimizer, range(2, 3))
    return {"error": error, "wrong": wrong, "end": everything(model, optimizer)}


@pytest.mark.parametrize(
    ("what", "calls", "given"),
    [
        ("preadv", (5,), {}),
        ("pwritev", (7,), HOST),
        pytest.param("preadv", range(0, 20, 2), MASTERS, marks=pytest.mark.full),
        pytest.param("pwritev", range(0, 20, 3), {**MASTERS, "method": "normuon"}, marks=pytest.mark.full),
        pytest.param("pwritev", range(1, 12, 2), {**MASTERS, **HOST}, marks=pytest.mark.full),
    ],
)
def test_a_disk_that_fails_changes_nothing(
    ranks: RanksOf, tmp_path: Path, what: str, calls: Iterable[int], given: dict[str, Any]
) -> None:
    group = ranks(2)
    resident = group.run(untouched, **given)[0]
    seen = 0
    for after in calls:
        number = errno.EIO if "read" in what or after % 4 else errno.ENOSPC
        found = group.run(through_a_fault, folder=str(tmp_path), what=what, after=after, number=number, rank=1, **given)
        if not found[1]["error"]:
            continue  # of a bucket that was read ahead, and later anew
        seen += 1
        assert str(tmp_path) in found[1]["error"] and os.strerror(number) in found[1]["error"]
        assert "rank 1 could not keep optimizer state" in found[0]["error"]
        for one in found:
            assert not one["wrong"]
            assert not differing(resident, one["end"])
    assert seen


def untouched(**given: Any) -> dict[str, Tensor]:
    """The end of a run on the device, in which nothing goes wrong."""
    own = {name: value for name, value in given.items() if name not in ("adamw_on", "masters")}
    pair = made(stage=2, update="step", **own)
    with as_on_the_host(given):
        run(*pair, range(3))
    return everything(*pair)


def broken_off(optimizer: compile_muon.MuonZero, point: int, error: type[BaseException]) -> int:
    """A step that raises at one of its calls of the package's functions; how many calls it came to."""
    # In a checkout compile_muon.__path__ holds the root, and so .venv with torch, whose own contexts may stay entered.
    folders = [os.path.dirname(str(compile_muon.__file__)), *passes.__path__, *kernels.__path__]
    calls = 0

    def called(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        # Going on with a generator is no call, and what it cleans up would never be.
        if event != "call" or code.co_flags & CO_GENERATOR or not code.co_filename.startswith(tuple(folders)):
            return
        calls += 1
        if calls == point and error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        elif calls == point:
            sys.setprofile(None)
            raise error

    sys.setprofile(called)
    try:
        optimizer.step()
    except error:
        pass
    finally:
        sys.setprofile(None)
    optimizer.zero_grad()
    return calls


def through_broken_steps(where: str | None, folder: str, points: int, **given: Any) -> tuple[Counter[str], list[str]]:
    """Steps that raise amid anything, each of a batch that the run then goes on without: what became of them, and
    what differs at the end from a run that never saw these batches."""
    what = {name: given.pop(name) for name in ("masters", "adamw_on") if name in given}
    model, optimizer = made(stage=2, update="step", **given, **offload(where, folder, **what))
    run(model, optimizer, range(1))
    before = everything(model, optimizer)
    saved = compile_muon.Checkpointer(Path(folder) / "saved", asynchronous=True)
    saved.save(1, model, optimizer)
    for _ in range(2):  # the first of its kind has more to do
        loss(model, data(1, 0, 0)).backward()
        calls = broken_off(optimizer, 0, RuntimeError)
        optimizer.check()
        whole = everything(model, optimizer)
        saved.load(model, optimizer)
    found = Counter[str]()
    for number in range(points):
        loss(model, data(1, 0, 0)).backward()
        error = (RuntimeError, KeyboardInterrupt)[number % 2]
        point = 1 + number * (calls - 1) // (points - 1)
        if number == points // 2:
            saved.save(2, model, optimizer)
        broken_off(optimizer, point, error)
        if optimizer.engine.step.torn:
            assert error is RuntimeError
            for refused in (optimizer.step, lambda: saved.save(3, model, optimizer)):
                with pytest.raises(compile_muon.LedgerError, match="broke off while it wrote"):
                    refused()
            outcome = "refused"
        else:
            optimizer.check()
            now = everything(model, optimizer)
            same = [name for name, other in (("unchanged", before), ("whole", whole)) if not differing(other, now)]
            outcome = same[0] if same else f"{error.__name__} at call {point} of {calls}"
        found[outcome] += 1
        if outcome != "unchanged":
            saved.load(model, optimizer)
    run(model, optimizer, range(1, 3))
    return found, differing(everything(model, optimizer), untouched(**what, **given))


@pytest.mark.parametrize(
    ("where", "given"),
    [
        (None, {}),
        ("nvme", {}),
        ("nvme", {**MASTERS, **HOST, "masters": True, "checks": "next_step"}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("cpu", {"method": "normuon"}),
                ("cpu", {**MASTERS, **HOST, "masters": True}),
                ("nvme", {**MASTERS, "masters": True, "method": "muown"}),
                ("nvme", {"method": "soap", "checks": "next_step"}),
                (None, {"momentum_dtype": "8bit"}),
            )
        ),
    ],
)
@pytest.mark.parametrize("points", [16, pytest.param(150, marks=pytest.mark.campaign)])
def test_a_step_that_raises_has_changed_nothing_or_is_the_last(
    tmp_path: Path, where: str | None, given: dict[str, Any], points: int
) -> None:
    """Ctrl-C amid its writes ends it when it is whole."""
    found, wrong = through_broken_steps(where, str(tmp_path), points, **given)
    assert {*found} <= {"unchanged", "whole", "refused"}, found
    assert found["unchanged"] >= points // 4 and found["whole"], found
    assert where != "nvme" or found["refused"] <= points // 8, found
    assert not wrong


def interrupted(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """``function``, which raises once it was called that often."""
    left = iter(range(calls))

    def call(*args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*args)

    return call


def test_a_load_behind_a_step_that_broke_off_at_its_end_is_whole(tmp_path: Path) -> None:
    """The file has new generations by then, and ``optimizer.state`` tensors of the former ones."""
    given = {"method": "normuon", **offload("nvme", tmp_path)}
    model, optimizer = made(stage=2, update="step", **given)
    run(model, optimizer, range(1))
    saved = compile_muon.Checkpointer(tmp_path / "saved")
    saved.save(1, model, optimizer)
    state, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    before = everything(model, optimizer)
    for after, by_file in ((0, True), (0, False), (3, True), (3, False)):  # so many new states are shown
        loss(model, data(1, 0, 0)).backward()
        breaking = interrupted(OffloadedStateView._state, after)
        with mock.patch.object(OffloadedStateView, "_state", breaking), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert optimizer.engine.step.torn
        optimizer.zero_grad()
        if by_file:
            saved.load(model, optimizer)
        else:
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
        assert not differing(before, everything(model, optimizer)), (after, by_file)
    run(model, optimizer, range(1, 3))
    assert not differing(everything(model, optimizer), untouched(**given))


def no_room_is_known_before_anything_is_sharded(folder: str) -> None:
    torch.manual_seed(0)
    model = Odd()
    params = list(model.parameters())
    full_disk = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with mock.patch.object(os, "posix_fallocate", full_disk if world_and_rank()[1] == 1 else os.posix_fallocate):
        with pytest.raises(OffloadError) as error:
            compile_muon.MuonZero(model, stage=3, **offload("nvme", folder))
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    own = ("No space left on device", folder, "nothing was sharded")
    for part in own if world_and_rank()[1] == 1 else ("rank 1 has no place",):
        assert part in str(error.value), error.value


def no_room_for_a_copy_beside_the_file_changes_nothing(folder: str) -> None:
    model, optimizer = made(stage=2, update="step", **offload("nvme", folder))
    saved = Path(folder) / "saved"
    compile_muon.Checkpointer(saved).save(0, model, optimizer)
    run(model, optimizer, range(1))
    before = everything(model, optimizer)
    full_disk = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with mock.patch.object(os, "posix_fallocate", full_disk if world_and_rank()[1] == 1 else os.posix_fallocate):
        for done, call in (
            ("saved", lambda: compile_muon.Checkpointer(saved, asynchronous=True).save(1, model, optimizer)),
            ("loaded", lambda: compile_muon.Checkpointer(saved).load(model, optimizer)),
        ):
            with pytest.raises(compile_muon.CheckpointError, match="No space") as error:
                call()
            assert f"was not {done}: rank 1: offload.nvme_path = {folder!r}" in str(error.value), error.value
    assert not differing(before, everything(model, optimizer))


@pytest.mark.parametrize(
    ("check", "world"),
    [
        (a_step_reads_a_state_once, 1),
        (host_memory_is_read_ahead_in_the_order_of_backward_and_of_the_step, 1),
        (no_room_is_known_before_anything_is_sharded, 2),
        (no_room_for_a_copy_beside_the_file_changes_nothing, 2),
    ],
)
def test_on_ranks(ranks: RanksOf, tmp_path: Path, check: Callable[..., None], world: int) -> None:
    ranks(world).run(check, folder=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {"saved"}


def test_descriptors_do_not_grow_with_the_state(tmp_path: Path) -> None:
    buckets = [store.Bucket([store.Slot(str(number), (4,), torch.float32)]) for number in range(40)]
    before = len(os.listdir("/proc/self/fd"))
    kept = store.FileStore(tmp_path, buckets, buffers=2)
    assert len(os.listdir("/proc/self/fd")) - before <= 2, kept


@pytest.mark.full
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, torch, compile_muon
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        optimizer = compile_muon.MuonZero(model, offload={"device": "nvme", "nvme_path": sys.argv[1]})
        print("ready", flush=True)
        while True:
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def kept_in(
    dtype: str | None, update: str = "step", compiled: bool = False, **more: Any
) -> tuple[list[float], dict[str, Tensor], int]:
    torch._dynamo.reset()
    model, optimizer = made(stage=2, update=update, momentum_dtype=dtype, **more)
    called = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    losses = []
    for step in range(10):
        losses.append(loss(called, data(step % 2, 0, world_and_rank()[1])))
        train_step(optimizer, losses[-1])
    experts = optimizer.state[dict(model.named_parameters())["experts"]]
    nbytes = sum(x.numel() * x.itemsize for x in map(local_tensor, experts.values()))
    return [x.item() for x in losses], everything(model, optimizer), nbytes


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.full), "8bit"])
def test_momenta_in_fewer_bits_train_alike(ranks: RanksOf, tmp_path: Path, dtype: str) -> None:
    """Wherever they are."""
    exact, _, nbytes = ranks(1).run(kept_in, dtype=None)[0]
    found, state, less = ranks(1).run(kept_in, dtype=dtype)[0]
    assert less < 0.6 * nbytes
    assert 0 < max(abs(a - b) for a, b in zip(exact, found, strict=True)) < 0.02 * exact[0]
    assert not differing(state, ranks(1).run(kept_in, dtype=dtype, **offload("nvme", tmp_path))[0][1])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "8bit"])
def test_directions_of_backward_are_made_of_the_same_momenta(ranks: RanksOf, dtype: str) -> None:
    updates = ("step", "backward")
    assert not differing(*(ranks(2).run(kept_in, dtype=dtype, update=x, compiled=True)[0][1] for x in updates))
