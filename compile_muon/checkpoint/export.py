"""From a checkpoint to one Hugging Face-style folder of whole weights: no GPU, no model, no process group.

Tensors are read and written some at a time, so memory does not grow with the model.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from compile_muon.checkpoint.manifest import Manifest
from compile_muon.errors import CheckpointError
from compile_muon.files.safetensors import TensorFile, nbytes, ordered
from compile_muon.files.tensor_folder import FILE, batches
from compile_muon.files.tensors import read_tensors
from compile_muon.passes.language.spec import decode_dtype

__all__ = ["export"]

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
    reader = manifest.reader(checkpoint)
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"--out = {out}: is there and not empty; give a new folder")
    weights = {key.removeprefix("model/"): key for key in manifest.tensors if key.startswith("model/")}
    weights |= {alias: f"model/{name}" for alias, name in manifest.aliases.items()}
    facts = ordered({name: manifest.tensors[key] for name, key in weights.items()})
    out.mkdir(parents=True, exist_ok=True)
    unfinished = out / f"{FILE}.tmp"
    file = TensorFile(unfinished, facts)
    for batch in batches(facts, lambda name: nbytes(facts[name]), _BATCH_BYTES):
        staged = {weights[n]: torch.empty(facts[n].shape, dtype=decode_dtype(facts[n].dtype)) for n in batch}
        read_tensors(reader, staged)
        for name in batch:
            file.write(staged[weights[name]].reshape(-1).view(torch.uint8))
    file.close()
    unfinished.rename(out / FILE)
    return len(facts), file.size
