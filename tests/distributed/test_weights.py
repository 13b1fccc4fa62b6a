"""Whole weights in and out of sharded models: bit for bit, any stage and world, and never one rank's rows as whole."""

import json
import re
import shutil
import sys
import time
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save_file
from support.harness import Ranks, RanksOf, on_ranks
from support.reference import full, refusal, train_step, world_and_rank
from support.trainers import gpt
from support.zoo import Uneven
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import compile_muon
from compile_muon import CheckpointError, ConfigError, PeerError
from compile_muon.files.tensor_folder import parse_size


class Net(Uneven):
    """Beside what is uneven: buffers that are persistent or not, integers, half precision, and what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(super().forward(x).bfloat16()).float() + self.frozen.sum()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(stage: int, seed: int = 0, **settings: Any) -> tuple[Net, compile_muon.MuonZero]:
    model = net(seed)
    settings.setdefault("muon_params", ["up.weight", "down.weight", "low.weight"])
    return model, compile_muon.MuonZero(model, stage=stage, ns_dtype="float32", **settings)


def train(model: nn.Module, optimizer: compile_muon.MuonZero, steps: int = 1) -> None:
    for _ in range(steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(world_and_rank()[1]))
        train_step(optimizer, model(x).square().mean())


def whole(model: nn.Module) -> dict[str, Tensor]:
    """By PyTorch's own gather, and rank 0's buffers."""
    found = {name: full(value).detach().clone() for name, value in model.state_dict().items()}
    if dist.is_initialized():
        for name, _ in model.named_buffers():
            if name in found:
                dist.broadcast(found[name], 0)
    return found


def masters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Half precision as a sharded model has it."""
    return {name: value.float() if value.dtype is torch.bfloat16 else value for name, value in state.items()}


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        assert type(found[name]) is Tensor and found[name].device.type == "cpu", name
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 2), (3, 3), pytest.param(2, 0, marks=pytest.mark.full)])
@on_ranks()
def test_weights_go_out_and_in_bit_for_bit(stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "weights")
    model, optimizer = sharded(stage)
    train(model, optimizer)
    expected = whole(model)
    state = compile_muon.full_state_dict(model)
    rank = world_and_rank()[1]
    if rank:
        assert state == {}
    else:
        same(state, expected)
        assert list(state) == list(net().state_dict())
        assert state["head.weight"].data_ptr() == state["tied.weight"].data_ptr()
        if stage == 0:
            kept = {n: p.detach() for n, p in model.named_parameters()}
            kept = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in kept.items()}
            assert not any(state[n].data_ptr() == p.data_ptr() for n, p in kept.items())
        net(4).load_state_dict(state)
    other, other_optimizer = sharded(stage, seed=5)
    train(other, other_optimizer)
    moments = [held.momentum.clone() for held in other_optimizer.engine.step.muon]
    compile_muon.load_full_state_dict(other, state if rank == 0 else None)
    same(whole(other), expected)
    assert all(torch.equal(a.momentum, m) for a, m in zip(other_optimizer.engine.step.muon, moments, strict=True))
    for held in other_optimizer.engine.params:  # what the model computes with is new, too
        if held.resident is not None:
            held.await_refresh()
            assert torch.equal(held.resident, expected[held.name].to(held.resident.dtype)), held.name
    train(other, other_optimizer)

    compile_muon.save_pretrained(model, folder)
    third, _ = sharded(stage, seed=6)
    compile_muon.load_pretrained(third, folder)
    same(whole(third), expected)
    assert not list(Path(folder).glob("*.tmp"))
    stored = load_file(Path(folder) / "model.safetensors")
    assert "tied.weight" not in stored
    same(stored | {"tied.weight": stored["head.weight"]}, expected)


def save_one(stage: int, folder: str, size: str) -> None:
    model, optimizer = sharded(stage, param_dtype="bfloat16" if stage == 3 else None)
    train(model, optimizer) if stage != 3 else None
    compile_muon.save_pretrained(torch.compile(model), folder, max_shard_size=size)


