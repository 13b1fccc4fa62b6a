"""Where the parts of a parameter are: the data-parallel mesh, and the static facts a marker carries."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from compile_muon.config import Config
from compile_muon.errors import ConfigError, config_error
from compile_muon.kernels import check_backend, resolve_coefficients, resolve_dtype, resolve_method
from compile_muon.model.assignment import Assignment
from compile_muon.passes.costs import choose_exchange
from compile_muon.passes.spec import MuonSpec, ParamSpec, encode_dtype
from compile_muon.runtime.board import backend_of

__all__ = ["describe", "resolve_mesh", "target_device"]


def target_device(mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None) -> torch.device:
    """Where a model on the meta device is to get its memory: where its ranks meet, or torch's default device."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if found is None else found.type
    if mesh is not None:
        kind = mesh.device_type
    elif dist.is_available() and dist.is_initialized():
        group: Any = process_group or dist.group.WORLD
        # Gloo works on GPUs too, but who chose it for them did not mean to train there.
        kind = kind if backend_of(group, torch.device(kind)) != "gloo" else "cpu"
    else:
        kind = torch.get_default_device().type
    if kind in ("cpu", "meta"):
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def resolve_mesh(
    mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None, device: torch.device
) -> DeviceMesh | None:
    """The 1-D data-parallel mesh, or None for a single process.

    Raises:
        ConfigError: a mesh that is not 1-D, both arguments, or several processes without a process group.
    """
    if mesh is not None and process_group is not None:
        raise config_error("process_group", process_group, "contradicts mesh", "give one of the two")
    if mesh is not None:
        if mesh.ndim != 1:
            remedy = "pass its data-parallel dimension, mesh['dp']"
            raise config_error("mesh", mesh, f"has {mesh.ndim} dimensions", remedy)
        return mesh if mesh.size() > 1 else None
    if process_group is not None:
        found = DeviceMesh.from_group(process_group, device.type)
        return found if found.size() > 1 else None
    if dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
        return init_device_mesh(device.type, (world,)) if world > 1 else None
    world_text = os.environ.get("WORLD_SIZE", "1")
    if world_text not in ("", "0", "1"):
        raise config_error(
            "WORLD_SIZE", world_text, "says several processes, but there is no process group",
            "call torch.distributed.init_process_group() first",
        )  # fmt: skip
    return None


def _muon_spec(assignment: Assignment, config: Config, device: torch.device, world: int, stage: int) -> MuonSpec | None:
    if assignment.algorithm != "muon" or assignment.matrix is None:
        return None
    batch, rows, cols = assignment.matrix
    ns = config.muon.ns
    try:
        chosen = resolve_coefficients(ns.coefficients, ns.steps)
        dtype = resolve_dtype(ns.dtype, device, chosen, ns.method)
        method = resolve_method(ns.method, rows, cols, dtype, chosen)
        check_backend(ns.backend, dtype, device)
    except ValueError as error:
        # The kernels name their arguments as we do, less the prefix.
        raise ConfigError(re.sub(r"\b(backend|coefficients|dtype|method|steps)(?==)", r"ns_\1", str(error))) from error
    if world == 1 or (batch > 1 and stage > 0):
        exchange = "local"  # whole matrices already: one process, or experts sharded by expert
    elif config.zero.exchange == "auto":
        exchange = choose_exchange(rows, cols, world=world, steps=len(chosen.steps), itemsize=dtype.itemsize)
    else:
        exchange = config.zero.exchange
    return MuonSpec(
        batch=batch,
        rows=rows,
        cols=cols,
        nesterov=config.muon.nesterov,
        method=method,
        coefficients=tuple(value for triple in chosen.steps for value in triple),
        safety=chosen.safety,
        restarts=chosen.gram_restarts(dtype),
        dtype=encode_dtype(dtype),
        eps=ns.eps,
        exchange=exchange,
        backend=ns.backend,
        memory_limit=ns.memory_limit,
    )


def _gather(mesh: DeviceMesh) -> str:
    # PyTorch's Gloo corrupts the heap when two functional all-gathers, or one and a reduction, end at the same time:
    # its threads write the name of the last collective without a lock, and this name is too long for the string itself.
    return "all_to_all" if backend_of(mesh.get_group(), mesh.device_type) == "gloo" else "all_gather"


def describe(
    param: Tensor, assignment: Assignment, config: Config, mesh: DeviceMesh | None, device: torch.device
) -> ParamSpec:
    """Static facts of one parameter, which is or will be on ``device``, under this configuration."""
    world = 1 if mesh is None else mesh.size()
    stage = config.zero.stage
    compute = config.zero.param_dtype if config.zero.param_dtype and param.is_floating_point() else param.dtype
    return ParamSpec(
        shape=tuple(param.shape),
        world=world,
        rank=0 if mesh is None else mesh.get_local_rank(),
        group="" if mesh is None else mesh.get_group().group_name,
        stage=stage,
        dtype=encode_dtype(param.dtype),
        compute_dtype=encode_dtype(compute),
        reduce_dtype=encode_dtype(config.zero.reduce_dtype or compute),
        muon=_muon_spec(assignment, config, device, world, stage),
        gather="all_gather" if mesh is None else _gather(mesh),
    )
