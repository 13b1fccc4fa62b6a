"""The ranks that train one model, by mesh axis, resolved from the user's mesh, process group or sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from compile_muon.agreement.heartbeat import backend_of
from compile_muon.config import Config, MeshConfig
from compile_muon.errors import ConfigError, config_error
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.sequence.place import Place
from compile_muon.passes.torch_private import another_group, flattened, group_named, unflattened

_NAMES = ("replicate", "shard", "sequence", "expert", "tensor")
_DIVIDE = "give a size that divides the ranks along shard"
#: variables with the number of processes under torchrun, SLURM, Open MPI and other MPIs
_WORLD_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class Role:
    """The part of a parameter that a rank's model has."""

    expert: bool = False  # this rank's experts of a stack, cut along `expert`; else ranks along it have copies
    tensor_dim: int | None = None  # cut along this dim over `tensor`; None if ranks along it have copies
    # Mesh, placements and whole shape of the DTensor that the model had and still reads; None for a plain tensor.
    placed: tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...]] | None = None


class DataPlace(NamedTuple):
    """Part ``rank`` of ``world`` equal parts of the data."""

    rank: int
    world: int


#: the role of a parameter that is whole in every rank's model
DENSE = Role()


@dataclass(frozen=True)
class Mesh:
    """The ranks of one model, by axis.

    Ranks along ``expert`` share everything but experts, so for all other parameters they are part of ``shard``; ranks
    along ``sequence`` have the same batch, and are part of ``shard`` for all parameters.
    """

    world_mesh: DeviceMesh  # all ranks; each dimension has two or more
    names: tuple[str, ...]  # of its dimensions: some of `_NAMES`, in this order
    state_over_all: bool = False  # see ``Layout.state_over_all``
    communicators: str = "shared"  # "shared", "separate" or "auto", see :class:`~compile_muon.config.ZeroConfig`
    backend: str | None = None  # of the ranks that a plan is for, which do not exist; None for that of :attr:`everyone`
    _axes: dict[tuple[str, ...], Axis] = field(default_factory=dict, repr=False, compare=False)
    _placed: dict[bool, DeviceMesh] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(device_mesh: DeviceMesh, *, state_over_all: bool = False, communicators: str = "shared") -> Mesh | None:
        """Wrap a mesh with one dimension, all of it ``shard``, or with dimensions of `_NAMES`; None for one rank."""
        names = device_mesh.mesh_dim_names
        if device_mesh.ndim == 1 and (names is None or names[0] not in _NAMES):
            return Mesh(device_mesh, ("shard",), communicators=communicators) if device_mesh.size() > 1 else None
        if names is None or list(names) != [name for name in _NAMES if name in names]:
            found = f"has the dimensions {names}" if names else f"has {device_mesh.ndim} dimensions"
            remedy = f"name them as here and give them in this order, as far as there are any: {_NAMES}"
            raise config_error("mesh", device_mesh, found, remedy)
        if not bool((device_mesh.mesh.flatten().diff() > 0).all()):
            problem = "counts its ranks otherwise than row by row"
            raise config_error("mesh", device_mesh, problem, "make it by init_device_mesh")
        wide = tuple(name for dim, name in enumerate(names) if device_mesh.size(dim) > 1)
        if not wide:
            return None
        return Mesh(device_mesh if wide == names else device_mesh[wide], wide, state_over_all, communicators)

    @cached_property
    def everyone(self) -> dist.ProcessGroup:
        """The process group of all ranks, row by row."""
        return self.world_mesh.get_group() if self.world_mesh.ndim == 1 else flattened(self.world_mesh)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.everyone.size()

    @property
    def rank(self) -> int:
        """This rank's place in :attr:`everyone`."""
        return self.everyone.rank()

    @property
    def data_place(self) -> DataPlace:
        """The data of this rank; ranks along ``sequence`` and ``tensor`` have the same."""
        return self.data_places[self.rank]

    @cached_property
    def data_places(self) -> list[DataPlace]:
        """:attr:`data_place` of every rank."""
        return data_places({name: self.world_mesh.size(dim) for dim, name in enumerate(self.names)})

    @property
    def device_type(self) -> str:
        """Device type of the tensors in collectives."""
        return self.world_mesh.device_type

    @cached_property
    def pairwise(self) -> bool:
        """Whether gathers and reduce-scatters are built from all-to-alls, see ``Layout.pairwise``."""
        # PyTorch's Gloo corrupts the heap when two functional all-gathers, or one and a reduction, end at the same
        # time: its threads write the name of the last collective without a lock, and the name is too long for
        # std::string's inline buffer. And its reduce-scatter is an all-reduce, of which each rank keeps its part.
        return (self.backend or backend_of(self.everyone, torch.device(self.device_type))) == "gloo"

    def axis(self, *names: str, called: str = "") -> Axis:
        """Return several dimensions as one axis, row by row, named ``called`` or after them."""
        wide = tuple(name for name in names if name in self.names)
        if not wide:
            return Axis(names[0])
        if wide not in self._axes:
            group = (
                flattened(self.world_mesh[wide])
                if len(wide) > 1
                else self.world_mesh.get_group(self.names.index(wide[0]))
            )
            name = called or "_".join(wide)
            groups = self._communicator(group, "reduce"), self._communicator(group, "exchange")
            self._axes[wide] = Axis(name, group.size(), group.rank(), group.group_name, *groups)
        return self._axes[wide]

    def _communicator(self, group: dist.ProcessGroup, purpose: str) -> str:
        """Return the name of a second group of the ranks of ``group`` for one purpose; "" where ``group`` serves it."""
        device = torch.device(self.device_type)
        # Gloo serves a group with several threads, NCCL in order: a reduction would wait behind an exchange.
        separate = self.communicators == "separate" or (
            self.communicators == "auto" and (self.backend or backend_of(group, device)) == "nccl"
        )
        return another_group(group, f"muon_zero {purpose}", device).group_name if separate else ""

    @cached_property
    def sequence(self) -> Place:
        """This rank's place among the ranks of a sequence, with the name of the group for their exchanges."""
        group = self.world_mesh.get_group(self.names.index("sequence"))
        return Place(group.size(), group.rank(), self._communicator(group, "sequence") or group.group_name)

    @property
    def sequence_place(self) -> DataPlace:
        """The part of each sequence that this rank has."""
        return DataPlace(self.sequence.index, self.sequence.size) if "sequence" in self.names else DataPlace(0, 1)

    @property
    def process_groups(self) -> int:
        """Number of process groups that the axes use."""
        return len({name for axis in self._axes.values() for name in axis.groups})

    def _over(self, names: Sequence[str], alone: str) -> Axis:
        return self.axis(*names) if names else Axis(alone)

    @staticmethod
    def _inner(role: Role) -> tuple[str, ...]:
        """Return the mesh dimensions that make up ``shard`` for a parameter of this role."""
        return ("shard", "sequence") if role.expert else ("shard", "sequence", "expert")

    def layout(self, shape: tuple[int, ...], stage: int, role: Role = DENSE) -> Layout:
        """Return the layout of a parameter of whole shape ``shape`` at ZeRO ``stage``."""
        inner = self._inner(role)
        shard, replicate, tensor = self.axis(*inner), self.axis("replicate"), self.axis("tensor")
        expert = self.axis("expert") if role.expert else Axis("expert")
        both = None if shard.alone or replicate.alone else self.axis("replicate", *inner, called="all")
        averaged = replicate.size * self.axis(*self._inner(DENSE)).size
        layout = Layout(
            shape, stage, shard, replicate, both, self.pairwise, self.state_over_all, expert, tensor, role.tensor_dim,
            averaged=None if expert.alone else averaged,
        )  # fmt: skip
        if tensor.alone:
            return layout
        owner_dims = {*(inner if layout.sharded else ())}
        owner_dims |= {"replicate"} if layout.cut_twice else set()
        owner_dims |= {"tensor"} if layout.tensor_parallel else set()
        dims = [name for name in ("replicate", *inner, "tensor") if name in self.names]
        return replace(
            layout,
            owner_group_over=self._over([name for name in dims if name in owner_dims], "shard"),
            replica_group_over=self._over([name for name in dims if name not in owner_dims], "replicate"),
        )

    # ------------------------------------------------------------------------------------------ DTensors

    def _order(self, role: Role) -> list[tuple[str, ...]]:
        """Return the mesh dimensions that DTensors are placed on, in the order in which they cut."""
        inner = self._inner(role)
        data = [inner, ("replicate",)] if self.state_over_all else [("replicate",), inner]
        model = [("expert",), ("tensor",)] if role.expert else [("tensor",)]
        orders = [tuple(name for name in names if name in self.names) for names in (*model, *data)]
        return [names for names in orders if names]

    def device_mesh(self, role: Role = DENSE) -> DeviceMesh:
        """Return the mesh of parameters of a role: all ranks, with dimensions in the order of the cuts."""
        if role.expert not in self._placed:
            order = self._order(role)
            if order == [(name,) for name in self.names]:
                self._placed[role.expert] = self.world_mesh
            else:
                groups = [group_named(self.axis(*names).group) for names in order]
                dims = [self.names.index(name) for names in order for name in names]
                ranks = self.world_mesh.mesh.permute(dims).reshape([group.size() for group in groups])
                names = tuple("_".join(names) for names in order)
                self._placed[role.expert] = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=names)
        return self._placed[role.expert]

    def placements(self, layout: Layout, role: Role = DENSE) -> list[Placement]:
        """Return the placements of a DTensor of that layout on :meth:`device_mesh`."""
        cuts: dict[tuple[str, ...], int | None] = {("tensor",): role.tensor_dim}
        cuts["replicate",] = 0 if layout.cut_twice else None
        if role.expert:
            cuts["expert",] = 0
        dims = [cuts.get(names, 0 if layout.sharded else None) for names in self._order(role)]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def gradient_placements(self, role: Role = DENSE) -> list[Placement]:
        """Return the placements of a gradient that each rank computed of a whole parameter. Ranks along ``tensor`` have
        the same batch, so their gradients are equal, not partial."""
        return [Replicate() if names == ("tensor",) else Partial() for names in self._order(role)]


