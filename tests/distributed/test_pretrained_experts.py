"""Folders with single experts, as Transformers writes them, into stacks: bit for bit, each rank reading its own."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import RanksOf
from support.mixtures import tiny
from support.reference import full, world_and_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import compile_muon
from compile_muon import CheckpointError
from compile_muon.engine.dtensors import local_tensor

KINDS = ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss")
MATRIX = 16 * 32  # elements of one matrix of one expert


def save(folder: Path, kind: str, model: Any = None) -> str:
    """A folder by Transformers' own ``save_pretrained``, in several files, and beside it what its model had."""
    model = tiny(kind) if model is None else model
    model.save_pretrained(folder, max_shard_size="20KB")
    torch.save(model.state_dict(), folder / "want.pt")
    return str(folder)


def wanted(folder: str) -> dict[str, Tensor]:
    return torch.load(Path(folder) / "want.pt")


def initialized(kind: str, folder: str, stage: int, size: int = 1, **settings: Any) -> Any:
    with torch.device("meta"):
        model = tiny(kind, **settings)
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if size > 1:
        config["expert_parallel"] = {"size": size}
    return compile_muon.initialize(model, config, weights=folder)


def compare(model: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """Bit for bit, as we put it together and as PyTorch does."""
    whole = compile_muon.full_state_dict(model)
    assert not whole or whole.keys() == expected.keys()
    for name, value in model.state_dict().items():
        for found in (full(value), *([whole[name]] if whole else [])):
            assert found.dtype == expected[name].dtype and torch.equal(found, expected[name]), name


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """What this rank reads: names and shapes."""
    from compile_muon.files import tensors

    found: list[tuple[str, tuple[int, ...]]] = []
    own = tensors.converted

    def read(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        found.append((name, tuple(part.shape)))
        return own(name, part, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "converted", read)
        yield found


def held(model: nn.Module, optimizer: compile_muon.MuonZero) -> int:
    """Elements that this rank has of what is in folders."""
    buffers = [buffer for name, buffer in model.named_buffers() if name in model.state_dict()]
    return sum(tensor.numel() for tensor in [*(a.local for a in optimizer.engine.params), *buffers])


def number(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0])


def experts_read(folder: str, build: Callable[[], tuple[Any, Any]]) -> list[tuple[str, tuple[int, ...]]]:
    """What this rank reads of experts for a model that has what the folder has; it reads what it holds, no more."""
    with counted() as read:
        model, optimizer = build()
    compare(model, wanted(folder))
    assert sum(math.prod(shape) for _, shape in read) == held(model, optimizer)
    return [(name, shape) for name, shape in read if ".experts." in name]


def load(folders: dict[str, str], size: int) -> None:
    world, rank = world_and_rank()
    for kind, folder in folders.items():
        for stage in (0, 3):
            read = experts_read(folder, partial(initialized, kind, folder, stage, size))
            if kind == "GptOss":
                continue
            # Ranks along "expert" are neighbours; each one's experts are cut among the ranks of its place.
            outer, inner = divmod(rank, size)
            parts = world if stage else size
            first = 8 // parts * ((inner * (world // size) + outer) if stage else inner)
            assert {number(name) for name, _ in read} == set(range(first, first + 8 // parts)), (kind, stage)
            assert len({name for name, _ in read}) == len(read) == 2 * 3 * 8 // parts
            assert {math.prod(shape) for _, shape in read} == {MATRIX}


@pytest.mark.parametrize(
    ("world", "size", "kinds"),
    [
        (2, 2, KINDS[2:]),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((4, 2, KINDS[:2]), (2, 1, KINDS[2:]))),
    ],
)
def test_each_rank_reads_its_experts(
    ranks: RanksOf, world: int, size: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    folders = {kind: save(tmp_path / kind, kind) for kind in kinds}
    ranks(world).run(load, folders=folders, size=size)


def load_pieces(folder: str) -> None:
    """Pieces of slices (HFSDP), and parts of matrices along both of their dims."""
    _, rank = world_and_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = on_meta()
    settings: dict[str, Any] = {"stage": 3, "shard_state_over": "all", "mesh": mesh, "weights": folder}
    read = experts_read(folder, lambda: (model, compile_muon.MuonZero(model, **settings)))
    assert len({number(name) for name, _ in read}) == 2

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = on_meta()
    for layer in model.model.layers:
        for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
            stack = getattr(layer.mlp.experts, name)
            part = distribute_tensor(stack.detach(), mesh["tensor"], [Shard(dim)])
            setattr(layer.mlp.experts, name, nn.Parameter(part))
    read = experts_read(folder, lambda: (model, compile_muon.MuonZero(model, stage=3, mesh=mesh, weights=folder)))
    shard, tensor = divmod(rank, 2)
    assert {number(name) for name, _ in read} == set(range(4 * shard, 4 * shard + 4))
    # One has the gates, the other what goes up; both have half of each row that goes down.
    assert {name.split(".")[-2]: shape for name, shape in read} == {
        ("w3" if tensor else "w1"): (16, 32), "w2": (32, 8)
    }  # fmt: skip


def on_meta() -> Any:
    with torch.device("meta"):
        return tiny("Mixtral", num_hidden_layers=1)


@pytest.mark.full
def test_each_rank_reads_its_part_of_a_matrix(ranks: RanksOf, tmp_path: Path) -> None:
    folder = save(tmp_path, "Mixtral", tiny("Mixtral", num_hidden_layers=1))
    ranks(4).run(load_pieces, folder=folder)


def load_others(folder: str) -> None:
    rank = world_and_rank()[1]
    expected = wanted(f"{folder}/low")
    model, _ = initialized("Qwen3Moe", f"{folder}/low", 3, 2, num_hidden_layers=1, tie_word_embeddings=True)
    assert expected["lm_head.weight"].dtype is torch.bfloat16
    compare(model, {name: value.float() for name, value in expected.items()})
    assert model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]

    # What we write are stacks.
    compile_muon.save_pretrained(model, f"{folder}/own")
    if rank == 0:
        assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(f"{folder}/own/model.safetensors")
    for param in model.parameters():
        local_tensor(param).detach().zero_()
    compile_muon.load_pretrained(model, f"{folder}/own")
    compare(model, {name: value.float() for name, value in expected.items()})

    # A layer that Transformers leaves out, as of the released DeepSeek-V3.
    model, _ = initialized("DeepseekV3", f"{folder}/more", 3, 2, num_hidden_layers=1)
    compare(model, wanted(f"{folder}/more"))

    # The model without its head: names have no "model." then.
    expected = wanted(f"{folder}/base")
    before = full(model.lm_head._parameters["weight"]).clone()
    with pytest.raises(CheckpointError, match=r"lm_head.weight: is missing; load"):
        compile_muon.load_pretrained(model, f"{folder}/base")
    compile_muon.load_pretrained(model, f"{folder}/base", strict=False)
    compare(model, {f"model.{name}": value for name, value in expected.items()} | {"lm_head.weight": before})


def test_other_folders(ranks: RanksOf, tmp_path: Path) -> None:
    low = tiny("Qwen3Moe", num_hidden_layers=1, tie_word_embeddings=True).bfloat16()
    save(tmp_path / "low", "Qwen3Moe", low)
    deepseek = tiny("DeepseekV3", num_hidden_layers=1)
    save(tmp_path / "more", "DeepseekV3", deepseek)
    with torch.no_grad():
        for param in deepseek.parameters():
            param.add_(1)
    save(tmp_path / "base", "DeepseekV3", deepseek.model)
    edit(tmp_path / "more", {"model.layers.61.mlp.experts.0.up_proj.weight": torch.zeros(2)})
    ranks(2).run(load_others, folder=str(tmp_path))


def edit(folder: Path, changes: Mapping[str, Tensor | None], to: Path | None = None) -> str:
    """The same in one file, with some tensors changed, added, or left out for None."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    to = folder if to is None else to
    to.mkdir(exist_ok=True)
    for file in to.glob("model*.safetensors*"):
        file.unlink()
    changed = {**tensors, **changes}
    save_file({n: t.clone() for n, t in changed.items() if t is not None}, to / "model.safetensors")
    return str(to)


EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w{}.weight"


def misfits(folders: dict[str, str]) -> dict[str, str]:
    import transformers.conversion_mapping as table
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose
    from transformers.core_model_loading import WeightConverter as Converter
    from transformers.core_model_loading import WeightRenaming as Renaming

    said: dict[str, str] = {}
    model = tiny("Mixtral", num_hidden_layers=1)
    compile_muon.MuonZero(model, stage=3)
    before = {name: local_tensor(param).detach().clone() for name, param in model.named_parameters()}
    parameters = model.model.layers[0].mlp.experts._parameters
    kept = full(parameters["gate_up_proj"]).clone()

    def refuse(case: str, folder: str) -> None:
        with counted() as read, pytest.raises(CheckpointError) as error:
            compile_muon.load_pretrained(model, folder)
        said[case] = str(error.value)
        assert not read
        for name, param in model.named_parameters():
            assert torch.equal(local_tensor(param), before[name]), name

    for case, folder in folders.items():
        if case not in ("good", "few"):
            refuse(case, folder)

    router = Renaming(".block_sparse_moe.", ".mlp.")
    with pytest.MonkeyPatch.context() as patch:
        others = [
            Converter(".experts.*.w2.weight", ".experts.down_proj", [MergeModulelist(dim=0), Transpose(1, 2)]),
            Converter(
                [".experts.*.w1.weight", ".experts.*.w3.weight"], ".experts.gate_up_proj",
                [MergeModulelist(dim=1), Concatenate(dim=1)],
            ),
            Converter("self_attn.q_proj", ["self_attn.q_proj", "self_attn.k_proj"], [Chunk(dim=0)]),
        ]  # fmt: skip
        patch.setattr(table, "get_model_conversion_mapping", lambda model: [router, *others])
        refuse("operations", folders["good"])
        three = [f".experts.*.w{i}.weight" for i in (1, 2, 3)]
        own = Converter(three, ".experts.gate_up_proj", [MergeModulelist(dim=0), Concatenate(dim=1)])
        patch.setattr(table, "get_model_conversion_mapping", lambda model: [router, own])
        refuse("thirds", folders["good"])
        patch.delattr(table, "get_model_conversion_mapping")
        refuse("no table", folders["good"])

    compile_muon.load_pretrained(model, folders["few"], strict=False)
    expected = wanted(folders["good"])
    changed = expected["model.layers.0.mlp.experts.gate_up_proj"].clone()
    changed[3, 16:] = kept[3, 16:]
    assert torch.equal(full(parameters["gate_up_proj"]), changed)
    return said


def test_what_does_not_fit_is_refused_on_every_rank(ranks: RanksOf, tmp_path: Path) -> None:
    model = tiny("Mixtral", num_hidden_layers=1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    good = tmp_path / "good"
    save(good, "Mixtral", model)
    zeros, stack = torch.zeros(16, 32), torch.zeros(8, 32, 16)

    cases: dict[str, dict[str, Tensor | None]] = {
        "some": {
            EXPERT.format(3, 3): None, EXPERT.format(7, 2): None, EXPERT.format(8, 1): zeros,
            EXPERT.format(2, 1): torch.zeros(15, 32), "model.layers.0.more": zeros,
        },
        "ups": {EXPERT.format(i, 3): None for i in range(8)},
        "all": {EXPERT.format(i, 2): None for i in range(8)},
        "twice": {EXPERT.format(4, 1).replace("block_sparse_moe", "mlp"): zeros},
        "stack": {"model.layers.0.mlp.experts.down_proj": stack},
        "few": {EXPERT.format(3, 3): None, EXPERT.format(9, 3): zeros},
    }  # fmt: skip
    folders = {case: edit(good, changes, tmp_path / case) for case, changes in cases.items()}
    folders["good"] = str(good)
    found = ranks(2).run(misfits, folders=folders)
    assert found[0] == found[1]
    for case, parts in REFUSED.items():
        for part in parts:
            assert part in found[0][case], (case, found[0][case])


REFUSED = {
    "some": (
        f"{EXPERT.format(3, 3)}: is missing", f"{EXPERT.format(7, 2)}: is missing",
        f"{EXPERT.format(8, 1)}: is not in the model", "model.layers.0.more: is not in the model",
        f"{EXPERT.format(2, 1)}: has shape [15, 32], an expert's in the model [16, 32]",
    ),
    "ups": (f"{EXPERT.format(0, 3)}: is missing, {EXPERT.format(1, 3)}: is missing", "and 3 more"),
    "all": ("model.layers.0.mlp.experts.down_proj: is missing; load",),
    "twice": (
        f"{EXPERT.format(4, 1)}, {EXPERT.format(4, 1).replace('block_sparse_moe', 'mlp')}: are both expert 4 of "
        "model.layers.0.mlp.experts.gate_up_proj; load",
    ),
    "stack": (
        f"{EXPERT.format(0, 2)}, model.layers.0.mlp.experts.down_proj: are both "
        "model.layers.0.mlp.experts.down_proj; load",
    ),
    "operations": (
        f"down_proj: is made of {EXPERT.format(0, 2)}, ", "and 3 more by MergeModulelist(dim=0) and Transpose, which",
        f"gate_up_proj: is made of {EXPERT.format(0, 1)}, ", "and 11 more by MergeModulelist(dim=1) and Conc",
        "q_proj.weight: is made of model.layers.0.self_attn.q_proj.weight by Chunk(dim=0), which is not done",
    ),
    "thirds": ("gate_up_proj: has shape [8, 32, 32], which is no stack of .experts.*.w1.weight, ",),
    "no table": ("model.layers.0.mlp.experts.gate_up_proj: is missing", ".weight: is not in the model and 23 more"),
}  # fmt: skip
