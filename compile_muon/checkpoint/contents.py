"""What of a model and its optimizer is in a checkpoint, by name, and whether a checkpoint fits them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from compile_muon.agreement.together import Ranks, host_mesh
from compile_muon.checkpoint.manifest import Manifest
from compile_muon.engine.dtensors import like_parameter, local_tensor
from compile_muon.engine.hooks import MASTER
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import each_matrix, every_shape, states_of_owners
from compile_muon.errors import CheckpointError, listed
from compile_muon.files.disk import memory_in_file
from compile_muon.files.tensors import TensorFacts
from compile_muon.model.groups import group_problems, value_problems, values_of
from compile_muon.optimizer import MuonZero
from compile_muon.weights.full import check_live, named_state


@dataclass
class Contents:
    """Live references to all there is to save, or to load into."""

    tensors: dict[str, Tensor]  # ``model/NAME`` to a parameter or a buffer, ``optimizer/NAME/SLOT`` to state
    names: dict[str, list[str]]  # all names of each parameter or buffer, by the first; tied weights have several
    module_state: dict[str, Any]  # what modules' ``get_extra_state()`` gave, by its key in the state dict
    groups: dict[str, dict[str, Any]]  # hyperparameters by the name of the group
    members: dict[str, list[str]]  # names of its parameters, by the name of the group
    algorithms: dict[str, str] = field(default_factory=dict)  # parameter to "muon", "adamw" or "frozen"
    buffers: list[str] = field(default_factory=list)  # keys of ``tensors``; ranks may hold different ones
    folders: dict[str, Path] = field(default_factory=dict)  # of those of ``tensors`` that are in a file
    elsewhere: dict[str, TensorFacts] = field(default_factory=dict)  # states of matrices that other ranks own

    def facts(self) -> dict[str, TensorFacts]:
        """Return shape and dtype of each whole tensor of all ranks."""
        tensor_facts = {key: TensorFacts.of(tensor) for key, tensor in self.tensors.items()}
        return dict(sorted((tensor_facts | self.elsewhere).items())) if self.elsewhere else tensor_facts

    def check_writable(self, keys: Iterable[str]) -> None:
        """Refuse a buffer that shares memory with itself (``expand``), or was made under inference_mode."""
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
        """Say how this optimizer's ranks hold each parameter."""
        return {name: _cuts(self.tensors[f"model/{name}"]) for name in self.algorithms}


