"""Tensors in files, by torch.distributed.checkpoint and its Hugging Face (safetensors) storage.

It plans who writes what (a tensor that all ranks hold is written once), keeps the place of each shard in the headers,
and plans which parts to read, whatever parts were written. Its own metadata file, a pickle, does not exist in this
storage. One file per rank, written tensor by tensor from where they are, and flushed. Files are opened here, and what
their headers say is believed of no row that is nowhere, or twice and different.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from compile_muon.errors import CheckpointError, MuonZeroError, listed
from compile_muon.files.disk import open_plain, open_within
from compile_muon.files.safetensors import TensorFacts, write_whole
from compile_muon.passes.language.spec import encode_dtype

__all__ = ["Box", "Reader", "converted", "read_boxes", "read_tensors", "write_tensors"]

#: where torch's writer keeps the first index of each shard, in a header's metadata
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class _Writer(HuggingFaceStorageWriter):
    """Notes which file this rank writes, and writes it from the tensors' own memory.

    torch's makes the whole file in memory first, twice, and holds the interpreter meanwhile (seen on 2.11 to 2.14).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.written: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # read by nobody where no metadata file is written
        if not plan.items:
            return done
        tensors, offsets = {}, {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor) and tensor.is_cpu and tensor.is_contiguous()
            assert item.tensor_data is not None
            tensors[item.index.fqn] = tensor
            offsets[item.index.fqn] = {_OFFSETS: item.tensor_data.chunk.offsets}
        name = f"shard-{plan.storage_data['shard_index']:05}-model-00001-of-00001.safetensors"
        # As torch's reader expects it; nobody's is written over, nor through a link.
        write_whole(Path(self.path) / name, tensors, {_INFO: json.dumps(offsets), "DCP_VERSION": "1.0"})
        self.written = {name}
        return done


@contextmanager
def _our_errors() -> Iterator[None]:
    """One line for each rank, instead of their tracebacks; a BaseException would pass by who catches errors."""
    # catch_warnings is not for threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        said = {
            rank: str(cause) if isinstance(cause, MuonZeroError) else f"{type(cause).__name__}: {cause}"
            for rank, (cause, _) in sorted(error.failures.items())
        }
        alone = list(said) == [0]
        text = "; ".join(text if alone else f"rank {rank}: {text}" for rank, text in said.items())
        raise CheckpointError(text) from error


def write_tensors(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> list[Path]:
    """Write ``tensors`` (on the CPU; DTensors by their shards); collective over ``group``.

    Returns:
        The files that this rank wrote.
    Raises:
        CheckpointError: on every rank, naming those that failed.
    """
    writer = _Writer(folder)
    with _our_errors():
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    return [folder / name for name in sorted(writer.written)]


@dataclass(frozen=True)
class Box:
    """A part of a stored tensor to read.

    Args:
        stored: the tensor's name.
        offsets: of the part.
        target: of the part's shape and any dtype; is written in place.
    """

    stored: str
    offsets: tuple[int, ...]
    target: Tensor


class _BoxPlanner(DefaultLoadPlanner):
    """Reads boxes, where torch's own reads what a DTensor holds of the tensor of its name."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__()
        self._boxes = {(box.stored, torch.Size(box.offsets)): box.target for box in boxes}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for (stored, offsets), target in self._boxes.items():
            facts = self.metadata.state_dict_metadata[stored]
            assert isinstance(facts, TensorStorageMetadata)
            if target.numel():
                box = ChunkStorageMetadata(offsets, target.shape)
                items += create_read_items_for_chunk_list(stored, facts, [box])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._boxes[index.fqn, index.offset]


def read_boxes(boxes: Sequence[Box], reader: Reader) -> None:
    """Read ``boxes``, each another part, cast to the dtypes of their targets; not collective.

    Raises:
        CheckpointError: a file is damaged, or a number is another one in that dtype.
    """
    if not boxes:
        return
    with _our_errors():
        dcp.load({}, storage_reader=reader, planner=_BoxPlanner(boxes), no_dist=True)


def read_tensors(reader: Reader, tensors: dict[str, Tensor]) -> None:
    """Read into ``tensors``, in place, what each of them holds of the tensor of its name; not collective.

    Raises:
        CheckpointError: a name is missing, or has another shape or dtype.
    """
    reader.check({name: TensorFacts(tuple(t.shape), encode_dtype(t.dtype)) for name, t in tensors.items()})
    if tensors:
        with _our_errors():
            dcp.load(tensors, storage_reader=reader, no_dist=True)


# ------------------------------------------------------------------------------------------ files and their headers


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor in a file; ``cut`` if the header says which."""

    file: str
    box: tuple[range, ...]
    dtype: torch.dtype
    cut: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.box))


