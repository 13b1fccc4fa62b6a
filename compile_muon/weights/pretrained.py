"""Folders in Hugging Face's layout, from and into shards.

A library's own ``model.save_pretrained`` writes on the first rank what this one holds. :func:`save_pretrained` stands
for those of Transformers' and PEFT's models, and needs no room for whole weights. Any other class writes more than
weights (the constructor's arguments, a tokenizer, other modules' files): its own method runs on the first rank, with
whole weights.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from compile_muon.agreement.compare import by_rank
from compile_muon.engine.resident import start_refresh_by_owner
from compile_muon.errors import CheckpointError, config_error, listed
from compile_muon.experts.load import Block, boxes, origins_of
from compile_muon.files.tensor_folder import batches, parse_size, place, reader_of, split
from compile_muon.files.tensors import Box, TensorFacts, new_tensor_file, ordered
from compile_muon.model.full_parameters import full_parameters
from compile_muon.model.readers import sharded_params_of
from compile_muon.passes.language.spec import encode_dtype
from compile_muon.progress import underway
from compile_muon.weights.adapters import has_adapters, holds_adapters, load_adapters, save_adapters
from compile_muon.weights.full import Weights, check_live, weights_of
from compile_muon.weights.wire import Entry, Wire

#: arguments of Transformers' and PEFT's that ask for nothing else than is done
_HEEDED = {"is_main_process", "save_function", "safe_serialization", "token", "save_peft_format"}
#: classes whose ``save_pretrained`` compile_muon's stands for
_SAME_LAYOUT = (("transformers", "PreTrainedModel"), ("peft", "PeftModel"))
_BATCH_BYTES = 64 << 20  # of this rank's rows read at once, or one tensor's that are more


def save_pretrained(model: nn.Module, folder: str | os.PathLike, *, max_shard_size: int | str = "5GB") -> None:
    """Write whole weights as ``from_pretrained`` reads them; collective over the ranks that share the model.

    Parameters (master values) and persistent buffers (rank 0's), tied ones once, in ``model.safetensors`` or several
    files and their index; and ``config.json`` and ``generation_config.json`` of a Hugging Face model. Rank 0 writes,
    row by row as they come. Every file gets its name once it is whole and on the disk, the index last. Of a
    ``PeftModel``, its adapters alone, as its own ``save_pretrained`` does.

    Args:
        folder: need only be seen by rank 0. Weights that are in it are replaced, other files stay.
        max_shard_size: of one file, in bytes or like "500MB"; a tensor that is larger has a file of its own.
    Raises:
        ConfigError: ``max_shard_size`` is not a size.
        UnsupportedModelError: nothing in ``model`` is sharded.
        CheckpointError: it cannot be written, or the model holds state that is no tensor; on every rank.
        PeerError: a rank does not come; it takes the time-out of the process group.
    """
    limit = parse_size(max_shard_size)
    folder = Path(os.path.abspath(folder))
    weights = weights_of(model)
    with weights.status.at("save_pretrained"), underway(f"saving {folder}"):
        ranks = weights.meet("save_pretrained", limit)
        doing = f"{folder}: weights were not saved"
        if has_adapters(weights.module):
            return save_adapters(weights, folder, ranks, doing)
        with ranks.together(doing):
            entries = _files_entries(weights)
            facts = {name: TensorFacts.of(entry.tensor) for name, entry in entries.items()}
            files = split(facts, limit)
            if ranks.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
        try:
            for file, names in files.items():
                with ranks.together(doing):
                    _write_file(folder / f"{file}.tmp", ordered({n: facts[n] for n in names}), entries, ranks)
            with ranks.together(doing):
                if ranks.rank == 0:
                    _write_config(weights.module, folder)
                    place(folder, facts, files)
        except CheckpointError:
            for path in (folder / f"{file}.tmp" for file in files):
                if ranks.rank == 0 and path.is_file() and not path.is_symlink():  # else a stranger's, and the cause
                    path.unlink()
            raise


def _write_file(path: Path, facts: Mapping[str, TensorFacts], entries: Mapping[str, Entry], ranks: Wire) -> None:
    with ExitStack() as stack:
        # By the stream, on rank 0: a file that cannot be opened then ends the stream on every rank.
        opened = cache(partial(stack.enter_context, new_tensor_file(path, facts)))
        ranks.stream({name: entries[name] for name in facts}, lambda name: opened())


def _files_entries(weights: Weights) -> dict[str, Entry]:
    """Choose what goes into files, by the name that ``from_pretrained`` looks for; refuse state that is no tensor."""
    if weights.others:
        raise CheckpointError(
            f"{listed(list(weights.others))}: state that is no tensor (get_extra_state()) has no place in safetensors; "
            "use full_state_dict() or a Checkpointer"
        )
    ignored = set(getattr(weights.module, "_keys_to_ignore_on_save", None) or ())
    tied = tied_names(weights.module)
    # Of tied weights, the name that is not made from another one when the model is built.
    return {
        next((n for n in weights.names[name] if not any(re.search(pattern, n) for pattern in tied)), name): entry
        for name, entry in weights.entries.items()
        if not ignored & set(weights.names[name])
    }


def tied_names(module: nn.Module) -> list[str]:
    """List the patterns of names that Hugging Face's models tie to others."""
    keys = {path: getattr(inner, "_tied_weights_keys", None) for path, inner in module.named_modules()}
    tied = {path: names for path, names in keys.items() if isinstance(names, (dict, list, tuple, set))}
    return [f"{path}.{name}" if path else name for path, names in tied.items() for name in names]


def _write_config(module: nn.Module, folder: Path) -> None:
    """Write ``config.json`` and ``generation_config.json`` as a Hugging Face model's own ``save_pretrained`` does."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(module).__name__]
    config.dtype = encode_dtype(getattr(module, "dtype", torch.float32))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".config-", suffix=".tmp") as staging:
        config.save_pretrained(staging)
        generation: Any = getattr(module, "generation_config", None)
        if generation is not None and getattr(module, "can_generate", bool)():
            generation.save_pretrained(staging)
        for path in Path(staging).iterdir():
            os.replace(path, folder / path.name)


def saves_whole(model: nn.Module) -> None:
    """Have ``save_pretrained`` of this model, and of models in it, write whole weights."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            # A copy of the module has one that is bound to it.
            vars(module)["save_pretrained"] = MethodType(_save, module)


def save_by_class(model: Any, folder: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    """Write whole weights into ``folder`` of rank 0, and what else the model's class writes; collective. Return what
    the class's own method returns on the first rank, else None."""
    class_method = getattr(type(model), "save_pretrained", None)
    library_classes = [getattr(sys.modules.get(library), name, None) for library, name in _SAME_LAYOUT]
    if class_method is None or class_method in [cls.save_pretrained for cls in library_classes if cls is not None]:
        if args:
            return type(model).save_pretrained(model, folder, *args, **kwargs)
        sizes = {"max_shard_size": size} if (size := kwargs.pop("max_shard_size", None)) is not None else {}
        for name, value in kwargs.items():
            if name not in _HEEDED and value not in (None, False, True if name == "save_original_format" else None):
                problem = "is not done with a sharded model"
                raise config_error(f"save_pretrained.{name}", value, problem, "leave it out, and do it with the folder")
        return save_pretrained(model, folder, **sizes)
    weights = weights_of(model)
    with weights.status.at("save_pretrained"):
        ranks = weights.meet("save_pretrained")
        with full_parameters(model), ranks.together(f"{folder}: weights were not saved"):
            return class_method(model, folder, *args, **kwargs) if ranks.rank == 0 else None


def _save(self: Any, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    """Stand for ``self.save_pretrained``."""
    if kwargs.get("state_dict") is not None or not any(map(sharded_params_of, self.modules())):
        return type(self).save_pretrained(self, save_directory, *args, **kwargs)
    return save_by_class(self, save_directory, *args, **kwargs)


def load_pretrained(model: nn.Module, folder: str | os.PathLike, *, strict: bool = True) -> None:
    """Load whole weights of a folder; collective over the ranks that share the model.

    Each rank reads its rows of each tensor, cast to the dtypes in the model; nothing is sent. Optimizer state is not
    touched; resident weights are gathered anew.

    Args:
        folder: written by :func:`save_pretrained`, or by Hugging Face's: with the names that the model has, or of a
            Transformers model with names that it renames and experts that it stacks; seen by every rank. Of adapters,
            for a ``PeftModel`` that has them.
        strict: False to leave alone what is missing, an expert in a stack too, and ignore what is not in the model.
    Raises:
        UnsupportedModelError: nothing in ``model`` is sharded.
        CheckpointError: on every rank: there are no weights, ranks see different ones, names or shapes do not fit, or
            Transformers would convert them otherwise, and nothing was changed then; or a file could not be read on the
            way.
        PeerError: a rank does not come.
    """
    load_folder(model, folder, strict, adapters=True)


def load_folder(model: nn.Module, folder: str | os.PathLike, strict: bool, *, adapters: bool) -> None:
    """Do the same; without ``adapters`` for a model without values yet, which adapters alone do not give."""
    folder = Path(os.path.abspath(folder))
    weights = weights_of(model)
    with weights.status.at("load_pretrained"), underway(f"loading {folder}"):
        ranks = weights.meet("load_pretrained", strict)
        if adapters and has_adapters(weights.module) and all(ranks.gather(holds_adapters(weights.module, folder))):
            return load_adapters(weights, folder, ranks, strict=strict)
        with ranks.together(f"{folder}: nothing was loaded"):
            check_live(weights.module, {name: entry.tensor for name, entry in weights.entries.items()})
            stored = reader_of(folder)
            blocks = _fit(weights, stored.facts, strict)
        digest = hashlib.sha256(repr(sorted(stored.facts.items())).encode()).hexdigest()
        if different := ranks.compare({"digest": digest[:16]}):
            said = f"ranks see different weights in it ({by_rank(different['digest'])})"
            raise CheckpointError(f"folder = {folder}: {said}; nothing was loaded: give every rank the same folder")
        try:
            with ranks.together(f"{folder}: loading stopped halfway, the model holds old and new weights"):
                # Headers are looked through at each reading, and a file is mapped while it is read.
                for batch in batches(_boxes(weights, blocks, ranks.rank), lambda box: box.target.nbytes, _BATCH_BYTES):
                    stored.read(batch)
        finally:
            start_refresh_by_owner(weights.sharded_params)


def _fit(weights: Weights, facts: Mapping[str, TensorFacts], strict: bool) -> dict[str, list[Block]]:
    """Find in the folder the blocks that each entry is made of; one error lists all that does not fit."""
    ignored = set(getattr(weights.module, "_keys_to_ignore_on_save", None) or ())
    model_names = {alias for names in weights.names.values() for alias in names}
    origins = origins_of(weights.module, facts, model_names)
    blocks: dict[str, list[Block]] = {}
    problems, unused = list[str](), list(origins.unused)
    for name, entry in weights.entries.items():
        names = weights.names[name]
        if origins.refused & set(names):
            continue
        origin = next((origins.of[n] for n in names if n in origins.of), None)
        if isinstance(origin, str):
            blocks[name] = [Block(origin, (0,) * len(entry.shape), entry.shape)]
            if facts[origin].shape != entry.shape:
                problems.append(f"{origin}: has shape {list(facts[origin].shape)}, the model's {list(entry.shape)}")
        elif origin is not None and not origin.fits(entry.shape):
            problems.append(f"{name}: has shape {list(entry.shape)}, which is no stack of {listed(origin.patterns)}")
        elif origin is not None:
            blocks[name], missing, wrong, more = origin.blocks(entry.shape, facts)
            problems += [f"{expert}: is missing" for expert in missing if strict] + wrong
            unused += more
        elif strict and not ignored & set(names):
            problems.append(f"{name}: is missing")
    problems += origins.problems
    if strict:
        problems += [f"{name}: is not in the model" for name in unused]
        problems += [f"{name}: is state that is no tensor, and not in such folders" for name in weights.others]
    if problems:
        raise CheckpointError(f"{listed(problems)}; load other models' weights with from_pretrained before sharding")
    return blocks


def _boxes(weights: Weights, blocks: Mapping[str, list[Block]], rank: int) -> Iterator[Box]:
    """Say what to read into ``rank``'s part of the entries."""
    for name, origins in blocks.items():
        entry = weights.entries[name]
        region = [slice(0, size) for size in entry.shape] if entry.layout is None else entry.layout.region(rank)
        yield from boxes(origins, region, entry.local)
