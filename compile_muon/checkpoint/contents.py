"""What of a model and its optimizer is in a checkpoint, by name, and whether a checkpoint fits them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from compile_muon.agreement.together import Ranks
from compile_muon.checkpoint.manifest import Manifest
from compile_muon.engine.dtensors import like_parameter, local_tensor
from compile_muon.engine.owner_states import each_matrix, every_shape, states_kept
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import MASTER
from compile_muon.errors import CheckpointError, listed
from compile_muon.files.disk import memory_in_file
from compile_muon.files.safetensors import TensorFacts
from compile_muon.model.groups import values_of
from compile_muon.optimizer import MuonZero
from compile_muon.passes.language.spec import encode_dtype
from compile_muon.passes.methods import State
from compile_muon.weights.named_tensors import named_state

__all__ = ["Contents", "HostCopies", "contents_of", "described", "empty_like", "fit"]


@dataclass
class Contents:
    """Live references to all there is to save, or to load into.

    Args:
        tensors: ``model/NAME`` to a parameter or a buffer, ``optimizer/NAME/SLOT`` to state.
        algorithms: parameter to "muon", "adamw" or "frozen".
        buffers: names of ``tensors`` that are no parameters; ranks may hold different ones.
        aliases: further names of tied weights to the first.
        module_state: what modules' ``get_extra_state()`` gave, by its key in the state dict.
        groups: hyperparameters by the name of the group.
        members: names of its parameters, by the name of the group.
        folders: of ``tensors`` that are in a file, where it is.
        elsewhere: what only other ranks hold, states of the matrices that they own.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    algorithms: dict[str, str] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    module_state: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    elsewhere: dict[str, TensorFacts] = field(default_factory=dict)

    def facts(self) -> dict[str, TensorFacts]:
        """Shape and dtype of each whole tensor of all ranks."""
        held = {key: TensorFacts(tuple(t.shape), encode_dtype(t.dtype)) for key, t in self.tensors.items()}
        return dict(sorted((held | self.elsewhere).items())) if self.elsewhere else held

    def check_writable(self, keys: Iterable[str]) -> None:
        """Raise ahead of the first write if one could not be made.

        Raises:
            CheckpointError: a buffer shares memory with itself (``expand``), or was made under inference_mode.
        """
        for key in keys:
            local = local_tensor(self.tensors[key])
            twice = any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True))
            if twice or (local.is_inference() and not torch.is_inference_mode_enabled()):
                raise CheckpointError(
                    f"{key.removeprefix('model/')}: cannot be written in place "
                    f"({'expanded' if twice else 'made under torch.inference_mode()'}); give it memory of its own, "
                    "with clone() outside of inference_mode"
                )

    def placements(self) -> dict[str, str]:
        """How this optimizer's ranks hold each parameter."""
        tensors = {name: self.tensors[f"model/{name}"] for name in self.algorithms}
        return {name: _cuts(tensor) if isinstance(tensor, DTensor) else "whole" for name, tensor in tensors.items()}


