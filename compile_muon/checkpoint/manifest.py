"""The manifest: what a checkpoint holds, and the size and SHA-256 of every file, written when all else is on the disk.

SHA-256 because a checkpoint is verified far from where it was written, too: ``sha256sum`` says the same, no two flips
cancel, and at 0.3 to 2 GB/s per core it is seldom slower than the disk. It also covers the manifest itself. It tells
damage, not malice: who can edit a file can edit its sum. Against malice there is nothing in the format that runs, and
no name that leaves the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from compile_muon.checkpoint.folder import STATE, TENSORS
from compile_muon.errors import CheckpointError, DamagedError, listed
from compile_muon.storage.boxes import TensorFacts
from compile_muon.storage.disk import write_bytes

__all__ = ["NAME", "FileFacts", "Manifest", "describe_file", "raise_damage"]

NAME = "manifest.json"
FORMAT, VERSION = "compile_muon checkpoint", 1

_FILE = re.compile(rf"({TENSORS}|{STATE})/[A-Za-z0-9_-][A-Za-z0-9._-]*")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without opening its other files.

    Args:
        step, world, stage: of the run that saved it.
        written: time in UTC, ISO 8601.
        versions: of compile_muon and torch.
        configuration: every setting; ``fingerprint`` is its SHA-256.
        tensors: ``model/NAME`` and ``optimizer/NAME/SLOT`` to shape and dtype.
        algorithms: parameter to "muon", "adamw" or "frozen".
        placements: parameter to "whole" or "shard(0)", as the ranks held it.
        aliases: further names of tied weights to the one they are stored under.
        files: path in the folder to size and checksum.
    """

    step: int
    world: int
    stage: int
    written: str
    versions: dict[str, str]
    configuration: dict[str, Any]
    fingerprint: str
    tensors: dict[str, TensorFacts]
    algorithms: dict[str, str]
    placements: dict[str, str]
    aliases: dict[str, str]
    files: dict[str, FileFacts] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, onto the disk."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps({**body, "sha256": _digest_of(body)}, indent=1, sort_keys=True)
        write_bytes(folder / NAME, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint; no other file is looked at.

        Raises:
            DamagedError: it is missing, was changed, or names files outside of the folder.
            CheckpointError: a later version of the format wrote it.
        """
        _regular(folder, NAME)
        try:
            body = json.loads((folder / NAME).read_bytes())
            if not isinstance(body, dict) or body.get("format") != FORMAT:
                raise ValueError("it is no manifest of a checkpoint")
            found = body.pop("sha256", None)
            if found != _digest_of(body):
                raise ValueError("its contents do not have the checksum they were written with")
            version = body.pop("version")
            if version != VERSION:
                raise CheckpointError(
                    f"{folder}: format version = {version!r}: this compile_muon knows version {VERSION}; load it with "
                    "the one that wrote it"
                )
            return cls._parsed(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{folder / NAME}: {error}") from error

    @classmethod
    def _parsed(cls, body: dict[str, Any]) -> Manifest:
        given = {f.name: body[f.name] for f in fields(cls)}
        for name, value in given.items():
            kind = int if name in ("step", "world", "stage") else str if name in ("written", "fingerprint") else dict
            if type(value) is not kind:
                raise ValueError(f"{name} = {value!r} is no {kind.__name__}")
        for name in given["files"]:
            if not _FILE.fullmatch(name):
                raise ValueError(f"it names {name!r}, which is not a place for a file of a checkpoint")
        given["files"] = {name: FileFacts(int(v["size"]), str(v["sha256"])) for name, v in given["files"].items()}
        given["tensors"] = {
            name: TensorFacts(tuple(int(size) for size in v["shape"]), str(v["dtype"]))
            for name, v in given["tensors"].items()
        }
        return cls(**given)

    def problems(self, folder: Path, part: int = 0, parts: int = 1) -> list[str]:
        """What is wrong with the files, those that this ``part`` of ``parts`` verifies; each file is read once."""
        found = []
        for name in sorted(self.files)[part::parts]:
            try:
                _regular(folder, name)
                facts = describe_file(folder / name)
            except (DamagedError, OSError) as error:
                found.append(str(error))
                continue
            wanted = self.files[name]
            if facts.size != wanted.size:
                found.append(f"{folder / name}: {facts.size:,} bytes instead of {wanted.size:,}")
            elif facts != wanted:
                found.append(f"{folder / name}: its contents do not have the checksum they were written with")
        if part == 0:  # the reader of tensors takes every file that is there
            try:
                present = {f"{TENSORS}/{entry}" for entry in os.listdir(folder / TENSORS)}
            except OSError as error:
                present = set()
                found.append(str(error))
            if strangers := sorted(present - self.files.keys()):
                found.append(f"{folder}: {listed(strangers)} is not part of it")
        return found

    def verify(self, folder: Path) -> None:
        """Verify all files in this process.

        Raises:
            DamagedError: listing what is damaged.
        """
        raise_damage(self.problems(folder))


def raise_damage(problems: Sequence[str]) -> None:
    """Raise one error about all ``problems``, if there are any."""
    if problems:
        raise DamagedError("; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else ""))


def describe_file(path: Path) -> FileFacts:
    """Read a file and say what is in it."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileFacts(size, digest.hexdigest())


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _regular(folder: Path, name: str) -> None:
    """Refuse what is not a plain file in plain folders: a link may lead anywhere, a pipe waits for ever."""
    path = folder
    for part, last in zip(("", *name.split("/")), (*[False] * len(name.split("/")), True), strict=True):
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            raise DamagedError(f"{path}: is missing") from None
        if not (stat.S_ISREG(mode) if last else stat.S_ISDIR(mode)):
            raise DamagedError(f"{path}: is not a plain {'file' if last else 'folder'}")
