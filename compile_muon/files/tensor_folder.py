"""Hugging Face's layout on the disk: names of files of tensors, their index, and how a folder of them is replaced."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from compile_muon.errors import CheckpointError, config_error
from compile_muon.files.disk import open_plain, sync, write_bytes
from compile_muon.files.tensors import Reader, TensorFacts

#: what Hugging Face's loaders look for
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

T = TypeVar("T")

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.tmp)?")


def parse_size(size: int | str) -> int:
    """Read Hugging Face's sizes, in powers of ten, as bytes.

    >>> parse_size("5GB")
    5000000000
    """
    match = re.fullmatch(r"\s*(\d+)\s*([KMGT]?B|)\s*", str(size).upper())
    nbytes = 0 if match is None else int(match[1]) * _UNITS[match[2].removesuffix("B") + "B" if match[2] else ""]
    if isinstance(size, bool) or nbytes <= 0:
        raise config_error("max_shard_size", size, "is not a size", 'give bytes, or a string like "500MB" or "5GB"')
    return nbytes


def batches(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group ``items``, in their order: as many at a time as have up to ``limit`` bytes, or one that is larger."""
    batch, size = list[T](), 0
    for item in items:
        if batch and size + size_of(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


def split(facts: Mapping[str, TensorFacts], limit: int) -> dict[str, list[str]]:
    """Name the files, and the tensors in each: in their order, up to ``limit`` bytes, or one tensor that is larger.
    huggingface_hub's ``split_torch_state_dict_into_shards`` does the same, and wants the tensors themselves."""
    files = list(batches(facts, lambda name: facts[name].nbytes, limit))
    if len(files) <= 1:
        return {FILE: [*facts]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


def place(folder: Path, facts: Mapping[str, TensorFacts], files: Mapping[str, Iterable[str]]) -> None:
    """Give ``files``, written as ``NAME.tmp``, their names, and remove what another save left; the index goes last.

    Killed on the way, the folder holds the old weights, the new ones, or none that a loader finds: while names change
    there is no index, so no loader puts old files and new ones together.
    """
    if len(files) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": sum(fact.nbytes for fact in facts.values())}}
        index["weight_map"] = {name: file for file, names in files.items() for name in names}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_bytes(folder / f"{INDEX}.tmp", text.encode(), replace=True)
    (folder / INDEX).unlink(missing_ok=True)
    if FILE not in files:
        (folder / FILE).unlink(missing_ok=True)
    sync(folder)
    for name in files:
        os.replace(folder / f"{name}.tmp", folder / name)
    sync(folder)
    if len(files) > 1:
        os.replace(folder / f"{INDEX}.tmp", folder / INDEX)
    for entry in list(folder.iterdir()):
        ours = _OURS.fullmatch(entry.name) and entry.name not in (*files, INDEX)
        if ours and (entry.is_file() or entry.is_symlink()):
            entry.unlink()
    sync(folder)


def reader_of(folder: Path) -> Reader:
    """Open the weights in a folder: ``model.safetensors``, or the files that ``model.safetensors.index.json`` names."""
    if (folder / FILE).is_file():
        return Reader(folder, [FILE], links=True)  # caches are made of links
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(
            f"folder = {folder}: holds neither {FILE} nor {INDEX}; give a folder that save_pretrained wrote "
            "(pickled weights: load them on rank 0 and give them to load_full_state_dict)"
        )
    try:
        with open_plain(index, links=True) as file:
            places = json.loads(file.read())["weight_map"]
        files = sorted(set(places.values()))
        if not all(isinstance(name, str) for name in files):
            raise TypeError("weight_map holds something else than names of files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: is damaged ({type(error).__name__}: {error})") from error
    for name in files:
        if os.path.basename(name) != name or "\0" in name or not (folder / name).is_file():
            raise CheckpointError(f"{index}: names the file {name!r}, which is not in the folder")
    return Reader(folder, files, links=True, places=places)