def _cuts(tensor: DTensor) -> str:
    cuts = [(dim, placement.dim) for dim, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    names = tensor.device_mesh.mesh_dim_names
    if tensor.device_mesh.ndim == 1 or names is None:
        return "shard(0)" if cuts else "whole"
    return ", ".join(f"shard({dim}) over {names[axis]}" for axis, dim in cuts) or "whole"


def contents_of(model: nn.Module, optimizer: MuonZero) -> Contents:
    """Gather references; nothing is copied.

    Raises:
        CheckpointError: the optimizer's parameters are not the model's, or its state holds something that is no tensor.
    """
    optimizer.engine.step.own_momenta()
    found, provider = Contents(), optimizer.engine.state_provider
    algorithm: dict[int, str] = {}
    sharded_params = {id(sharded.param): sharded for sharded in optimizer.engine.params}
    for group in optimizer.param_groups:
        algorithm |= {id(param): group["algorithm"] for param in group["params"]}
        found.groups[group["name"]] = values_of(group)
        found.members[group["name"]] = [sharded_params[id(param)].name for param in group["params"]]
    live = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors, found.aliases, found.module_state = named_state(model)
    for name, value in tensors.items():
        if id(value) not in live:
            raise CheckpointError(
                f"{name}: is in model.state_dict(), and is neither a parameter nor a buffer: it could not be loaded in "
                "place; give it to save() among the extra values"
            )
        found.tensors[f"model/{name}"] = value.detach()
        if (sharded := sharded_params.get(id(value))) is not None:
            at_owner = {state.name: state for state in states_kept(sharded)}
            found.algorithms[name] = algorithm.get(id(value), "frozen")
            for slot, state in optimizer.state.get(cast("nn.Parameter", value), {}).items():
                # A master is the weight in a checkpoint, wherever the run that goes on from it keeps that.
                key = f"model/{name}" if slot == MASTER else f"optimizer/{name}/{slot}"
                if not isinstance(state, Tensor):
                    raise CheckpointError(
                        f"optimizer.state[{name}][{slot!r}] = {state!r}: is no tensor; make it one, or take it out"
                    )
                if (kind := at_owner.get(slot)) is not None:
                    _put_matrices(found, key, sharded, kind, state.detach())
                    continue
                found.tensors[key] = state.detach()
                if (folder := provider.places.get(sharded.name, {}).get(slot)) is not None:
                    found.folders[key] = folder
        else:
            found.buffers.append(f"model/{name}")
    held = {id(value) for value in tensors.values()}
    if foreign := [sharded.name for key, sharded in sharded_params.items() if key not in held]:
        raise CheckpointError(
            f"model: does not hold {listed(foreign)}, which the optimizer trains; give the model that the optimizer "
            "was made with, outside of full_parameters()"
        )
    return found


def _put_matrices(found: Contents, key: str, sharded: ShardedParam, state: State, held: Tensor) -> None:
    """A state at owners, matrix by matrix: any world then finds those that its ranks own."""
    mine = dict(each_matrix(sharded, state, held))
    for number, shape in every_shape(sharded, state).items():
        if 0 in shape:
            continue
        if number in mine:
            found.tensors[f"{key}.{number}"] = mine[number]
        else:
            found.elsewhere[f"{key}.{number}"] = TensorFacts(shape, encode_dtype(held.dtype))


# ------------------------------------------------------------------------------------------ host memory


class HostCopies:
    """Copies in host memory, or in a file of what is in one, whose memory the next copy uses again.

    Args:
        ranks: that hold them.
        keep: copy even what is on the CPU, because training goes on while it is written.
    """

    def __init__(self, ranks: Ranks, *, keep: bool) -> None:
        self._ranks = ranks
        self._keep = keep
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor], folders: Mapping[str, Path]) -> dict[str, Tensor]:
        """The same tensors on the CPU, once all are there; DTensors by their shards.

        Args:
            folders: of those in a file.
        """
        found, waiting = {}, False
        for key, tensor in tensors.items():
            local = local_tensor(tensor).detach()
            if self._keep or not local.is_cpu:
                waiting |= not local.is_cpu
                local = self._room(key, local, folders.get(key)).copy_(local, non_blocking=True)
            found[key] = _on_host(tensor, local.contiguous(), self._ranks)
        if waiting:
            torch.accelerator.synchronize()
        return found

    def _room(self, key: str, local: Tensor, folder: Path | None) -> Tensor:
        kept = self._memory.get(key)
        if kept is None or kept.shape != local.shape or kept.dtype != local.dtype:
            # From pinned memory, the copy is the device's and waits for nothing.
            kept = _new(local, folder, pin=local.is_cuda)
            if self._keep:
                self._memory[key] = kept
        return kept