class Reader(FileSystemReader):
    """Reads safetensors files of a folder, those that the caller knows of; headers once.

    Args:
        folder: that holds them.
        files: their names, with slashes between folders.
        links: whether to follow them.
        places: the file of a tensor, where an index says so; it decides where several have one of that name.
    Attributes:
        facts: of each whole tensor.
    Raises:
        CheckpointError: a file is missing, damaged or no plain one; of a tensor that it says, rows are in no file, or
            in two and different there.
    """

    def __init__(
        self, folder: Path, files: Iterable[str], *, links: bool = False, places: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(str(folder))
        self._folder, self._links = folder, links
        pieces: dict[str, list[_Piece]] = {}
        for name in files:
            with self._opened(name) as stored:
                for key, piece in self._pieces(name, stored):
                    pieces.setdefault(key, []).append(piece)
        self.facts: dict[str, TensorFacts] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self.storage_data: dict[MetadataIndex, str] = {}  # torch's own: the file, by name and first index
        for key, parts in pieces.items():
            self._put_together(key, _chosen(key, parts, (places or {}).get(key)))
        for key, place in (places or {}).items():
            if key not in pieces:
                raise CheckpointError(f"{folder}: the index names {key}, which is in none of its files, not in {place}")

    def check(self, expected: Mapping[str, TensorFacts]) -> None:
        """Compare the headers with what somebody else says of these tensors.

        Raises:
            CheckpointError: listing what differs.
        """
        problems = []
        for name, wanted in expected.items():
            found = self.facts.get(name)
            if found is None:
                problems.append(f"{name}: is in no file")
            elif found != wanted:
                there, said = (f"{facts.dtype} {list(facts.shape)}" for facts in (found, wanted))
                problems.append(f"{name}: is {there} in the files, {said} is expected")
        if problems:
            raise CheckpointError(f"{self._folder}: {listed(problems)}")

    def read_metadata(self) -> Metadata:
        """What torch's planners go by."""
        return Metadata(dict(self._tensors), storage_data=self.storage_data)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a planner wants, file by file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with self._opened(name) as stored:
                for item in items:
                    self._read(stored, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _read(stored: Any, item: ReadItem, planner: LoadPlanner) -> None:
        ends = zip(item.storage_offsets, item.lengths, strict=True)
        part = stored.get_slice(item.storage_index.fqn)[tuple(slice(start, start + size) for start, size in ends)]
        target = planner.resolve_tensor(item).detach()
        target.copy_(converted(item.storage_index.fqn, part, target.dtype))
        planner.commit_tensor(item, target)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        from safetensors import safe_open  # importing compile_muon stays lean

        path = self._folder / name
        with open_plain(path, links=True) if self._links else open_within(self._folder, name) as file:
            try:
                stored = safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt")
            except Exception as error:  # SafetensorError is not an OSError
                raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
            with stored, torch.device("cpu"):  # whatever the default device is
                yield stored

    def _pieces(self, name: str, stored: Any) -> Iterator[tuple[str, _Piece]]:
        from safetensors.torch import _getdtype

        path, info = self._folder / name, (stored.metadata() or {}).get(_INFO)
        try:
            cuts = None if info is None else json.loads(info)
            for key in stored.keys():  # noqa: SIM118, no dictionary
                part = stored.get_slice(key)
                shape = part.get_shape()
                first = [0] * len(shape) if cuts is None else cuts[key][_OFFSETS]
                if len(first) != len(shape) or not all(type(n) is int and 0 <= n < 2**62 for n in first):
                    raise ValueError(f"{_OFFSETS} = {first!r} of {key!r} is no place of a shard {shape}")
                box = tuple(range(start, start + size) for start, size in zip(first, shape, strict=True))
                yield key, _Piece(name, box, _getdtype(part.get_dtype()), cuts is not None)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: its header says nonsense ({type(error).__name__}: {error})") from error

    def _put_together(self, name: str, pieces: list[_Piece]) -> None:
        if len({(len(piece.box), piece.dtype) for piece in pieces}) > 1:
            raise CheckpointError(f"{self._folder}: {name} has several dtypes, or numbers of dims: {_files(pieces)}")
        shape = tuple(max(part.stop for part in parts) for parts in zip(*(p.box for p in pieces), strict=True))
        left = [tuple(map(range, shape))]
        kept: list[_Piece] = []
        for piece in sorted(pieces, key=lambda piece: -math.prod(piece.shape)):
            rest = list(_without(left, piece.box))
            if _size(left) - _size(rest) < math.prod(piece.shape):
                self._compare(name, piece, kept)
            if _size(rest) < _size(left) or not kept:
                kept.append(piece)
            left = rest
        if _size(left):
            where = ", ".join(f"{part.start}:{part.stop}" for part in left[0])
            raise CheckpointError(
                f"{self._folder}: {name}[{where}] is in none of the files, which hold other rows of {list(shape)}; "
                "take a copy that is whole"
            )
        first = [torch.Size(part.start for part in piece.box) for piece in kept]
        if len(set(first)) < len(first):
            raise CheckpointError(f"{self._folder}: {name} has two parts that begin at one place: {_files(kept)}")
        self.facts[name] = TensorFacts(shape, encode_dtype(kept[0].dtype))
        chunks = [ChunkStorageMetadata(at, torch.Size(p.shape)) for at, p in zip(first, kept, strict=True)]
        properties = TensorProperties(dtype=kept[0].dtype)
        self._tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        self.storage_data |= {MetadataIndex(name, at): p.file for at, p in zip(first, kept, strict=True)}

    def _compare(self, name: str, piece: _Piece, others: Sequence[_Piece]) -> None:
        """Whether ``piece`` has the bits that others have in the same places."""
        for other in others:
            both = _common(piece.box, other.box)
            if not all(map(len, both)):
                continue
            one, two = (self._bytes(name, each, both) for each in (piece, other))
            if not torch.equal(one, two):
                raise CheckpointError(
                    f"{self._folder}: {name} has two values in the same place, in {_files([other, piece])}; take away "
                    "the file that is not meant"
                )

    def _bytes(self, name: str, piece: _Piece, box: tuple[range, ...]) -> Tensor:
        within = zip(box, piece.box, strict=True)
        with self._opened(piece.file) as stored:
            part = stored.get_slice(name)[tuple(slice(b.start - p.start, b.stop - p.start) for b, p in within)]
            return part.contiguous().reshape(-1).view(torch.uint8).clone()


def _files(pieces: Iterable[_Piece]) -> str:
    return " and ".join(dict.fromkeys(piece.file for piece in pieces))


def _chosen(name: str, pieces: list[_Piece], place: str | None) -> list[_Piece]:
    """Those that an index means: of a tensor in one piece, that of ``place``."""
    if place is None:
        return pieces
    own = [piece for piece in pieces if piece.file == place]
    if not own:
        raise CheckpointError(f"{name}: the index has it in {place}, and it is in {_files(pieces)}")
    return [piece for piece in pieces if piece.cut] if own[0].cut else own


def _size(boxes: Iterable[tuple[range, ...]]) -> int:
    return sum(math.prod(map(len, box)) for box in boxes)


def _common(one: tuple[range, ...], two: tuple[range, ...]) -> tuple[range, ...]:
    return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, two, strict=True))