def _cuts(tensor: Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return "whole"
    axes = [f" over {name}" for name in tensor.device_mesh.mesh_dim_names or ()]
    axes = axes if len(axes) > 1 else [""] * tensor.device_mesh.ndim
    cuts = zip(tensor.placements, axes, strict=True)
    return ", ".join(f"shard({cut.dim}){axis}" for cut, axis in cuts if isinstance(cut, Shard)) or "whole"


def contents_of(model: nn.Module, optimizer: MuonZero) -> Contents:
    """Gather references; refuse parameters that are not the model's, and state that is no tensor."""
    optimizer.engine.step.own_momenta()
    sharded_params = {id(sharded.param): sharded for sharded in optimizer.engine.params}
    algorithm = {id(param): group["algorithm"] for group in optimizer.param_groups for param in group["params"]}
    tensors, names, module_state = named_state(model)
    contents = Contents({}, names, module_state, *groups_of(optimizer))
    check_live(model, tensors)
    for name, value in tensors.items():
        contents.tensors[f"model/{name}"] = value.detach()
        if (sharded := sharded_params.pop(id(value), None)) is None:
            contents.buffers.append(f"model/{name}")
            continue
        contents.algorithms[name] = algorithm.get(id(value), "frozen")
        places = optimizer.engine.state_provider.places.get(sharded.name, {})
        for slot, state, matrix in states_of(optimizer, sharded):
            # A master is the weight in a checkpoint, wherever the run that goes on from it keeps that.
            key = f"model/{name}" if slot == MASTER else f"optimizer/{name}/{slot}"
            if not isinstance(state, Tensor):
                raise CheckpointError(
                    f"optimizer.state[{name}][{slot!r}] = {state!r}: is no tensor; make it one, or take it out"
                )
            if matrix is not None and state.is_meta:
                contents.elsewhere[key] = TensorFacts.of(state)
            else:
                contents.tensors[key] = state.detach()
                if matrix is None and (folder := places.get(slot)) is not None:
                    contents.folders[key] = folder
    if sharded_params:
        raise CheckpointError(
            f"model: does not hold {listed([foreign.name for foreign in sharded_params.values()])}, which the "
            "optimizer trains; give the model that the optimizer was made with, outside of full_parameters()"
        )
    return contents


def states_of(optimizer: MuonZero, sharded: ShardedParam) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield slot, tensor and None for each state of a parameter, and of a state at owners for each matrix.

    Of a matrix the slot ends in its number, which stands in place of None: any world then finds the states that its
    ranks own. A state that another rank has is on the meta device.
    """
    at_owner = {state.name: state for state in states_of_owners(sharded)}
    for slot, value in optimizer.state.get(sharded.param, {}).items():
        if (kind := at_owner.get(slot)) is None:
            yield slot, value, None
            continue
        mine = dict(each_matrix(sharded, kind, value.detach()))
        for number, shape in every_shape(sharded, kind).items():
            if 0 not in shape:
                other = torch.empty(shape, dtype=value.dtype, device="meta")
                yield f"{slot}.{number}", mine.get(number, other), number


def groups_of(optimizer: MuonZero) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Return hyperparameters, and names of parameters, by the name of the group."""
    members = {group["name"]: [*group["param_names"]] for group in optimizer.param_groups}
    return {group["name"]: values_of(group) for group in optimizer.param_groups}, members


def fitting_groups(
    groups: Mapping[str, dict[str, Any]],
    members: Mapping[str, list[str]],
    saved: Mapping[str, Any],
    saved_members: Mapping[str, list[str] | None],
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the saved values of the groups here, and what does not fit of groups, one sentence each."""
    problems = group_problems(members, saved_members)
    fitting = {}
    for name in (name for name in groups if name in saved):
        wrong = value_problems(groups[name], saved[name])
        problems += wrong
        if not wrong:
            fitting[name] = values_of(saved[name])
    return fitting, problems


@torch.no_grad()
def host_copies(
    tensors: Mapping[str, Tensor], folders: Mapping[str, Path], ranks: Ranks, memory: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return the same tensors on the CPU, once all are there; DTensors by their shards. Where training goes on
    meanwhile, even what is on the CPU is copied, to ``memory``, which the next call uses again."""
    copies, waiting = {}, False
    for key, tensor in tensors.items():
        local = local_tensor(tensor).detach()
        if memory is not None or not local.is_cpu:
            waiting |= not local.is_cpu
            room = None if memory is None else memory.get(key)
            if room is None or room.shape != local.shape or room.dtype != local.dtype:
                # From pinned memory, the copy is the device's and waits for nothing.
                room = _new(local, folders.get(key), pin=local.is_cuda)
            local = room.copy_(local, non_blocking=True)
            if memory is not None:
                memory[key] = local
        copies[key] = _on_host(tensor, local.contiguous(), ranks)
    if waiting:
        torch.accelerator.synchronize()
    return copies


def empty_like(tensor: Tensor, ranks: Ranks, folder: Path | None) -> Tensor:
    """Make host memory, or a file in ``folder``, for what this rank holds of ``tensor``."""
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
    """Return ``local`` as the part of a tensor like ``tensor`` in host memory."""
    if not isinstance(tensor, DTensor):
        return local
    return like_parameter(tensor, local, host_mesh(tensor.device_mesh, ranks.meshes, ranks.group))


def fit(contents: Contents, manifest: Manifest) -> tuple[dict[str, str], list[str]]:
    """Map each tensor here that fits to its key in the checkpoint, and say what does not fit, one sentence each."""
    sources, problems = dict[str, str](), list[str]()
    ours, theirs = contents.facts(), manifest.tensors
    unused = {key.removeprefix("model/"): None for key in theirs if key.startswith("model/")}
    slots_of = defaultdict[str, list[str]](list)
    for key in ours:
        owner, _, slot = key.rpartition("/")
        slots_of[owner].append(slot)
    for name, names in contents.names.items():
        # Weights that were tied, under any of their names, still are where a checkpoint of them is.
        names = names + [manifest.aliases[n] for n in names if n in manifest.aliases]
        stored = next((n for n in names if f"model/{n}" in theirs), None)
        if stored is None:
            what = "parameter" if name in contents.algorithms else "buffer"
            problems.append(f"{name}: the checkpoint has no such {what}")
            continue
        unused.pop(stored, None)
        wanted, saved = ours[f"model/{name}"], theirs[f"model/{stored}"]
        if wanted != saved:
            pairs = ("shape", list(saved.shape), list(wanted.shape)), ("dtype", saved.dtype, wanted.dtype)
            problems += [f"{name}: {w} is {a} in the checkpoint, {b} in the model" for w, a, b in pairs if a != b]
            continue
        sources[f"model/{name}"] = f"model/{stored}"
        trained, now = manifest.algorithms.get(stored), contents.algorithms.get(name)
        if trained != now:
            problems.append(f"{name}: was {trained or 'a buffer'} in the checkpoint, is {now or 'a buffer'} now")
            continue
        for slot in slots_of[f"optimizer/{name}"]:
            key, other_key = f"optimizer/{name}/{slot}", f"optimizer/{stored}/{slot}"
            if theirs.get(other_key) == ours[key]:
                sources[key] = other_key
            else:
                problems.append(f"{name}: its {slot} in the checkpoint is {theirs.get(other_key)}, not {ours[key]}")
    return sources, problems + [f"{name}: is not in the model" for name in unused]