def empty_like(tensor: Tensor, ranks: Ranks, folder: Path | None) -> Tensor:
    """New host memory, or a file in ``folder``, for what this rank holds of ``tensor``."""
    return _on_host(tensor, _new(local_tensor(tensor), folder), ranks)


def _new(like: Tensor, folder: Path | None, *, pin: bool = False) -> Tensor:
    if folder is None:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin)
    try:
        return memory_in_file(folder, like.shape, like.dtype)
    except OSError as error:
        raise CheckpointError(
            f"offload.nvme_path = {str(folder)!r}: has no place for a copy of the optimizer state there "
            f"({error.strerror}): make room"
        ) from error


def _on_host(tensor: Tensor, local: Tensor, ranks: Ranks) -> Tensor:
    """``local`` as the part of a tensor like ``tensor`` in host memory."""
    return like_parameter(tensor, local, ranks.mesh_like(tensor.device_mesh)) if isinstance(tensor, DTensor) else local


# ------------------------------------------------------------------------------------------ does it fit


def fit(contents: Contents, manifest: Manifest) -> tuple[dict[str, str], list[str]]:
    """Compare names, shapes, dtypes and algorithms.

    Returns:
        Key of each tensor here that fits to its key in the checkpoint, and what does not fit, one sentence each.
    """
    sources: dict[str, str] = {}
    problems: list[str] = []
    ours, theirs = contents.facts(), manifest.tensors
    used = set()
    slots_of, aliases_of = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for key in ours:
        owner, _, slot = key.rpartition("/")
        slots_of[owner].append(slot)
    for alias, first in contents.aliases.items():
        aliases_of[first].append(alias)
    for name in [key.removeprefix("model/") for key in ours if key.startswith("model/")]:
        # Weights that were tied, under any of their names, still are where a checkpoint of them is.
        names = [name, *aliases_of[name]]
        names += [manifest.aliases[n] for n in names if n in manifest.aliases]
        stored = next((n for n in names if f"model/{n}" in theirs), None)
        what = "parameter" if name in contents.algorithms else "buffer"
        if stored is None:
            problems.append(f"{name}: the checkpoint has no such {what}")
            continue
        used.add(stored)
        wanted, saved = ours[f"model/{name}"], theirs[f"model/{stored}"]
        if wanted != saved:
            for field_name in ("shape", "dtype"):
                mine, other = getattr(wanted, field_name), getattr(saved, field_name)
                if mine != other:
                    mine, other = (list(x) if isinstance(x, tuple) else x for x in (mine, other))
                    problems.append(f"{name}: {field_name} is {other} in the checkpoint, {mine} in the model")
            continue
        sources[f"model/{name}"] = f"model/{stored}"
        trained, now = manifest.algorithms.get(stored), contents.algorithms.get(name)
        if trained != now:
            problems.append(f"{name}: was {trained or 'a buffer'} in the checkpoint, is {now or 'a buffer'} now")
            continue
        for slot in slots_of[f"optimizer/{name}"]:
            mine, other = f"optimizer/{name}/{slot}", f"optimizer/{stored}/{slot}"
            if theirs.get(other) == ours[mine]:
                sources[mine] = other
            else:
                problems.append(f"{name}: its {slot} in the checkpoint is {theirs.get(other)}, not {ours[mine]}")
    stored_names = [key.removeprefix("model/") for key in theirs if key.startswith("model/")]
    problems += [f"{name}: is not in the model" for name in stored_names if name not in used]
    return sources, problems


def described(settings: Any) -> Any:
    """A configuration as JSON, to be read and compared by people and fingerprints; nothing is made of it again."""
    if dataclasses.is_dataclass(settings):
        return {f.name: described(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
    if isinstance(settings, (list, tuple)):
        return [described(item) for item in settings]
    if isinstance(settings, torch.dtype):
        return encode_dtype(settings)
    if callable(settings):
        return getattr(settings, "__qualname__", type(settings).__qualname__)
    return settings
