"""From a checkpoint to one Hugging Face-style folder of whole weights: no GPU, no model, no process group.

Tensors go through a window over the file that is written, some at a time, so memory does not grow with the model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from compile_muon.checkpoint.folder import TENSORS
from compile_muon.checkpoint.manifest import Manifest, TensorFacts
from compile_muon.checkpoint.storage import read_tensors
from compile_muon.errors import CheckpointError
from compile_muon.passes.spec import decode_dtype

__all__ = ["export"]

#: what Hugging Face's loaders look for
FILE = "model.safetensors"

_BATCH_BYTES = 256 << 20  # read at once, or one tensor that is larger


def export(checkpoint: Path, out: Path) -> tuple[int, int]:
    """Write the weights and buffers of ``checkpoint`` into ``out/model.safetensors``, tied ones under all their names.

    Args:
        checkpoint: a folder ``step-N``; it is verified first.
        out: a folder that does not exist, or is empty.
    Returns:
        How many tensors were written, and how many bytes the file has.
    Raises:
        CheckpointError: the checkpoint is damaged, or ``out`` has something in it.
    """
    manifest = Manifest.read(checkpoint)
    manifest.verify(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"--out = {out}: is there and not empty; give a new folder")
    weights = {key.removeprefix("model/"): key for key in manifest.tensors if key.startswith("model/")}
    weights |= {alias: f"model/{name}" for alias, name in manifest.aliases.items()}
    # Wide dtypes first: so each tensor lies at a multiple of its item size.
    order = sorted(weights, key=lambda name: (-decode_dtype(manifest.tensors[weights[name]].dtype).itemsize, name))
    facts = {name: manifest.tensors[weights[name]] for name in order}
    header, places, total = _header(facts)
    out.mkdir(parents=True, exist_ok=True)
    unfinished = out / f"{FILE}.tmp"
    unfinished.write_bytes(header)
    os.truncate(unfinished, total)
    window = torch.from_file(str(unfinished), shared=True, size=total, dtype=torch.uint8)
    for batch in _batches(facts):
        found = _read(checkpoint, {name: weights[name] for name in batch}, facts)
        for name, tensor in found.items():
            start, stop = places[name]
            window[start:stop].copy_(tensor.reshape(-1).view(torch.uint8))
    del window
    with open(unfinished, "rb+") as file:
        os.fsync(file.fileno())
    unfinished.rename(out / FILE)
    return len(order), total


def _read(checkpoint: Path, sources: dict[str, str], facts: dict[str, TensorFacts]) -> dict[str, Tensor]:
    staged = {key: torch.empty(facts[n].shape, dtype=decode_dtype(facts[n].dtype)) for n, key in sources.items()}
    read_tensors(checkpoint / TENSORS, staged)
    return {name: staged[key] for name, key in sources.items()}


def _nbytes(facts: TensorFacts) -> int:
    return math.prod(facts.shape) * decode_dtype(facts.dtype).itemsize


def _batches(facts: dict[str, TensorFacts]) -> Iterator[list[str]]:
    """Names in order, as many at a time as fit."""
    batch: list[str] = []
    size = 0
    for name, fact in facts.items():
        if batch and size + _nbytes(fact) > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += _nbytes(fact)
    if batch:
        yield batch


def _header(facts: dict[str, TensorFacts]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The start of the file, where each tensor's bytes go, and the size of the whole.

    https://huggingface.co/docs/safetensors: a length of 8 bytes, JSON padded with spaces to a multiple of 8, the data.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans, end = {}, 0
    for name, fact in facts.items():
        spans[name] = (end, end + _nbytes(fact))
        end = spans[name][1]
        entries[name] = {"dtype": _code(fact.dtype), "shape": list(fact.shape), "data_offsets": spans[name]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    places = {name: (first + start, last + start) for name, (first, last) in spans.items()}
    return len(text).to_bytes(8, "little") + text, places, start + end


def _code(dtype: str) -> str:
    """What safetensors calls a dtype, from its own mouth."""
    example = save({"x": torch.empty(0, dtype=decode_dtype(dtype))})
    return json.loads(example[8 : 8 + int.from_bytes(example[:8], "little")])["x"]["dtype"]
