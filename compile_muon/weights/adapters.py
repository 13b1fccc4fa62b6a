"""PEFT's adapters in and out of a sharded model, in PEFT's own files; the base model's weights stay where they are.

Which tensors belong to an adapter, and what they are called in its file, PEFT alone knows: it is asked with tensors
that have no memory, and only those it chose are gathered.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from compile_muon.errors import CheckpointError, UnsupportedModelError, listed
from compile_muon.files.disk import open_plain, sync
from compile_muon.model.full_parameters import full_parameters
from compile_muon.weights.full import Weights, gather, load_full_state_dict
from compile_muon.weights.wire import Wire


def has_adapters(module: nn.Module) -> bool:
    """Tell whether ``module`` is a ``PeftModel``; PEFT is not imported for the question."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def holds_adapters(module: Any, folder: Path) -> bool:
    """Tell whether ``folder`` has what :func:`save_adapters` writes of ``module``, a ``PeftModel``."""
    return any(_file(folder, adapter).is_file() for adapter in module.peft_config)


def _file(folder: Path, adapter: str) -> Path:
    return (folder if adapter == "default" else folder / adapter) / "adapter_model.safetensors"


def merge_adapters(model: nn.Module, **how: Any) -> nn.Module:
    """PEFT's ``merge_and_unload()`` of a sharded model, layer by layer: at most one is whole at a time; collective.

    Args:
        model: a ``PeftModel``. Its adapters are gone then, and nothing of it trains any more.
        how: of the layers' own ``merge()``, ``safe_merge`` and ``adapter_names``.
    Returns:
        The base model, sharded as it was, for :func:`compile_muon.save_pretrained` or ``full_state_dict``.
    Raises:
        UnsupportedModelError: it has no adapters; or a layer cannot be merged, and then those ahead of it are.

    >>> merged = compile_muon.merge_adapters(model)                                 # doctest: +SKIP
    >>> compile_muon.save_pretrained(merged, "merged")                              # doctest: +SKIP
    """
    module: Any = getattr(model, "_orig_mod", model)  # torch.compile(model)
    if not has_adapters(module) or not hasattr(module, "unload"):
        raise UnsupportedModelError(f"model: a {type(module).__name__} has no adapters to merge; give the PeftModel")
    from peft.tuners.tuners_utils import BaseTunerLayer

    module.base_model._check_merge_allowed()
    for layer in [inner for inner in module.modules() if isinstance(inner, BaseTunerLayer)]:
        with full_parameters(cast("nn.Module", layer), write=True):
            layer.merge(**how)
    return module.unload()


def _names(weights: Weights, adapter: str) -> dict[str, str | None]:
    """Map PEFT's name of each tensor of an adapter to its name in the model; None for what PEFT computes of several."""
    from peft import get_peft_model_state_dict

    hollow = {
        name: torch.empty(entry.shape, dtype=entry.tensor.dtype, device="meta")
        for key, entry in weights.entries.items()
        for name in weights.names[key]
    }
    chosen = get_peft_model_state_dict(weights.module, state_dict=hollow, adapter_name=adapter)
    by_id = {id(tensor): name for name, tensor in hollow.items()}
    return {name: by_id.get(id(tensor)) for name, tensor in chosen.items()}


def save_adapters(weights: Weights, folder: Path, ranks: Wire, doing: str) -> None:
    """Let rank 0 run ``PeftModel.save_pretrained`` with whole tensors; collective."""
    module: Any = weights.module
    adapters = list(module.peft_config)
    wanted = ranks.by_first(doing, lambda: {name for each in adapters for name in _names(weights, each).values()})
    state = gather(weights, ranks, doing, None if None in wanted else cast("set[str]", wanted))
    with ranks.together(doing), ExitStack() as stack:
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            staging = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".adapters-", suffix=".tmp"))
            module.save_pretrained(staging, state_dict=state)
            files = sorted(filter(Path.is_file, Path(staging).rglob("*")), key=lambda path: path.suffix == ".json")
            # Files get their names once they are on the disk: weights first, then what says how to read them.
            copies = [path.with_name(f"{path.name}.copy") for path in files]
            for path, copied in zip(files, copies, strict=True):
                shutil.copyfile(path, copied)  # for whom the umask says: PEFT's weights are for their owner alone
                sync(copied)
            for path, copied in zip(files, copies, strict=True):
                final = folder / path.relative_to(staging)
                final.parent.mkdir(exist_ok=True)
                os.replace(copied, final)
                sync(final.parent)


def load_adapters(weights: Weights, folder: Path, ranks: Wire, *, strict: bool) -> None:
    """Load into each adapter of the model what ``folder`` has of it, if all names and shapes fit; collective."""
    module: Any = weights.module
    state: dict[str, Tensor] = {}
    with ranks.together(f"{folder}: nothing was loaded"):
        if ranks.rank == 0:
            for adapter in module.peft_config:
                state |= _read(weights, adapter, _file(folder, adapter), strict)
    load_full_state_dict(module, state, strict=False)


def _read(weights: Weights, adapter: str, path: Path, strict: bool) -> Mapping[str, Tensor]:
    """Read an adapter's file, by name in the model."""
    from safetensors.torch import load

    names = _names(weights, adapter)
    stored: dict[str, Tensor] = {}
    if path.is_file():
        with open_plain(path, links=True) as file:
            stored = load(file.read())
    if computed := [name for name, key in names.items() if key is None]:
        raise CheckpointError(
            f"{listed(computed)}: PEFT computes it of several tensors; load with PeftModel.from_pretrained before "
            "sharding"
        )
    problems = [f"{name}: is missing" for name in names if name not in stored]
    problems += [f"{name}: is not in adapter {adapter!r} of the model" for name in stored if name not in names]
    if problems and strict:
        raise CheckpointError(listed(problems))
    return {str(names[name]): tensor for name, tensor in stored.items() if name in names}
