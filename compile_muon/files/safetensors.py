"""Files of tensors (https://huggingface.co/docs/safetensors), written in pieces: no other module writes such files.

The library writes a file from a dictionary of whole tensors. torch's HuggingFaceStorageWriter makes a rank's file in
memory, twice, and its consolidation refuses integer buffers (``torch.finfo`` of int64, torch 2.13). Ranks hold parts of
weights, so headers are made here: a length of 8 bytes, JSON padded with spaces to a multiple of 8, the data. The
library alone reads headers.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compile_muon.files.disk import new_file
from compile_muon.passes.language.spec import decode_dtype, encode_dtype

__all__ = ["TensorFacts", "is_storable", "new_tensor_file", "ordered", "write_whole"]


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
def _code(dtype: str) -> str:
    """Look up safetensors' word for a dtype in a file of the library's."""
    from safetensors.torch import save  # importing compile_muon stays lean

    example = save({"x": torch.empty(0, dtype=decode_dtype(dtype), device="cpu")})
    return json.loads(example[8 : 8 + int.from_bytes(example[:8], "little")])["x"]["dtype"]


def is_storable(tensor: Tensor) -> bool:
    """Tell whether the tensor is dense, and of a dtype for which safetensors has a word."""
    try:
        return tensor.layout is torch.strided and _code(encode_dtype(tensor.dtype)) != ""
    except KeyError:  # e.g. complex128
        return False


def ordered(facts: Mapping[str, TensorFacts]) -> dict[str, TensorFacts]:
    """Put wide dtypes first, as in files: every tensor then begins at a multiple of its item size."""
    return dict(sorted(facts.items(), key=lambda item: (-decode_dtype(item[1].dtype).itemsize, item[0])))


@contextmanager
def new_tensor_file(
    path: Path, facts: Mapping[str, TensorFacts], metadata: Mapping[str, str] = {}, *, replace: bool = True
) -> Iterator[Callable[[Tensor], object]]:
    """Open a new file that takes the bytes of its tensors (1-D uint8 on the CPU) in the order of ``facts``.

    The file is on the disk when the block ends.

    Raises:
        FileExistsError: a link or a folder is at ``path``, or without ``replace`` anything.
    """
    entries: dict[str, object] = {"__metadata__": {**metadata, "format": "pt"}}
    end = 0
    for name, fact in facts.items():
        start, end = end, end + fact.nbytes
        entries[name] = {"dtype": _code(fact.dtype), "shape": fact.shape, "data_offsets": (start, end)}
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
