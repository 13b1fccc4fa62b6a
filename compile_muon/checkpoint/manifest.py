"""The manifest: what a checkpoint holds, and the size and SHA-256 of every file, written when all else is on the disk.

SHA-256 because a checkpoint is verified far from where it was written, too: ``sha256sum`` says the same, no two flips
cancel, and at 0.3 to 2 GB/s per core a sum is seldom slower than the disk. The manifest has one of itself. Sums tell
damage, not malice: who can edit a file can edit its sum. Against malice there is nothing in the format that runs, and
no name that leaves the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch

from compile_muon.checkpoint.folder import FORMAT, NAME, STATE, TENSORS
from compile_muon.errors import CheckpointError, DamagedError, listed, shortened, shown
from compile_muon.files.disk import open_plain, open_within, write_bytes
from compile_muon.files.tensors import Reader, TensorFacts

VERSION = 1

_FILE = re.compile(rf"({TENSORS}|{STATE})/[A-Za-z0-9_-][A-Za-z0-9._-]*")
_LARGEST = 2**62  # of a number in a manifest: what is larger is no size
_COPY = "take a copy of this file that is whole, or another checkpoint"
_CHANGED = "its contents do not have the checksum they were written with"


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and SHA-256 in hexadecimal."""

    size: int
    sha256: str


def describe_file(path: Path) -> FileFacts:
    """Read a plain file and say what is in it."""
    with open_plain(path) as file:
        return _facts_of(file)


