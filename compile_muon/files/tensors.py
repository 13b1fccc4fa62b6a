"""Files of tensors (https://huggingface.co/docs/safetensors): written in pieces, read in parts, shared among ranks.

The library writes a file from a dictionary of whole tensors, and torch's HuggingFaceStorageWriter makes a rank's file
in memory, twice. Ranks hold parts of weights, so headers are made here: a length of 8 bytes, JSON padded with spaces to
a multiple of 8, the data. The library alone reads headers.

Files of a checkpoint are as torch's writer makes them: one for each rank, the place of each shard in its header. Its
planners are not used: a reader for them turns headers into metadata, and boxes into requests, in 90 lines, where a loop
over the parts that two boxes have in common takes 15. A header's word is not enough: rows must be somewhere, and
nowhere twice and different.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compile_muon.agreement.together import Ranks
from compile_muon.errors import CheckpointError, listed
from compile_muon.files.disk import new_file, open_plain, open_within
from compile_muon.passes.language.spec import decode_dtype, encode_dtype

#: torch's names in a header's metadata for the first index of each shard
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"

#: the indices of a part of a tensor, a range for each dim
Indices = tuple[range, ...]


@dataclass(frozen=True)
class TensorFacts:
    """Shape and dtype (torch's name without ``torch.``) of a whole tensor."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: Tensor) -> TensorFacts:
        """Describe ``tensor``."""
        return TensorFacts(tuple(tensor.shape), encode_dtype(tensor.dtype))

    @property
    def nbytes(self) -> int:
        """The size of its data."""
        return math.prod(self.shape) * decode_dtype(self.dtype).itemsize


@functools.cache
def _words() -> dict[torch.dtype, str]:
    """Return safetensors' words for the dtypes that it reads; complex128, say, is not among them."""
    from safetensors.torch import _TYPES  # importing compile_muon stays lean

    return {dtype: word for word, dtype in _TYPES.items() if isinstance(dtype, torch.dtype)}


def is_storable(tensor: Tensor) -> bool:
    """Tell whether the tensor is dense, and of a dtype for which safetensors has a word."""
    return tensor.layout is torch.strided and tensor.dtype in _words()


def ordered(facts: Mapping[str, TensorFacts]) -> dict[str, TensorFacts]:
    """Put wide dtypes first, as in files: every tensor then begins at a multiple of its item size."""
    return dict(sorted(facts.items(), key=lambda item: (-decode_dtype(item[1].dtype).itemsize, item[0])))


@contextmanager
def new_tensor_file(
    path: Path, facts: Mapping[str, TensorFacts], metadata: Mapping[str, str] = {}, *, replace: bool = True
) -> Iterator[Callable[[Tensor], object]]:
    """Open a new file that takes the bytes of its tensors (1-D uint8 on the CPU) in the order of ``facts``. The file is
    on the disk when the block ends. See :func:`~compile_muon.files.disk.new_file` for ``replace``."""
    entries: dict[str, object] = {"__metadata__": {**metadata, "format": "pt"}}
    end = 0
    for name, fact in facts.items():
        start, end = end, end + fact.nbytes
        entries[name] = {"dtype": _words()[decode_dtype(fact.dtype)], "shape": fact.shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path, replace=replace) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield lambda piece: file.write(piece.numpy().data)
        file.flush()
        os.fsync(file.fileno())
        assert file.tell() == 8 + len(text) + end, f"{path}: has {file.tell()} bytes, not those of its header"


def write_whole(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = {}) -> None:
    """Write a new file of tensors on the CPU, from the memory that they are in."""
    facts = ordered({name: TensorFacts.of(tensor) for name, tensor in tensors.items()})
    with new_tensor_file(path, facts, metadata, replace=False) as write:
        for name in facts:
            write(tensors[name].detach().reshape(-1).view(torch.uint8))


@dataclass(frozen=True)
class Box:
    """A part of a stored tensor: its name, the first index of the part, and a target of the part's shape, any dtype."""

    stored: str
    offsets: tuple[int, ...]
    target: Tensor


def _box_of(name: str, tensor: Tensor) -> Box:
    """Describe what this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return Box(name, (0,) * tensor.ndim, tensor.detach())
    chunk = cast(Any, tensor).__create_chunk_list__()[0]
    return Box(name, tuple(chunk.offsets), tensor._local_tensor.detach())


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> list[Path]:
    """Write this rank's share of ``tensors``, on the CPU, into one file, and return its path; collective. Of several
    ranks with one part, the one with the least to write takes the part. A rank without a share has no file."""
    boxes = [_box_of(name, tensor) for name, tensor in tensors.items()]
    holders = defaultdict[tuple[str, tuple[int, ...], int], list[int]](list)
    for rank, parts in enumerate(ranks.gather([(box.stored, box.offsets, box.target.nbytes) for box in boxes])):
        for part in parts:
            holders[part].append(rank)
    load, mine = [0] * ranks.world, dict[str, tuple[int, ...]]()
    for (name, offsets, size), candidates in holders.items():
        writer = min(candidates, key=load.__getitem__)
        load[writer] += size or 1
        if writer == ranks.rank:
            mine[name] = offsets
    if not mine:
        return []
    path = folder / f"shard-{ranks.rank + 1:05}-model-00001-of-00001.safetensors"
    info = json.dumps({name: {_OFFSETS: offsets} for name, offsets in mine.items()})
    share = {box.stored: box.target for box in boxes if box.stored in mine}
    write_whole(path, share, {_INFO: info, "DCP_VERSION": "1.0"})
    return [path]


def read_tensors(reader: Reader, tensors: Mapping[str, Tensor]) -> None:
    """Read into ``tensors``, in place, what this rank holds of the stored tensors of these names, shapes and dtypes."""
    reader.check({name: TensorFacts.of(tensor) for name, tensor in tensors.items()})
    reader.read(_box_of(name, tensor) for name, tensor in tensors.items())


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor in a file; ``cut`` if the header says which."""

    file: str
    box: Indices
    dtype: torch.dtype
    cut: bool


class Reader:
    """Safetensors files in a folder, as their headers say; ``facts`` describe each whole tensor.

    Only ``files`` are opened, by names with slashes between folders. ``places`` are the files of tensors where an index
    says so, for names that are in several files. A CheckpointError names a file that is missing, damaged or no plain
    one, and rows of a tensor that are in no file, or in two and different there.
    """

    def __init__(
        self, folder: Path, files: Iterable[str], *, links: bool = False, places: Mapping[str, str] = {}
    ) -> None:
        self._folder, self._links = folder, links
        self._pieces = defaultdict[str, list[_Piece]](list)
        for name in files:
            with self._opened(name) as stored:
                for key, piece in self._header(name, stored):
                    self._pieces[key].append(piece)
        self.facts: dict[str, TensorFacts] = {}
        for key in self._pieces:
            self._put_together(key, places.get(key))
        for key, place in places.items():
            if key not in self.facts:
                raise CheckpointError(f"{folder}: the index names {key}, which is in none of its files, not in {place}")

    def check(self, expected: Mapping[str, TensorFacts]) -> None:
        """Compare the headers with what somebody else says of these tensors; one error lists what differs."""
        problems = []
        for name, expected_facts in expected.items():
            stored = self.facts.get(name)
            if stored is None:
                problems.append(f"{name}: is in no file")
            elif stored != expected_facts:
                there, said = (f"{facts.dtype} {list(facts.shape)}" for facts in (stored, expected_facts))
                problems.append(f"{name}: is {there} in the files, {said} is expected")
        if problems:
            raise CheckpointError(f"{self._folder}: {listed(problems)}")

    def read(self, boxes: Iterable[Box]) -> None:
        """Read ``boxes``, file by file, :func:`converted` to the dtypes of their targets."""
        requests_by_file = defaultdict[str, list[tuple[Box, _Piece, Indices]]](list)
        for box in boxes:
            indices = indices_of(box.offsets, box.target.shape)
            for piece in self._pieces[box.stored]:
                if volume(both := common(indices, piece.box)):
                    requests_by_file[piece.file].append((box, piece, both))
        for name, requests in requests_by_file.items():
            with self._opened(name) as stored:
                for box, piece, both in requests:
                    target = box.target[within(both, indices_of(box.offsets, box.target.shape))]
                    part = stored.get_slice(box.stored)[within(both, piece.box)]
                    target.copy_(converted(box.stored, part, target.dtype))

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        from safetensors import safe_open  # importing compile_muon stays lean

        path = self._folder / name
        with open_plain(path, links=True) if self._links else open_within(self._folder, name) as file:
            try:
                source = f"/proc/self/fd/{file.fileno()}"
                with safe_open(source, framework="pt") as stored, torch.device("cpu"):  # whatever the default device is
                    yield stored
            except CheckpointError:
                raise
            except Exception as error:  # SafetensorError is not an OSError
                raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error

    def _header(self, name: str, stored: Any) -> Iterator[tuple[str, _Piece]]:
        from safetensors.torch import _getdtype

        info = (stored.metadata() or {}).get(_INFO)
        try:
            cuts = None if info is None else json.loads(info)
            for key in stored.keys():  # noqa: SIM118, no dictionary
                part = stored.get_slice(key)
                shape = part.get_shape()
                first = [0] * len(shape) if cuts is None else cuts[key][_OFFSETS]
                if len(first) != len(shape) or not all(type(n) is int and 0 <= n < 2**62 for n in first):
                    raise ValueError(f"{_OFFSETS} = {first!r} of {key!r} is no place of a shard {shape}")
                yield key, _Piece(name, indices_of(first, shape), _getdtype(part.get_dtype()), cuts is not None)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            said = f"its header says nonsense ({type(error).__name__}: {error})"
            raise CheckpointError(f"{self._folder / name}: {said}") from error

    def _put_together(self, name: str, place: str | None) -> None:
        """Keep the pieces that make the whole of a tensor, large ones first; an index means those of ``place``."""
        pieces = self._pieces[name]
        if place is not None:
            meant = [piece for piece in pieces if piece.file == place]
            if not meant:
                raise CheckpointError(f"{name}: the index has it in {place}, and it is in {_files(pieces)}")
            pieces = [piece for piece in pieces if piece.cut] if meant[0].cut else meant
        if len({(len(piece.box), piece.dtype) for piece in pieces}) > 1:
            raise CheckpointError(f"{self._folder}: {name} has several dtypes, or numbers of dims: {_files(pieces)}")
        shape = tuple(max(part.stop for part in parts) for parts in zip(*(p.box for p in pieces), strict=True))
        missing, cover = [tuple(map(range, shape))], list[_Piece]()
        for piece in sorted(pieces, key=lambda piece: -volume(piece.box)):
            rest = [part for box in missing for part in _without(box, piece.box)]
            new = sum(map(volume, missing)) - sum(map(volume, rest))
            if new < volume(piece.box):
                self._compare(name, piece, cover)
            if new or not cover:
                cover.append(piece)
            missing = rest
        if any(map(volume, missing)):
            where = ", ".join(f"{part.start}:{part.stop}" for part in missing[0])
            raise CheckpointError(
                f"{self._folder}: {name}[{where}] is in none of the files, which hold other rows of {list(shape)}; "
                "take a copy that is whole"
            )
        self._pieces[name] = cover
        self.facts[name] = TensorFacts(shape, encode_dtype(cover[0].dtype))

    def _compare(self, name: str, piece: _Piece, others: Iterable[_Piece]) -> None:
        """Compare the bits that ``piece`` and others have in the same places."""
        for other in others:
            if not volume(both := common(piece.box, other.box)):
                continue
            values = []
            for holder in (piece, other):
                with self._opened(holder.file) as stored:
                    part = stored.get_slice(name)[within(both, holder.box)]
                    values.append(part.contiguous().reshape(-1).view(torch.uint8).clone())
            if not torch.equal(*values):
                raise CheckpointError(
                    f"{self._folder}: {name} has two values in the same place, in {_files([other, piece])}; take away "
                    "the file that is not meant"
                )


def _files(pieces: Iterable[_Piece]) -> str:
    return " and ".join(dict.fromkeys(piece.file for piece in pieces))


def indices_of(first: Iterable[int], shape: Iterable[int]) -> Indices:
    """Return the indices of a part of this shape, from its first index."""
    return tuple(range(start, start + size) for start, size in zip(first, shape, strict=True))


def volume(box: Indices) -> int:
    """Return the number of elements."""
    return math.prod(map(len, box))


def common(one: Indices, two: Indices) -> Indices:
    """Return the indices in both; those of a dim are empty where there are none."""
    return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, two, strict=True))


