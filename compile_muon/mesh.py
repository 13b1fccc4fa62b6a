"""The ranks that train one model, by axis: what users give as a mesh, a group or sizes, resolved once."""

from __future__ import annotations

import itertools
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

__all__ = ["DENSE", "DataPlace", "Mesh", "Role", "axis_sizes", "data_places", "resolve_mesh", "target_device"]

_NAMES = ("replicate", "shard", "sequence", "expert", "tensor")
_DIVIDE = "give a size that divides the ranks along shard"
#: by which torchrun, SLURM, Open MPI and other MPIs tell a process how many there are
_WORLD_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class Role:
    """What a rank's model has of a parameter.

    Args:
        expert: the experts of its place along ``expert``, of a stack of them; else all ranks along it have the same.
        tensor_dim: the part of its place along ``tensor``, cut along this dim; None if all along it have the same.
        placed: mesh, placements and whole shape of the DTensor that the model had and goes on to read; None where it
            reads a plain tensor.
    """

    expert: bool = False
    tensor_dim: int | None = None
    placed: tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...]] | None = None


class DataPlace(NamedTuple):
    """Part ``rank`` of ``world`` equal parts of the data."""

    rank: int
    world: int


#: of a parameter that is whole in every rank's model
DENSE = Role()


@dataclass(frozen=True)
class Mesh:
    """Several ranks.

    Ranks along ``expert`` share everything but experts, so for all other parameters they are part of ``shard``; ranks
    along ``sequence`` have the same batch, and are part of ``shard`` for all.

    Args:
        given: all of them, each dimension of two or more ranks.
        names: of its dimensions, some of ``("replicate", "shard", "sequence", "expert", "tensor")`` in this order.
        state_over_all: see ``Layout.state_over_all``.
        communicators: "shared", "separate" or "auto", see :class:`~compile_muon.config.ZeroConfig`.
        backend: of the ranks that a plan is for, where these are not there; None for that of :attr:`everyone`.
    """

    given: DeviceMesh
    names: tuple[str, ...]
    state_over_all: bool = False
    communicators: str = "shared"
    backend: str | None = None
    _axes: dict[tuple[str, ...], Axis] = field(default_factory=dict, repr=False, compare=False)
    _placed: dict[bool, DeviceMesh] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(device_mesh: DeviceMesh, *, state_over_all: bool = False, communicators: str = "shared") -> Mesh | None:
        """Of a mesh with one dimension, all of it ``shard``, or with dimensions of those names; None for one rank.

        Raises:
            ConfigError: it has others, or in another order.
        """
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
        """All ranks, row by row."""
        return self.given.get_group() if self.given.ndim == 1 else flattened(self.given)

    @property
    def parted(self) -> bool:
        """Whether ranks may have different parts of a model."""
        return "expert" in self.names or "tensor" in self.names

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.everyone.size()

    @property
    def rank(self) -> int:
        """This rank's place among :attr:`everyone`."""
        return self.everyone.rank()

    @property
    def data_place(self) -> DataPlace:
        """Which data this rank has; those along ``sequence`` and ``tensor`` have the same."""
        return self.data_places[self.rank]

    @cached_property
    def data_places(self) -> list[DataPlace]:
        """The same of every rank."""
        return data_places({name: self.given.size(dim) for dim, name in enumerate(self.names)})

    @property
    def device_type(self) -> str:
        """Of the tensors that are exchanged."""
        return self.given.device_type

    @cached_property
    def pairwise(self) -> bool:
        """See ``Layout.pairwise``."""
        # PyTorch's Gloo corrupts the heap when two functional all-gathers, or one and a reduction, end at the same
        # time: its threads write the name of the last collective without a lock, and this name is too long for the
        # string itself. And its reduce-scatter is an all-reduce, of which each rank keeps its part.
        return (self.backend or backend_of(self.everyone, torch.device(self.device_type))) == "gloo"

    def axis(self, *names: str, called: str = "") -> Axis:
        """Several dimensions as one, row by row.

        Args:
            called: its name; default: theirs.
        """
        wide = tuple(name for name in names if name in self.names)
        if not wide:
            return Axis(names[0])
        if wide not in self._axes:
            group = flattened(self.given[wide]) if len(wide) > 1 else self.given.get_group(self.names.index(wide[0]))
            name = called or "_".join(wide)
            own = self._communicator(group, "reduce"), self._communicator(group, "exchange")
            self._axes[wide] = Axis(name, group.size(), group.rank(), group.group_name, *own)
        return self._axes[wide]

    def _communicator(self, group: dist.ProcessGroup, purpose: str) -> str:
        """The name of a group for one purpose of what ``group`` is for otherwise; "" for the same."""
        device = torch.device(self.device_type)
        # Gloo serves a group with several threads, NCCL in order: a reduction would wait behind an exchange.
        separate = self.communicators == "separate" or (
            self.communicators == "auto" and (self.backend or backend_of(group, device)) == "nccl"
        )
        return another_group(group, f"muon_zero {purpose}", device).group_name if separate else ""

    @cached_property
    def sequence(self) -> Place:
        """This rank's place among those that share a sequence, whose exchanges wait for no other collective."""
        group = self.given.get_group(self.names.index("sequence"))
        return Place(group.size(), group.rank(), self._communicator(group, "sequence") or group.group_name)

    @property
    def sequence_place(self) -> DataPlace:
        """Which part of each sequence this rank has."""
        return DataPlace(self.sequence.index, self.sequence.size) if "sequence" in self.names else DataPlace(0, 1)

    @property
    def process_groups(self) -> int:
        """How many its axes use."""
        return len({name for axis in self._axes.values() for name in axis.groups})

    def _over(self, names: Sequence[str], alone: str) -> Axis:
        return self.axis(*names) if names else Axis(alone)

    @staticmethod
    def _inner(role: Role) -> tuple[str, ...]:
        """The dimensions that ``shard`` is, for such a parameter."""
        return ("shard", "sequence") if role.expert else ("shard", "sequence", "expert")

    def layout(self, shape: tuple[int, ...], stage: int, role: Role = DENSE) -> Layout:
        """Of a parameter of ``shape`` at ZeRO ``stage``.

        Args:
            shape: of the whole of it.
        """
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
        owning = {*(inner if layout.sharded else ())}
        owning |= {"replicate"} if layout.cut_twice else set()
        owning |= {"tensor"} if layout.joined else set()
        over = [name for name in ("replicate", *inner, "tensor") if name in self.names]
        return replace(
            layout,
            owner_group_over=self._over([name for name in over if name in owning], "shard"),
            replica_group_over=self._over([name for name in over if name not in owning], "replicate"),
        )

    # ------------------------------------------------------------------------------------------ DTensors

    def _order(self, role: Role) -> list[tuple[str, ...]]:
        """The dimensions DTensors are placed on, those that cut first ahead."""
        inner = self._inner(role)
        data = [inner, ("replicate",)] if self.state_over_all else [("replicate",), inner]
        model = [("expert",), ("tensor",)] if role.expert else [("tensor",)]
        found = [tuple(name for name in names if name in self.names) for names in (*model, *data)]
        return [names for names in found if names]

    def device_mesh(self, role: Role = DENSE) -> DeviceMesh:
        """What parameters of a role are placed on: all ranks, with the dimensions in the order of the cuts."""
        if role.expert not in self._placed:
            order = self._order(role)
            if order == [(name,) for name in self.names]:
                self._placed[role.expert] = self.given
            else:
                groups = [group_named(self.axis(*names).group) for names in order]
                dims = [self.names.index(name) for names in order for name in names]
                ranks = self.given.mesh.permute(dims).reshape([group.size() for group in groups])
                names = tuple("_".join(names) for names in order)
                self._placed[role.expert] = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=names)
        return self._placed[role.expert]

    def placements(self, layout: Layout, role: Role = DENSE) -> list[Placement]:
        """Of a DTensor with that layout, one for each dimension of :meth:`device_mesh`."""
        cuts: dict[tuple[str, ...], int | None] = {("tensor",): role.tensor_dim}
        cuts["replicate",] = 0 if layout.cut_twice else None
        if role.expert:
            cuts["expert",] = 0
        dims = [cuts.get(names, 0 if layout.sharded else None) for names in self._order(role)]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def gradient_placements(self, role: Role = DENSE) -> list[Placement]:
        """Of gradients that ranks have of a whole parameter: ranks of one batch have the same."""
        return [Replicate() if names == ("tensor",) else Partial() for names in self._order(role)]