def target_device(mesh: DeviceMesh | Mesh | None, process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device that a meta model gets memory on: where its ranks meet, or torch's default device."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
    if mesh is not None:
        kind = mesh.device_type
    elif dist.is_available() and dist.is_initialized():
        group: Any = process_group or dist.group.WORLD
        # Gloo supports GPU tensors, but a user who trains on GPUs chooses NCCL.
        kind = kind if backend_of(group, torch.device(kind)) != "gloo" else "cpu"
    else:
        kind = torch.get_default_device().type
    if kind in ("cpu", "meta"):
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def resolve_mesh(
    mesh: DeviceMesh | Mesh | None, process_group: dist.ProcessGroup | None, device: torch.device, config: Config
) -> Mesh | None:
    """Return the ranks by axis, or None for a single process.

    At most one of ``mesh`` and ``process_group`` is given; default: all ranks of the default process group. A
    :class:`Mesh` also sets the backend to plan for. ``device``: of the model. Ranks along ``expert`` and ``sequence``
    are taken from ``shard``, where ``mesh`` has no such dimension. Several processes without a process group raise
    ConfigError.
    """
    backend, mesh = (mesh.backend, mesh.world_mesh) if isinstance(mesh, Mesh) else (None, mesh)
    sizes, zero = config.mesh, config.zero
    experts, sequence = config.expert_parallel.size, config.sequence_parallel.size
    if mesh is not None and process_group is not None:
        raise config_error("process_group", process_group, "contradicts mesh", "give one of the two")
    if mesh is not None and sizes is not None:
        raise config_error("mesh", mesh, "is given, and the config has sizes of one", "give one of the two")
    if mesh is None and process_group is None and not (dist.is_available() and dist.is_initialized()):
        interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # a shell without srun
        for name in _WORLD_SIZES:
            count = os.environ.get(name, "")
            if count not in ("", "0", "1") and not (interactive and name.startswith("SLURM")):
                raise config_error(
                    name, count, "says several processes, but there is no process group",
                    "call torch.distributed.init_process_group() first, or unset it where one process trains alone",
                )  # fmt: skip
        _fit(sizes, 1)
        _carve(None, "expert", experts)
        _carve(None, "sequence", sequence)
        return None
    if sizes is not None and process_group is not None:
        raise config_error("process_group", process_group, "contradicts the mesh of the config", "give one of the two")
    if process_group is not None:
        mesh = DeviceMesh.from_group(process_group, device.type, mesh_dim_names=("shard",))
    elif mesh is None:
        shape = _fit(sizes, dist.get_world_size())
        wide = {name: size for name, size in shape.items() if size > 1} or {"shard": 1}
        mesh = init_device_mesh(device.type, tuple(wide.values()), mesh_dim_names=tuple(wide))
    carved = _carve(_carve(mesh, "expert", experts), "sequence", sequence)
    state_over_all = zero.shard_state_over == "all" and zero.stage > 0
    resolved = Mesh.of(carved, state_over_all=state_over_all, communicators=zero.communicators)
    return None if resolved is None else replace(resolved, backend=backend)


def _fit(sizes: MeshConfig | None, world: int) -> dict[str, int]:
    """Return the size of each axis, which together make up ``world`` ranks."""
    if sizes is None:
        return {"shard": world}
    requested = {"replicate": sizes.replicate, "shard": sizes.shard, "tensor": sizes.tensor}
    fixed = math.prod(size for size in requested.values() if size > 0)
    if -1 in requested.values():
        fits, remaining = world % fixed == 0, world // fixed
    else:
        fits, remaining = fixed == world, 1
    if not fits:
        product = " x ".join(f"{name} {size}" for name, size in requested.items() if name != "tensor" or size != 1)
        raise config_error(
            "mesh", product, f"does not make up {world} ranks", "set one of the sizes to -1, for the rest"
        )
    return {name: size if size > 0 else remaining for name, size in requested.items()}


def axis_sizes(config: Config, world: int) -> dict[str, int]:
    """Return the ranks of each axis on ``world`` ranks, by its name, without axes of one rank."""
    sizes = _fit(config.mesh, world)
    for axis, size in (("expert", config.expert_parallel.size), ("sequence", config.sequence_parallel.size)):
        if sizes["shard"] % size:
            raise _indivisible(axis, size, sizes["shard"])
        sizes |= {axis: size, "shard": sizes["shard"] // size}
    return {name: sizes[name] for name in _NAMES if sizes.get(name, 1) > 1}


def data_places(sizes: Mapping[str, int]) -> list[DataPlace]:
    """Return the data of each rank, row by row; ``sizes``: ranks by axis, see :func:`axis_sizes`."""
    own = [1 if name in ("sequence", "tensor") else size for name, size in sizes.items()]
    world = math.prod(own)
    ranks = torch.arange(world, device="cpu").view(own).expand(tuple(sizes.values()))
    return [DataPlace(rank, world) for rank in ranks.flatten().tolist()]


def _indivisible(axis: str, size: int, ranks: int) -> ConfigError:
    problem = f"does not divide the {ranks} rank{'s' if ranks > 1 else ''} along shard"
    return config_error(f"{axis}_parallel.size", size, problem, _DIVIDE)


def _carve(mesh: DeviceMesh | None, axis: str, size: int) -> Any:
    """Return ``mesh`` with a dimension ``axis`` of that size, as the inner part of its ``shard``."""
    if size == 1:
        return mesh
    field = f"{axis}_parallel.size"
    if mesh is None:
        raise config_error(field, size, "is more than the one rank there is", _DIVIDE)
    names = mesh.mesh_dim_names or ()
    if axis in names:
        existing = mesh.size(names.index(axis))
        if existing != size:
            problem = f"is not the size of the mesh along {axis}, {existing}"
            raise config_error(field, size, problem, "give the same, or leave one of them out")
        return mesh
    dim = 0 if mesh.ndim == 1 and not set(names) & set(_NAMES) else names.index("shard") if "shard" in names else None
    ranks = 1 if dim is None else mesh.size(dim)
    if dim is None or ranks % size:
        raise _indivisible(axis, size, ranks)
    return unflattened(mesh, dim, (ranks // size, size), ("shard", axis))
