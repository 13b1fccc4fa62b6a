"""The ranks that train one model, by axis: what users give as a mesh, a group or sizes, resolved once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from compile_muon.config import MeshConfig
from compile_muon.errors import config_error
from compile_muon.passes.layout import Axis, Layout
from compile_muon.passes.torch_private import flattened
from compile_muon.runtime.board import backend_of

__all__ = ["Mesh", "resolve_mesh", "target_device"]

_NAMES = ("replicate", "shard")


@dataclass(frozen=True)
class Mesh:
    """Several ranks.

    Args:
        device_mesh: what DTensors are placed on: 1-D, or 2-D ``("replicate", "shard")``; where state is cut over both,
            ``("shard", "replicate")``, in the order of the cuts.
        shard, replicate: its axes as this rank sees them.
        everyone: all of its ranks, row-major.
        gather: how ranks gather, see ``Layout.gather``.
        state_over_all: see ``Layout.state_over_all``.
    """

    device_mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    everyone: dist.ProcessGroup
    gather: str
    state_over_all: bool = False

    @staticmethod
    def of(device_mesh: DeviceMesh, *, state_over_all: bool = False) -> Mesh:
        """Of a mesh with one dimension, all of it ``shard``, or with the two of that name."""
        if device_mesh.ndim == 1:
            group = device_mesh.get_group()
            shard = _axis("shard", device_mesh, 0)
            return Mesh(device_mesh, shard, Axis("replicate"), group, _gather(group, device_mesh.device_type))
        everyone = flattened(device_mesh)
        replicate, shard = (_axis(name, device_mesh, dim) for dim, name in enumerate(_NAMES))
        gather = _gather(everyone, device_mesh.device_type)
        if state_over_all and not shard.alone:
            return Mesh(_shard_first(device_mesh), shard, replicate, everyone, gather, True)
        return Mesh(device_mesh, shard, replicate, everyone, gather)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.everyone.size()

    @property
    def rank(self) -> int:
        """This rank's place among :attr:`everyone`."""
        return self.everyone.rank()

    def layout(self, shape: tuple[int, ...], stage: int) -> Layout:
        """Of a parameter of ``shape`` at ZeRO ``stage``."""
        both = None
        if not (self.shard.alone or self.replicate.alone):
            both = Axis("all", self.size, self.rank, self.everyone.group_name)
        return Layout(shape, stage, self.shard, self.replicate, both, self.gather, self.state_over_all)

    def placements(self, layout: Layout) -> list[Placement]:
        """Of a DTensor with that layout, one for each dimension of ``device_mesh``."""
        shard = Shard(0) if layout.sharded else Replicate()
        if self.device_mesh.ndim == 1:
            return [shard]
        return [shard, shard] if self.state_over_all else [Replicate(), shard]


def _shard_first(mesh: DeviceMesh) -> DeviceMesh:
    """The same groups with ``shard`` as the outer dimension: DTensors are cut over the first dimension first."""
    names = _NAMES[::-1]
    groups = [mesh.get_group(name) for name in names]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh.T, mesh_dim_names=names)


def _axis(name: str, mesh: DeviceMesh, dim: int) -> Axis:
    size = mesh.size(dim)
    if size == 1:
        return Axis(name)
    return Axis(name, size, mesh.get_local_rank(dim), mesh.get_group(dim).group_name)


def _gather(group: dist.ProcessGroup, device_type: str) -> str:
    # PyTorch's Gloo corrupts the heap when two functional all-gathers, or one and a reduction, end at the same time:
    # its threads write the name of the last collective without a lock, and this name is too long for the string itself.
    return "all_to_all" if backend_of(group, torch.device(device_type)) == "gloo" else "all_gather"


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
    mesh: DeviceMesh | None,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    sizes: MeshConfig | None,
    *,
    state_over_all: bool = False,
) -> Mesh | None:
    """The ranks by axis, or None for a single process.

    Args:
        mesh, process_group: at most one of the two; default: all ranks of the default process group.
        device: of the model.
        sizes: of the axes.
        state_over_all: see ``Layout.state_over_all``.
    Raises:
        ConfigError: dimensions that are not known, sizes that do not fit the ranks there are, two of the arguments, or
            several processes without a process group.
    """
    if mesh is not None and process_group is not None:
        raise config_error("process_group", process_group, "contradicts mesh", "give one of the two")
    if mesh is not None:
        return _given(mesh, sizes, state_over_all=state_over_all)
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        world_text = os.environ.get("WORLD_SIZE", "1")
        if world_text not in ("", "0", "1"):
            raise config_error(
                "WORLD_SIZE", world_text, "says several processes, but there is no process group",
                "call torch.distributed.init_process_group() first",
            )  # fmt: skip
        _fit(sizes, 1)
        return None
    if sizes is not None:
        if process_group is not None:
            raise config_error(
                "process_group", process_group, "contradicts the mesh of the config", "give one of the two"
            )
        shape = _fit(sizes, dist.get_world_size())
        if shape[0] > 1:
            found = init_device_mesh(device.type, shape, mesh_dim_names=_NAMES)
            return _given(found, None, state_over_all=state_over_all)
    if process_group is not None:
        found = DeviceMesh.from_group(process_group, device.type)
    else:
        found = init_device_mesh(device.type, (dist.get_world_size(),))
    return Mesh.of(found) if found.size() > 1 else None


def _fit(sizes: MeshConfig | None, world: int) -> tuple[int, int]:
    """The sizes of both axes.

    Raises:
        ConfigError: they do not make up the world.
    """
    if sizes is None:
        return 1, world
    given = {"replicate": sizes.replicate, "shard": sizes.shard}
    known = 1
    for size in given.values():
        known *= size if size > 0 else 1
    if -1 in given.values():
        fits, rest = world % known == 0, world // known
    else:
        fits, rest = known == world, 1
    if not fits:
        product = " x ".join(f"{name} {size}" for name, size in given.items())
        raise config_error(
            "mesh", product, f"does not make up {world} ranks", "set one of the sizes to -1, for the rest"
        )
    replicate, shard = (size if size > 0 else rest for size in given.values())
    return replicate, shard


def _given(mesh: DeviceMesh, sizes: MeshConfig | None, *, state_over_all: bool) -> Mesh | None:
    if sizes is not None:
        raise config_error("mesh", mesh, "is given, and the config has sizes of one", "give one of the two")
    if mesh.ndim == 1:
        return Mesh.of(mesh) if mesh.size() > 1 else None
    if mesh.mesh_dim_names != _NAMES:
        found = f"has the dimensions {mesh.mesh_dim_names}" if mesh.mesh_dim_names else f"has {mesh.ndim} dimensions"
        remedy = f"pass its data-parallel part, with the dimensions {_NAMES} in this order, or one of any name"
        raise config_error("mesh", mesh, found, remedy)
    if mesh.size() == 1:
        return None
    return Mesh.of(mesh["shard"] if mesh.size(0) == 1 else mesh, state_over_all=state_over_all)