def target_device(mesh: DeviceMesh | Mesh | None, process_group: dist.ProcessGroup | None) -> torch.device:
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
    mesh: DeviceMesh | Mesh | None, process_group: dist.ProcessGroup | None, device: torch.device, config: Config
) -> Mesh | None:
    """The ranks by axis, or None for a single process.

    Args:
        mesh, process_group: at most one of the two; default: all ranks of the default process group. A :class:`Mesh`
            says beside its dimensions what backend to plan for.
        device: of the model.
        config: sizes of the axes. Ranks along ``expert`` and ``sequence`` are taken from ``shard``, where ``mesh`` has
            no such dimension.
    Raises:
        ConfigError: dimensions that are not known, sizes that do not fit the ranks there are, two of the arguments, or
            several processes without a process group.
    """
    backend, mesh = (mesh.backend, mesh.given) if isinstance(mesh, Mesh) else (None, mesh)
    sizes, zero = config.mesh, config.zero
    experts, sequence = config.expert_parallel.size, config.sequence_parallel.size
    if mesh is not None and process_group is not None:
        raise config_error("process_group", process_group, "contradicts mesh", "give one of the two")
    if mesh is not None and sizes is not None:
        raise config_error("mesh", mesh, "is given, and the config has sizes of one", "give one of the two")
    if mesh is None and process_group is None and not (dist.is_available() and dist.is_initialized()):
        interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # where nobody called srun
        for name in _WORLD_SIZES:
            said = os.environ.get(name, "")
            if said not in ("", "0", "1") and not (interactive and name.startswith("SLURM")):
                raise config_error(
                    name, said, "says several processes, but there is no process group",
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
        several = {name: size for name, size in shape.items() if size > 1} or {"shard": 1}
        mesh = init_device_mesh(device.type, tuple(several.values()), mesh_dim_names=tuple(several))
    carved = _carve(_carve(mesh, "expert", experts), "sequence", sequence)
    state_over_all = zero.shard_state_over == "all" and zero.stage > 0
    found = Mesh.of(carved, state_over_all=state_over_all, communicators=zero.communicators)
    return None if found is None else replace(found, backend=backend)


def _fit(sizes: MeshConfig | None, world: int) -> dict[str, int]:
    """The size of each axis.

    Raises:
        ConfigError: they do not make up the world.
    """
    if sizes is None:
        return {"shard": world}
    given = {"replicate": sizes.replicate, "shard": sizes.shard, "tensor": sizes.tensor}
    known = math.prod(size for size in given.values() if size > 0)
    if -1 in given.values():
        fits, rest = world % known == 0, world // known
    else:
        fits, rest = known == world, 1
    if not fits:
        product = " x ".join(f"{name} {size}" for name, size in given.items() if name != "tensor" or size != 1)
        raise config_error(
            "mesh", product, f"does not make up {world} ranks", "set one of the sizes to -1, for the rest"
        )
    return {name: size if size > 0 else rest for name, size in given.items()}


def axis_sizes(config: Config, world: int) -> dict[str, int]:
    """How many ranks each axis has on ``world`` ranks, by its name; those of one rank are left out.

    Raises:
        ConfigError: the sizes do not fit.
    """
    sizes = _fit(config.mesh, world)
    for axis, size in (("expert", config.expert_parallel.size), ("sequence", config.sequence_parallel.size)):
        if sizes["shard"] % size:
            raise _indivisible(axis, size, sizes["shard"])
        sizes |= {axis: size, "shard": sizes["shard"] // size}
    return {name: sizes[name] for name in _NAMES if sizes.get(name, 1) > 1}


def data_places(sizes: Mapping[str, int]) -> list[DataPlace]:
    """Which data each rank has, row by row.

    Args:
        sizes: ranks by axis, see :func:`axis_sizes`.
    """
    own = {name: size for name, size in sizes.items() if name not in ("sequence", "tensor")}
    world, places = math.prod(own.values()), []
    for index in itertools.product(*map(range, sizes.values())):
        rank = 0
        for name, place in zip(sizes, index, strict=True):
            rank = rank * own[name] + place if name in own else rank
        places.append(DataPlace(rank, world))
    return places


def _indivisible(axis: str, size: int, ranks: int) -> ConfigError:
    problem = f"does not divide the {ranks} rank{'s' if ranks > 1 else ''} along shard"
    return config_error(f"{axis}_parallel.size", size, problem, _DIVIDE)


def _carve(mesh: DeviceMesh | None, axis: str, size: int) -> Any:
    """``mesh`` with a dimension ``axis`` of that size, the inner part of what was ``shard``.

    Raises:
        ConfigError: it does not divide, or ``mesh`` has one of another size.
    """
    if size == 1:
        return mesh
    field = f"{axis}_parallel.size"
    if mesh is None:
        raise config_error(field, size, "is more than the one rank there is", _DIVIDE)
    names = mesh.mesh_dim_names or ()
    if axis in names:
        there = mesh.size(names.index(axis))
        if there != size:
            problem = f"is not the size of the mesh along {axis}, {there}"
            raise config_error(field, size, problem, "give the same, or leave one of them out")
        return mesh
    dim = 0 if mesh.ndim == 1 and not set(names) & set(_NAMES) else names.index("shard") if "shard" in names else None
    ranks = 1 if dim is None else mesh.size(dim)
    if dim is None or ranks % size:
        raise _indivisible(axis, size, ranks)
    return unflattened(mesh, dim, (ranks // size, size), ("shard", axis))