def load_other(stage: int, folder: str) -> None:
    model, _ = sharded(stage, seed=9)
    compile_muon.load_pretrained(model, folder)
    stored: dict[str, Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        stored |= load_file(file)
    if (index := Path(folder) / "model.safetensors.index.json").exists():
        assert json.loads(index.read_text())["weight_map"].keys() == stored.keys()
    same(whole(model), stored | {"tied.weight": stored["head.weight"]})


def test_one_save_replaces_another_and_loads_on_other_worlds_and_stages(ranks: RanksOf, tmp_path: Path) -> None:
    folder = str(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    for size, files, (world, stage), (other, other_stage) in (
        ("200", 6, (2, 3), (3, 1)), ("5GB", 1, (3, 2), (1, 3)), ("400", 2, (1, 1), (2, 2)),
    ):  # fmt: skip
        ranks(world).run(save_one, stage=stage, folder=folder, size=size)
        names = {path.name for path in tmp_path.iterdir()} - {"notes.txt"}
        assert len(names) == (1 if files == 1 else files + 1), names
        assert ("model.safetensors" if files == 1 else "model.safetensors.index.json") in names
        ranks(other).run(load_other, stage=other_stage, folder=folder)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("size", [200, 10**6])
def test_a_kill_leaves_the_old_weights_the_new_ones_or_none(tmp_path: Path, size: int) -> None:
    """The folder is kept as it is ahead of each file that is opened, renamed or removed in it."""
    models, active, kept = [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3)], [], []
    optimizers = [compile_muon.MuonZero(model, stage=0) for model in models]
    weights = tmp_path / "weights"

    def before(event: str, args: tuple[Any, ...]) -> None:
        if active and event in ("os.rename", "os.remove", "open") and str(args[0]).startswith(str(weights)):
            active.clear()
            kept.append(shutil.copytree(weights, tmp_path / str(len(kept))))
            active.append(True)

    compile_muon.save_pretrained(models[0], weights, max_shard_size=size)
    sys.addaudithook(before)  # for good, but in this test alone it does something
    active.append(True)
    compile_muon.save_pretrained(models[1], weights, max_shard_size=size)
    active.clear()
    found = []
    for folder in (*kept, weights):
        said = refusal(compile_muon.load_pretrained, models[2], folder)
        have = models[2].state_dict()
        held = [all(torch.equal(t, have[n]) for n, t in model.state_dict().items()) for model in models[:2]]
        found.append(
            "none" if "holds neither" in said else {(True, False): "old", (False, True): "new"}.get((*held,), said)
        )
    assert optimizers and len(found) > 3 and found[0] == "old" and found[-1] == "new"
    assert found == sorted(found, key=["old", "none", "new"].index)


class Lazy(UserDict[str, Tensor]):
    """Tensors that are made when they are asked for; one of them may fail, after it was looked at once."""

    failing, asked = "", 0

    def __getitem__(self, name: str) -> Tensor:
        self.asked += name == self.failing
        if self.asked > 1 and name == self.failing:
            raise OSError("the disk is gone")
        return self.data[name].double() if self.data[name].is_floating_point() else self.data[name]


@on_ranks(2)
def test_a_mapping_is_asked_for_one_tensor_at_a_time() -> None:
    model, _ = sharded(3)
    state = net(3).state_dict()
    compile_muon.load_full_state_dict(model, Lazy(state))
    same(whole(model), masters(state))
    broken = Lazy(net(4).state_dict())
    broken.failing = "thin.weight"
    message = refusal(compile_muon.load_full_state_dict, model, broken)
    assert message.startswith("loading stopped halfway") and "OSError: the disk is gone" in message


@on_ranks(2)
def test_what_does_not_fit_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "x")
    model, _ = sharded(3)
    before = whole(model)
    state: dict[str, Any] = dict(net(3).state_dict())
    wrong = dict(state)
    del wrong["up.bias"]
    wrong["more"] = torch.zeros(2)
    wrong["up.weight"] = state["up.weight"][:5]
    wrong["thin.bias"] = 3
    said = {"mapping": refusal(compile_muon.load_full_state_dict, model, wrong)}
    if world_and_rank()[1] == 0:
        Path(folder).mkdir()
        save_file({n: t.clone() for n, t in wrong.items() if n != "thin.bias"}, Path(folder) / "model.safetensors")
    dist.barrier()
    said["folder"] = refusal(compile_muon.load_pretrained, model, folder)
    said["nothing there"] = refusal(compile_muon.load_pretrained, model, folder + "/nowhere")
    own = folder + f"/{world_and_rank()[1]}"
    plain = {n: t.clone() for n, t in state.items() if n != "tied.weight"}
    Path(own).mkdir()
    plain |= {} if world_and_rank()[1] else {"frozen": torch.zeros(3, 2).double()}
    save_file(plain, own + "/model.safetensors")
    said["folders"] = refusal(compile_muon.load_pretrained, model, own)
    Path(own + "/model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 nonsense")
    said["damage"] = refusal(compile_muon.load_pretrained, model, own)
    said["not a folder"] = refusal(compile_muon.save_pretrained, model, "/dev/null/there")
    said["plain"] = refusal(compile_muon.full_state_dict, net())
    call = compile_muon.full_state_dict if world_and_rank()[1] else compile_muon.save_pretrained
    said["different calls"] = refusal(call, model, *([folder] if world_and_rank()[1] == 0 else []))
    same(whole(model), before)
    del wrong["up.weight"], wrong["thin.bias"]
    compile_muon.load_full_state_dict(model, wrong, strict=False)
    assert torch.equal(whole(model)["head.weight"], state["head.weight"])
    assert torch.equal(whole(model)["up.bias"], before["up.bias"])
    for problem in ("up.bias: is missing", "up.weight: has shape [5, 6], the model's [9, 6]", "more: is not in"):
        assert problem in said["mapping"] and problem in said["folder"], said
    assert "it is what rank 0 of 2 holds, saved without the others" in said["mapping"]
    assert "thin.bias: is a int, not a tensor" in said["mapping"]
    assert "holds neither model.safetensors nor model.safetensors.index.json" in said["nothing there"]
    assert "ranks see different weights" in said["folders"]
    assert "nothing was loaded" in said["damage"] and "rank 1" in said["damage"]
    assert "weights were not saved" in said["not a folder"] and "NotADirectoryError" in said["not a folder"]
    assert "holds no parameter that MuonZero sharded" in said["plain"]
    assert "ranks call different functions" in said["different calls"]


