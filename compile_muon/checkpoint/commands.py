"""``python -m compile_muon checkpoint list | verify | inspect | export FOLDER``: without a GPU, without the model."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import torch

from compile_muon.checkpoint.folder import Folder
from compile_muon.checkpoint.manifest import Manifest
from compile_muon.errors import CheckpointError, printable
from compile_muon.files.tensor_folder import FILE, batches
from compile_muon.files.tensors import new_tensor_file, ordered, read_tensors
from compile_muon.passes.language.spec import decode_dtype

_BATCH_BYTES = 256 << 20  # read at once, or one tensor that is larger


def run(chosen: argparse.Namespace) -> int:
    """Carry out a parsed command; the exit code is 1 where something is damaged or not there."""
    try:
        folder = Folder(chosen.folder)
        step = getattr(chosen, "step", None)
        present = folder.steps()
        steps = present if step is None else [step]
        if not steps or not set(steps) <= set(present):
            _say(f"{folder.path}: no checkpoint" + ("" if step is None else f" of step {step}; steps: {present}"))
            return 1
        if chosen.action == "inspect":
            _inspect(Manifest.read(folder.at(steps[-1])))
        elif chosen.action == "export":
            _say(_export(folder.at(steps[-1]), chosen.out))
        else:
            return _list_or_verify(folder, steps, verify=chosen.action == "verify")
        return 0
    except BrokenPipeError:
        raise  # nobody reads the rest
    except (CheckpointError, OSError, MemoryError, RecursionError) as error:
        _say(error if str(error) else f"{chosen.folder}: {type(error).__name__}")
        return 1


def _say(text: object) -> None:
    """Print a line: what a file says may move the cursor, or be no character of the terminal's."""
    line = printable(str(text))
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding))


def _list_or_verify(folder: Folder, steps: list[int], *, verify: bool) -> int:
    failed = 0
    if not verify:
        _say(f"{'step':>10}  {'written (UTC)':25}  {'MiB':>10}  world  stage")
    for step in steps:
        try:
            manifest = Manifest.read(folder.at(step))
            if verify:
                manifest.verify(folder.at(step))
                _say(f"step {step}: whole, {len(manifest.files)} files")
            else:
                size = sum(file.size for file in manifest.files.values()) / 2**20
                _say(f"{step:10}  {manifest.written:25}  {size:10,.1f}  {manifest.world:5}  {manifest.stage:5}")
        except CheckpointError as error:
            _say(f"step {step}: damaged: {error}" if verify else f"{step:10}  {error}")
            failed = 1
    return failed


def _inspect(manifest: Manifest) -> None:
    _say(f"step {manifest.step}, written {manifest.written} by {manifest.world} ranks at ZeRO stage {manifest.stage}")
    _say(", ".join(f"{name} {number}" for name, number in sorted(manifest.versions.items())))
    _say(f"configuration {manifest.fingerprint[:16]}: {manifest.configuration}")
    weights = {key.removeprefix("model/"): facts for key, facts in manifest.tensors.items() if key.startswith("model/")}
    elements = sum(math.prod(facts.shape) for facts in weights.values())
    _say(f"{elements:,} elements in {len(weights)} weights and buffers")
    width = max(map(len, weights), default=0)
    for name, facts in weights.items():
        kind, placement = manifest.algorithms.get(name, "buffer"), manifest.placements.get(name, "whole")
        _say(f"  {name:{width}}  {kind:7}  {placement:9}  {facts.dtype:9}  {list(facts.shape)}")
    for alias, name in manifest.aliases.items():
        _say(f"  {alias:{width}}  is {name}")


def _export(checkpoint: Path, out: Path) -> str:
    """Write weights and buffers of a verified checkpoint into ``out/model.safetensors``, tied ones under all their
    names, some at a time, so that memory does not grow with the model; return a description of the file."""
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
    with new_tensor_file(unfinished, facts) as write:
        for batch in batches(facts, lambda name: facts[name].nbytes, _BATCH_BYTES):
            staged = {
                weights[n]: torch.empty(facts[n].shape, dtype=decode_dtype(facts[n].dtype), device="cpu") for n in batch
            }
            read_tensors(reader, staged)
            for name in batch:
                write(staged[weights[name]].reshape(-1).view(torch.uint8))
    unfinished.rename(out / FILE)
    return f"{out}: {len(facts)} tensors of step {manifest.step}, {(out / FILE).stat().st_size:,} bytes"