def _without(boxes: Iterable[tuple[range, ...]], cut: tuple[range, ...]) -> Iterator[tuple[range, ...]]:
    """What of ``boxes``, which have nothing in common, is outside of ``cut``."""
    for box in boxes:
        both = _common(box, cut)
        if not all(map(len, both)):
            yield box
            continue
        for dim, (part, inner) in enumerate(zip(box, both, strict=True)):
            for rest in (range(part.start, inner.start), range(inner.stop, part.stop)):
                if len(rest):
                    yield (*both[:dim], rest, *box[dim + 1 :])


# ------------------------------------------------------------------------------------------ other dtypes


def converted(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in another dtype, rounded to it, if no number becomes something else.

    Raises:
        CheckpointError: it is complex and ``dtype`` is not; a finite number becomes inf or NaN; an integer does not
            come back.
    """
    if value.dtype == dtype:
        return value
    how = f"{name}: is {encode_dtype(value.dtype)}, and {encode_dtype(dtype)} is wanted"
    if value.is_complex() and not dtype.is_complex:
        raise CheckpointError(f"{how}: imaginary parts would be lost; load it into a complex parameter")
    found = value.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        lost = ~_finite(found)
        lost = lost & _finite(value) if bool(lost.any()) else lost
        if dtype.itemsize == 1:  # has no inf, or stops at its largest number
            lost = lost | (value.abs() > 1.0625 * torch.finfo(dtype).max) & _finite(value)
    else:
        lost = found.to(value.dtype) != value
    if bool(lost.any()):
        count = int(lost.sum())
        raise CheckpointError(
            f"{how}, in which {count} of its {value.numel()} numbers are others (inf, or cut off); use a wider dtype"
        )
    return found


def _finite(value: Tensor) -> Tensor:
    return torch.isfinite(value.float() if value.dtype.itemsize == 1 else value)