def test_sizes_are_those_of_hugging_face() -> None:
    assert [parse_size(x) for x in (7, "7", "5GB", " 20 mb", "1KB")] == [7, 7, 5 * 10**9, 20 * 10**6, 1000]
    for wrong in (0, -1, True, "5GiB", "GB", "five", 1.5):
        with pytest.raises(ConfigError, match="max_shard_size"):
            parse_size(wrong)


class Sized(nn.Module, PyTorchModelHubMixin):
    """Of the Hub: its folder has the constructor's arguments."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Encoder(nn.Sequential):
    """As sentence-transformers': a folder of modules, of which the first is Transformers' and saves itself."""

    def save_pretrained(self, path: str, safe_serialization: bool = True) -> None:
        self[0].save_pretrained(path, safe_serialization=safe_serialization)
        save_file(self[1].state_dict(), Path(path) / "pooling.safetensors")
        (Path(path) / "modules.json").write_text(json.dumps([type(module).__name__ for module in self]))


def save_otherwise(folder: str, stage: int) -> list[dict[str, Tensor]]:
    """Whole weights of both, on rank 0; an error on the first rank is one on each, beside that of a single rank."""
    sized, encoder = Sized(6), Encoder(gpt(), nn.Linear(8, 2))
    weights = []
    for model, name in ((sized, "sized"), (encoder, "encoder")):
        compile_muon.MuonZero(model, stage=stage)
        model.save_pretrained(f"{folder}/{name}")
        weights.append(compile_muon.full_state_dict(model))
    several = world_and_rank()[0] > 1
    with pytest.raises(CheckpointError if several else OSError) as caught:
        sized.save_pretrained(f"{folder}/sized/config.json")
    assert not several or re.search("weights were not saved: rank 0: .*Error", str(caught.value))
    return weights


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_class_with_a_layout_of_its_own_writes_it(ranks: RanksOf, tmp_path: Path, world: int, stage: int) -> None:
    from transformers import GPT2LMHeadModel

    sized, encoder = ranks(world).run(save_otherwise, folder=str(tmp_path), stage=stage)[0]
    loaded = Sized.from_pretrained(tmp_path / "sized")
    assert loaded.up.out_features == 6 and all(torch.equal(sized[n], x) for n, x in loaded.state_dict().items())
    assert json.loads((tmp_path / "encoder" / "modules.json").read_text()) == ["GPT2LMHeadModel", "Linear"]
    inner = GPT2LMHeadModel.from_pretrained(tmp_path / "encoder").state_dict()
    pooling = load_file(tmp_path / "encoder" / "pooling.safetensors")
    assert all(torch.equal(encoder[f"0.{name}"], x) for name, x in inner.items())
    assert all(torch.equal(encoder[f"1.{name}"], x) for name, x in pooling.items())


def call_alone(what: str, folder: str) -> str:
    model, optimizer = sharded(3)
    if dist.get_rank() == 1:
        time.sleep(5)  # longer than the other waits
        return ""
    arguments: tuple[Any, ...] = () if what == "full_state_dict" else (folder,)
    try:
        if what == "Checkpointer.save":
            compile_muon.Checkpointer(folder).save(1, model, optimizer)
        getattr(compile_muon, what)(model, *arguments)
    except (PeerError, CheckpointError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "what",
    ["Checkpointer.save", *(pytest.param(w, marks=pytest.mark.full) for w in ("full_state_dict", "save_pretrained"))],
)
def test_a_rank_that_calls_alone_is_told_so(what: str, tmp_path: Path) -> None:
    alone = Ranks(2, timeout=4.0)
    try:
        message = alone.run(call_alone, what=what, folder=str(tmp_path))[0]
    finally:
        alone.close()
    assert f"in {what}" in message or what in message, message
    assert "rank 1" in message and not list(tmp_path.iterdir())


def reset(module: nn.Module) -> None:
    """As modules do in their constructors."""
    if isinstance(module, Net):
        nn.init.normal_(module.frozen)
        nn.init.constant_(module.scale, 1.5)
        module.flags.copy_(torch.tensor([True, False, True]))
        module.passing.fill_(1)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize(("world", "stage"), [(2, 1), (3, 3), pytest.param(1, 0, marks=pytest.mark.full)])
@on_ranks()
def test_a_model_on_the_meta_device(stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    torch.manual_seed(11)
    reference = Net()
    torch.manual_seed(12 + 7 * world_and_rank()[1])  # rank 0's count
    with torch.device("meta"):
        model, other = Net(), Net()
    message = refusal(compile_muon.MuonZero, model, stage=stage)
    assert "is on the meta device" in message and "weights=folder" in message and "init=f" in message
    torch.manual_seed(12)
    reference.apply(reset)
    torch.manual_seed(12 + 7 * world_and_rank()[1])
    optimizer = compile_muon.MuonZero(model, stage=stage, muon_params=["up.weight"], init=reset)
    same(whole(model), masters(reference.state_dict()))
    assert torch.equal(model.passing, torch.ones(2))
    assert model.tied._parameters["weight"] is model.head._parameters["weight"]
    train(model, optimizer)
    compile_muon.save_pretrained(model, folder)
    message = refusal(compile_muon.MuonZero, other, stage=stage, muon_params=["up.weight"], weights=folder)
    assert "passing: a buffer that is not persistent" in message
    second = compile_muon.MuonZero(other, stage=stage, muon_params=["up.weight"], weights=folder, init=reset)
    same(whole(other), whole(model))
    train(other, second)


class Halved(nn.Module):
    """In whose ``state_dict()`` is what it makes of its matrix, and not the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(6, 8, bias=False)
        self.register_state_dict_post_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        both = state.pop(f"{prefix}both.weight")
        state[f"{prefix}left"], state[f"{prefix}right"] = both[:4].clone(), both[4:].clone()