def within(box: Indices, outer: Indices) -> tuple[slice, ...]:
    """Return the slices of ``outer`` that are ``box``."""
    return tuple(slice(b.start - o.start, b.stop - o.start) for b, o in zip(box, outer, strict=True))


def _without(box: Indices, cut: Indices) -> Iterator[Indices]:
    """Cut ``box`` into what is outside of ``cut``."""
    both = common(box, cut)
    if not volume(both):
        yield box
        return
    for dim, (part, inner) in enumerate(zip(box, both, strict=True)):
        for rest in (range(part.start, inner.start), range(inner.stop, part.stop)):
            if len(rest):
                yield (*both[:dim], rest, *box[dim + 1 :])


def converted(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``value`` to another dtype. Refuse complex numbers as real ones, finite numbers as inf or NaN, and integers
    that do not come back."""
    if value.dtype == dtype:
        return value
    how = f"{name}: is {encode_dtype(value.dtype)}, and {encode_dtype(dtype)} is wanted"
    if value.is_complex() and not dtype.is_complex:
        raise CheckpointError(f"{how}: imaginary parts would be lost; load it into a complex parameter")
    rounded = value.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        lost = ~_finite(rounded)
        lost = lost & _finite(value) if bool(lost.any()) else lost
        if dtype.itemsize == 1:  # has no inf, or stops at its largest number
            lost = lost | (value.abs() > 1.0625 * torch.finfo(dtype).max) & _finite(value)
    else:
        lost = rounded.to(value.dtype) != value
    if count := int(lost.sum()):
        raise CheckpointError(
            f"{how}, in which {count} of its {value.numel()} numbers are others (inf, or cut off); use a wider dtype"
        )
    return rounded


def _finite(value: Tensor) -> Tensor:
    return torch.isfinite(value.float() if value.dtype.itemsize == 1 else value)