def _facts_of(file: BinaryIO) -> FileFacts:
    digest, size = hashlib.sha256(), 0
    while block := file.read(1 << 20):
        digest.update(block)
        size += len(block)
    return FileFacts(size, digest.hexdigest())


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _number(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _text(value: object) -> bool:
    return type(value) is str


def _file(value: object) -> bool:
    parts = value if isinstance(value, dict) else {}
    return _number(parts.get("size")) and _text(parts.get("sha256")) and len(parts["sha256"]) == 64


def _tensor(value: object) -> bool:
    parts: dict[str, Any] = value if isinstance(value, dict) else {}
    shape, dtype = parts.get("shape"), getattr(torch, str(parts.get("dtype")), None)
    sizes = isinstance(shape, list) and all(map(_number, shape)) and math.prod(shape) < _LARGEST
    return sizes and _text(parts.get("dtype")) and isinstance(dtype, torch.dtype)


def _field(kind: type, allowed: Callable[[object], bool], what: str, **default: Any) -> Any:
    """Declare a field: its kind, what it, or each value in it, has to satisfy, and what that is called."""
    return field(metadata={"rule": (kind, allowed, what)}, **default)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description, which is read without opening its other files."""

    step: int = _field(int, _number, "number")
    world: int = _field(int, lambda value: _number(value) and value != 0, "number of ranks")
    stage: int = _field(int, lambda value: value in (0, 1, 2, 3), "ZeRO stage")
    written: str = _field(str, _text, "text")  # time in UTC, ISO 8601
    versions: dict[str, str] = _field(dict, _text, "text")  # of compile_muon and torch
    configuration: dict[str, Any] = _field(dict, lambda value: True, "setting")
    fingerprint: str = _field(str, _text, "text")  # SHA-256 of the configuration
    # ``model/NAME`` and ``optimizer/NAME/SLOT``
    tensors: dict[str, TensorFacts] = _field(dict, _tensor, "shape and dtype of a tensor")
    algorithms: dict[str, str] = _field(dict, _text, "name of an algorithm")  # "muon", "adamw" or "frozen"
    placements: dict[str, str] = _field(dict, _text, "placement")  # "whole" or "shard(0)", as the ranks held it
    aliases: dict[str, str] = _field(dict, _text, "name")  # further names of tied weights to the stored one
    files: dict[str, FileFacts] = _field(dict, _file, "size and SHA-256 of a file", default_factory=dict)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ where any of it does."""
        return _digest_of(asdict(self))[:16]

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder``, onto the disk."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps({**body, "sha256": _digest_of(body)}, indent=1, sort_keys=True)
        write_bytes(folder / NAME, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint; no other file is looked at. A DamagedError names the field that was
        changed, or is what it cannot be. A later format is a CheckpointError."""
        with open_within(folder, NAME) as file:
            data = file.read()
        try:
            body = json.loads(data)
            if not isinstance(body, dict) or body.get("format") != FORMAT:
                raise ValueError(f"format: it is no manifest of a checkpoint, which says {FORMAT!r} there")
            if body.pop("sha256", None) != _digest_of(body):
                raise ValueError(f"sha256: {_CHANGED}")
            version = body.pop("version", None)
            if type(version) is not int or version < VERSION:
                raise ValueError(f"version = {shown(version)}: is no version of the format")
            if version > VERSION:
                raise CheckpointError(
                    f"{folder}: format version = {shown(version)}: this compile_muon knows version {VERSION}; load it "
                    "with the one that wrote it"
                )
            return cls._parsed(body)
        except (ValueError, RecursionError) as error:
            said = "it is nested too deeply" if isinstance(error, RecursionError) else shortened(str(error), 300)
            raise DamagedError(f"{folder / NAME}: {said}; {_COPY}") from error

    @classmethod
    def _parsed(cls, body: Mapping[str, Any]) -> Manifest:
        """Take the fields of a manifest's body; a ValueError names the one that is not what it has to be."""
        for f in fields(cls):
            (kind, allowed, what), value = f.metadata["rule"], body.get(f.name)
            if type(value) is not kind or not (kind is dict or allowed(value)):
                raise ValueError(f"{f.name} = {shown(value)}: is no {what if kind is not dict else 'object'}")
            for key, inner in value.items() if isinstance(value, dict) else ():
                if not allowed(inner):
                    raise ValueError(f"{f.name}[{shown(key)}] = {shown(inner)}: is no {what}")
        for name in body["files"]:
            if not _FILE.fullmatch(name):
                raise ValueError(f"files: {shown(name)} is not a place for a file of a checkpoint")
        for alias, name in body["aliases"].items():
            if f"model/{name}" not in body["tensors"]:
                raise ValueError(f"aliases[{shown(alias)}] = {shown(name)}: is no tensor of the model")
        files = {name: FileFacts(v["size"], v["sha256"]) for name, v in body["files"].items()}
        tensors = {name: TensorFacts(tuple(v["shape"]), v["dtype"]) for name, v in body["tensors"].items()}
        return cls(**{f.name: body[f.name] for f in fields(cls)} | {"files": files, "tensors": tensors})

    def trained(self) -> list[str]:
        """List the parameters that were not frozen, under all their names."""
        names = [name for name, algorithm in self.algorithms.items() if algorithm != "frozen"]
        return names + [alias for alias, name in self.aliases.items() if name in names]

    def reader(self, folder: Path) -> Reader:
        """Open the tensors in the files that the manifest names, and in no other, if all are as the manifest says."""
        reader = Reader(folder, [name for name in sorted(self.files) if name.startswith(f"{TENSORS}/")])
        reader.check(self.tensors)
        return reader

    def problems(self, folder: Path, part: int = 0, parts: int = 1) -> list[str]:
        """List what is wrong with the files, those that this ``part`` of ``parts`` verifies; each file is read once."""
        problems = []
        for name in sorted(self.files)[part::parts]:
            try:
                with open_within(folder, name) as file:
                    facts, manifest_facts = _facts_of(file), self.files[name]
            except (DamagedError, OSError) as error:
                problems.append(str(error))
                continue
            if facts.size != manifest_facts.size:
                problems.append(f"{folder / name}: {facts.size:,} bytes instead of {manifest_facts.size:,}")
            elif facts != manifest_facts:
                problems.append(f"{folder / name}: {_CHANGED}")
        try:
            if part == 0 and (strangers := self._strangers(folder)):
                problems.append(f"{folder}: {listed(strangers)} is not part of it")
        except OSError as error:
            problems.append(str(error))
        return problems

    def _strangers(self, folder: Path) -> list[str]:
        """List what was put beside the files; nothing is opened. Notes beside the manifest are no damage."""
        there = {f"{part}/{name}" for part in (TENSORS, STATE) for name in os.listdir(folder / part)}
        with os.scandir(folder) as entries:
            odd = {e.name for e in entries if e.is_symlink() or not (e.is_file() or e.is_dir())}
        return sorted(there - self.files.keys() | odd)

    def verify(self, folder: Path) -> None:
        """Verify all files in this process, and that they hold all rows of all tensors; one error lists the damage."""
        raise_damage(self.problems(folder))
        self.reader(folder)


def raise_damage(problems: Sequence[str]) -> None:
    """Raise one error about all ``problems``, if there are any."""
    if problems:
        raise DamagedError("; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else ""))