@on_ranks(2)
def test_a_state_dict_of_other_names_is_not_asked() -> None:
    with torch.device("meta"):
        model = Halved()
    torch.manual_seed(12)
    compile_muon.MuonZero(model, stage=3, muon_params=["*"], init=reset)
    torch.manual_seed(12)
    assert torch.equal(full(model.both._parameters["weight"]), nn.Linear(6, 8, bias=False).weight)


@on_ranks(2)
def test_a_hugging_face_model_on_the_meta_device(tmp_path: Path) -> None:
    folder = str(tmp_path)
    torch.manual_seed(21)
    expected = gpt()
    with torch.device("meta"):
        model, other = gpt(), gpt()
    # Initialized as in its constructor: what is tied is tied afterwards.
    constructed: Any = gpt()
    targets = dict(constructed.all_tied_weights_keys)
    for name in targets:
        path, _, leaf = name.rpartition(".")
        holder = constructed.get_submodule(path)
        setattr(holder, leaf, nn.Parameter(getattr(holder, leaf).detach().clone()))
    for part in (*constructed.modules(), *constructed.parameters()):
        part._is_hf_initialized = False
    torch.manual_seed(22)
    constructed.initialize_weights()
    want = constructed.state_dict()
    want |= {name: want[source] for name, source in targets.items()}
    torch.manual_seed(22)
    compile_muon.MuonZero(model, stage=3, init=model.init_weights)
    same(whole(model), want)
    reference = gpt()
    reference.load_state_dict(expected.state_dict())
    _optimizer = compile_muon.MuonZero(reference, stage=3)
    compile_muon.save_pretrained(reference, folder)
    dist.barrier()
    compile_muon.initialize(other, {"zero_optimization": {"stage": 3}}, weights=folder)
    same(whole(other), expected.state_dict())
    for (name, buffer), want in zip(other.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, want), name
