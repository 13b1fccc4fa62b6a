"""Files that strangers wrote: every row is somewhere, once or the same, and no number becomes another."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compile_muon
from compile_muon import CheckpointError
from compile_muon.files.tensor_folder import FILE, INDEX
from compile_muon.files.tensors import Reader, TensorFacts, converted, read_tensors, write_tensors

WHOLE = torch.arange(32.0).reshape(8, 4)


def write(path: Path, tensors: dict[str, Tensor], first: dict[str, list[int]] | None = None) -> None:
    info = None if first is None else {name: {"saved_offsets": place} for name, place in first.items()}
    save_file(tensors, path, None if info is None else {"DCP_SHARDING_INFO": json.dumps(info)})


def write_pieces(folder: Path, pieces: list[tuple[slice, slice]], wrong: int = -1) -> list[str]:
    """Pieces of :data:`WHOLE`, a file each; another value in one of them."""
    for number, (rows, columns) in enumerate(pieces):
        piece = WHOLE[rows, columns].clone() + (number == wrong)
        write(folder / f"{number}.safetensors", {"x": piece}, {"x": [rows.start, columns.start]})
    return [f"{number}.safetensors" for number in range(len(pieces))]


ROWS = [(slice(0, 3), slice(0, 4)), (slice(3, 8), slice(0, 4))]
TILES = [(slice(r, r + 4), slice(c, c + 2)) for r in (0, 4) for c in (0, 2)]
TWICE = [*ROWS, (slice(1, 5), slice(1, 3)), ROWS[0]]


@pytest.mark.parametrize("pieces", [ROWS, TILES, TWICE, TILES[::-1]])
def test_pieces_make_the_whole_and_none_may_be_missing(tmp_path: Path, pieces: Any) -> None:
    files = write_pieces(tmp_path, pieces)
    reader, found = Reader(tmp_path, files), torch.zeros(8, 4)
    assert reader.facts == {"x": TensorFacts((8, 4), "float32")}
    read_tensors(reader, {"x": found})
    assert torch.equal(found, WHOLE)
    for number in range(len(files) if pieces is not TWICE else 0):
        with pytest.raises(CheckpointError, match=r"x\[.*\] is in none of the files|x: is .* is expected"):
            Reader(tmp_path, files[:number] + files[number + 1 :]).check({"x": TensorFacts((8, 4), "float32")})


def test_values_that_disagree_are_named(tmp_path: Path) -> None:
    files = write_pieces(tmp_path, TWICE, wrong=2)
    with pytest.raises(CheckpointError, match="x has two values in the same place, in .*2.safetensors"):
        Reader(tmp_path, files)


def test_ranks_share_what_all_of_them_hold(tmp_path: Path) -> None:
    tensors = {name: torch.full((4,), float(number)) for number, name in enumerate("abcd")}
    held = [tensors, tensors | {"own": torch.ones(8)}]
    everyone = [[(name, (0,), value.nbytes) for name, value in part.items()] for part in held]
    shares = []
    for rank, part in enumerate(held):
        ranks: Any = SimpleNamespace(rank=rank, world=2, gather=lambda mine: everyone)
        shares.append([name for path in write_tensors(tmp_path, part, ranks) for name in load_file(path)])
    assert [sorted(share) for share in shares] == [["a", "c"], ["b", "d", "own"]]
    found = {name: torch.zeros_like(value) for name, value in held[1].items()}
    read_tensors(Reader(tmp_path, sorted(path.name for path in tmp_path.iterdir())), found)
    assert all(torch.equal(found[name], value) for name, value in held[1].items())


@pytest.mark.parametrize("info", ["[", "[]", "{}", '{"x": 3}', '{"x": {"saved_offsets": [0]}}', "[" * 100_000])
def test_a_header_that_says_nonsense_is_named(tmp_path: Path, info: str) -> None:
    save_file({"x": WHOLE}, tmp_path / "a.safetensors", {"DCP_SHARDING_INFO": info})
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a.safetensors: its header says nonsense"):
        Reader(tmp_path, ["a.safetensors"])


@pytest.mark.parametrize("links", [False, True])
def test_no_pipe_is_waited_for(tmp_path: Path, links: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "link", "device", "nothing"):
        with pytest.raises(CheckpointError, match=f"{tmp_path}/{name}: is (not a plain file|missing)"):
            Reader(tmp_path, [name], links=links)


BIG = torch.tensor([1.0, 1e39], dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (BIG, torch.float32),
        (BIG, torch.bfloat16),
        (torch.tensor([7e4]), torch.float16),
        (torch.tensor([1e3]), torch.float8_e4m3fn),
        (torch.tensor([1 + 2j]), torch.float32),
        (torch.tensor([1e39 + 0j], dtype=torch.complex128), torch.complex64),
        (torch.tensor([2**40]), torch.int32),
        (torch.tensor([70_000]), torch.float16),
        (torch.tensor([0.5]), torch.int64),
        (torch.tensor([-1]), torch.uint8),
    ],
)
def test_a_number_that_would_become_another_is_an_error(value: Tensor, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match="^up.weight: is .*wanted"):
        converted("up.weight", value, dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor([1.01, -3e38, float("inf"), float("nan")]), torch.bfloat16),
        (torch.tensor([1e-30]), torch.float16),
        (torch.tensor([3.0]), torch.int64),
        (torch.tensor([2**24 + 1]), torch.float32),
        (torch.ones(2), torch.complex64),
    ],
)
def test_rounding_is_no_error(value: Tensor, dtype: torch.dtype) -> None:
    assert torch.equal(converted("x", value, dtype).isnan(), value.to(dtype).isnan())


class Folder:
    """A model, its weights in a folder, and how to load them."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        compile_muon.MuonZero(model, stage=0)
        self.model, self.path = model, path
        compile_muon.save_pretrained(model, path)
        self.tensors = load_file(path / FILE)

    def load(self) -> None:
        compile_muon.load_pretrained(self.model, self.path)

    def index(self, **places: str) -> None:
        """In place of one file."""
        weight_map = dict.fromkeys(self.tensors, "a.safetensors") | {n.replace("_", "."): f for n, f in places.items()}
        (self.path / FILE).unlink()
        (self.path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def gap(folder: Folder) -> None:
    tensors = folder.tensors | {"0.weight": folder.tensors["0.weight"][2:].clone()}
    write(folder.path / FILE, tensors, {n: [2, 0] if n == "0.weight" else [0] * t.ndim for n, t in tensors.items()})


def elsewhere(folder: Folder) -> None:
    folder.index(**{"0_weight": "b.safetensors"})
    write(folder.path / "a.safetensors", folder.tensors)
    write(folder.path / "b.safetensors", {"other": torch.ones(1)})


def a_number_for_a_file(folder: Folder) -> None:
    folder.index()
    (folder.path / INDEX).write_text('{"weight_map": {"0.weight": 1}}')


@pytest.mark.parametrize("harm", [gap, elsewhere, a_number_for_a_file])
def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path, harm: Callable[[Folder], None]) -> None:
    folder = Folder(tmp_path)
    harm(folder)
    with pytest.raises(CheckpointError, match="0.weight|a.safetensors|weight_map"):
        folder.load()


def test_the_index_says_which_of_two_files_is_meant_and_caches_of_links_are_read(tmp_path: Path) -> None:
    folder, blobs = Folder(tmp_path / "snapshot"), tmp_path / "blobs"
    blobs.mkdir()
    folder.index(**{"0_weight": "b.safetensors"})
    write(blobs / "1", folder.tensors)
    write(blobs / "2", {"0.weight": torch.full((6, 4), 3.0)})
    for name, blob in (("a", "1"), ("b", "2")):
        (folder.path / f"{name}.safetensors").symlink_to(f"../blobs/{blob}")
    folder.load()
    assert torch.equal(folder.model[0].weight.detach(), torch.full((6, 4), 3.0))
    assert torch.equal(folder.model[1].weight.detach(), folder.tensors["1.weight"])


def test_a_save_goes_through_no_link(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path / "weights"), tmp_path / "other"
    other.write_text("theirs")
    (folder.path / f"{FILE}.tmp").symlink_to(other)
    with pytest.raises(CheckpointError, match=f"{FILE}.tmp"):
        compile_muon.save_pretrained(folder.model, folder.path)
    assert other.read_text() == "theirs" and (folder.path / f"{FILE}.tmp").is_symlink()
