"""Files of tensors: safetensors, https://huggingface.co/docs/safetensors. All that are written here are written here.

The library writes a file from a dictionary of whole tensors, and torch's HuggingFaceStorageWriter builds a rank's file
in memory, wants a folder that all ranks share, and cannot consolidate integer buffers (``torch.finfo`` of int64, torch
2.13). Weights that ranks hold parts of come piece by piece, so the header is made here: a length of 8 bytes, JSON
padded with spaces to a multiple of 8, the data. Headers are read by the library alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compile_muon.errors import CheckpointError
from compile_muon.files.disk import new_file
from compile_muon.passes.language.spec import decode_dtype, encode_dtype

__all__ = ["TensorFacts", "TensorFile", "is_storable", "nbytes", "ordered", "write_whole"]


@dataclass(frozen=True)
class TensorFacts:
    """Shape and dtype (torch's name without ``torch.``) of a whole tensor."""

    shape: tuple[int, ...]
    dtype: str


def nbytes(facts: TensorFacts) -> int:
    """Of a tensor in a file."""
    return math.prod(facts.shape) * decode_dtype(facts.dtype).itemsize


@functools.cache
def _code(dtype: str) -> str:
    """What safetensors calls a dtype, from its own mouth."""
    from safetensors.torch import save  # importing compile_muon stays lean

    example = save({"x": torch.empty(0, dtype=decode_dtype(dtype), device="cpu")})
    return json.loads(example[8 : 8 + int.from_bytes(example[:8], "little")])["x"]["dtype"]


def is_storable(tensor: Tensor) -> bool:
    """Whether a file may hold it: elements beside each other, of a dtype that safetensors has a word for."""
    try:
        return tensor.layout is torch.strided and _code(encode_dtype(tensor.dtype)) != ""
    except KeyError:  # e.g. complex128
        return False


def ordered(facts: Mapping[str, TensorFacts]) -> dict[str, TensorFacts]:
    """As they stand in a file: wide dtypes first, so that each tensor lies at a multiple of its item size."""
    return dict(sorted(facts.items(), key=lambda item: (-decode_dtype(item[1].dtype).itemsize, item[0])))


def _header(facts: Mapping[str, TensorFacts], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """The start of a file with these tensors in their order, and the size of the whole."""
    entries: dict[str, object] = {"__metadata__": {**metadata, "format": "pt"}}
    end = 0
    for name, fact in facts.items():
        start, end = end, end + nbytes(fact)
        entries[name] = {"dtype": _code(fact.dtype), "shape": list(fact.shape), "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + end


class TensorFile:
    """A new file that takes its tensors' bytes one after the other, in the order of ``facts``.

    Args:
        path: of it; a link or folder there is an error.
        metadata: that its header has besides.
        replace: whether a plain file there goes first.
    Attributes:
        size: bytes of the whole.
    """

    def __init__(
        self, path: Path, facts: Mapping[str, TensorFacts], metadata: Mapping[str, str] = {}, *, replace: bool = True
    ) -> None:
        start, self.size = _header(facts, metadata)
        self._file = new_file(path, replace=replace)  # close() and abandon() close it
        self._file.write(start)

    def write(self, piece: Tensor) -> None:
        """Append bytes: 1-D uint8 on the CPU."""
        self._file.write(piece.numpy().data)

    def close(self) -> None:
        """Have all of it on the disk.

        Raises:
            CheckpointError: it is not as long as its header says.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        written = self._file.tell()
        self._file.close()
        if written != self.size:
            raise CheckpointError(f"{self._file.name}: has {written} bytes instead of {self.size}")

    def abandon(self) -> None:
        """Close it as it is."""
        self._file.close()


def write_whole(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = {}) -> None:
    """Write a new file from tensors on the CPU, from where they are, and have it on the disk."""
    facts = ordered({name: TensorFacts(tuple(x.shape), encode_dtype(x.dtype)) for name, x in tensors.items()})
    file = TensorFile(path, facts, metadata, replace=False)
    try:
        for name in facts:
            file.write(tensors[name].detach().reshape(-1).view(torch.uint8))
        file.close()
    finally:
        file.abandon()
