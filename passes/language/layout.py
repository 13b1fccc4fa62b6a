"""Layout: which mesh axes shard a parameter, and which replicate it.

A layout knows neither dtypes nor the update (:class:`~compile_muon.passes.language.spec.MuonSpec`). All code that sends
or places rows reads it; on any mesh it has all axes, a missing one with a single rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .work import Category


@dataclass(frozen=True)
class Axis:
    """One dimension of the device mesh, seen from this rank."""

    name: str  # in errors, metrics and user settings
    size: int = 1  # ranks along it
    index: int = 0  # this rank's coordinate
    group: str = ""  # process group, by its name in functional collectives; "" where ``size`` is 1
    # Groups with NCCL communicators of their own for gradients and for Newton-Schulz, so that neither queues behind a
    # gather; "" for ``group``.
    reduce_group: str = ""
    exchange_group: str = ""

    @property
    def alone(self) -> bool:
        """Whether the axis has one rank."""
        return self.size == 1

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of its process groups, without duplicates."""
        return tuple({name: None for name in (self.group, self.reduce_group, self.exchange_group) if name})

    def serving(self, category: Category) -> Axis:
        """Return the same axis with one process group, that for collectives of ``category``."""
        dedicated_group = {Category.REDUCE: self.reduce_group, Category.EXCHANGE: self.exchange_group}.get(category)
        return Axis(self.name, self.size, self.index, dedicated_group or self.group)


def _part(total: int, parts: int, index: int) -> tuple[int, int]:
    """``(start, stop)`` of chunk ``index`` of ``parts``, as ``torch.chunk`` and ``Shard`` cut; empty past the end."""
    chunk = -(-total // parts)
    start = min(index * chunk, total)
    return start, min(start + chunk, total)


@dataclass(frozen=True)
class Layout:
    """The placement of one parameter, its gradient and its optimizer state.

    Ranks along the data-parallel axes, ``shard`` and ``replicate``, run the same model on other data. Ranks along the
    model-parallel axes, ``expert`` and ``tensor``, hold different *parts* of the model; :attr:`shape` is this rank's
    part of the parameter, which the data-parallel axes then shard. Ranks of the whole mesh are numbered in row-major
    order of (replicate, shard, expert, tensor).

    A *slice* is the rows that one place along ``shard`` contributes to an unshard. A *piece* is the rows of master
    weight, gradient and optimizer state that one rank holds: its slice, or with ``state_over_all`` the chunk of that
    slice at its place along ``replicate`` ("cut twice").
    """

    unsharded_shape: tuple[int, ...]  # shape of the whole parameter
    stage: int  # ZeRO stage, 0 to 3
    # Rows (dim 0) are sharded over ``shard``. Ranks along ``replicate`` hold the same rows; gradients are averaged over
    # both (HSDP).
    shard: Axis = field(default_factory=lambda: Axis("shard"))
    replicate: Axis = field(default_factory=lambda: Axis("replicate"))
    # The ranks of both axes as one, number ``r * shard.size + s``; None where one of them has a single rank, since the
    # other is then the whole data-parallel mesh.
    both: Axis | None = None
    # Gathers and reduce-scatters are built from all-to-alls, for backends whose own are unsafe or send more bytes
    # (Gloo, docs/why/decisions.md).
    pairwise: bool = False
    # Master weights, gradients and optimizer state are sharded over ``replicate`` as well (HFSDP).
    state_over_all: bool = False
    # Dim 0 is cut over this axis into stacks of whole matrices.
    expert: Axis = field(default_factory=lambda: Axis("expert"))
    # Matrices are cut along ``tensor_dim`` over this axis (tensor parallelism); with None each rank has a copy.
    tensor: Axis = field(default_factory=lambda: Axis("tensor"))
    tensor_dim: int | None = None
    # Values of :attr:`owner_group` and :attr:`replica_group` where ``tensor`` has several ranks.
    owner_group_over: Axis | None = None
    replica_group_over: Axis | None = None
    # Ranks whose losses the gradient averages; None for all of :attr:`everyone`. Experts receive tokens of more ranks
    # than they are replicated on.
    averaged: int | None = None

    @property
    def everyone(self) -> Axis:
        """The axis of all data-parallel ranks: the same part of the model on other data."""
        if self.both is not None:
            return self.both
        return self.shard if self.replicate.alone else self.replicate

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of this parameter's collectives, one for each process group."""
        mesh_axes = (self.shard, self.replicate, self.expert, self.tensor)
        all_axes = (*mesh_axes, self.everyone, self.owner_group, self.replica_group)
        return tuple({axis.group: axis for axis in reversed(all_axes) if not axis.alone}.values())

    @property
    def redistribution_key(self) -> tuple[object, ...]:
        """The key on which layouts must agree for their parameters to share a collective."""
        return self.shard, self.replicate, self.sharded, self.cut_twice, self.divisor

    @property
    def divisor(self) -> int:
        """The divisor of the summed gradient."""
        return self.averaged or self.everyone.size

    # ------------------------------------------------------------------------------------------ parts of a model

    @property
    def tensor_parallel(self) -> bool:
        """Whether matrices are cut by tensor parallelism, and have to be joined for Newton-Schulz."""
        return self.tensor_dim is not None and not self.tensor.alone

    @property
    def model_parallel(self) -> bool:
        """Whether a rank's model has only a part of the parameter."""
        return self.tensor_parallel or not self.expert.alone

    def _bounds(self, expert: int, tensor: int | None) -> list[tuple[int, int]]:
        """Return ``(start, stop)`` along each dim of a part; ``tensor`` None joins the parts of that axis."""
        bounds = [(0, size) for size in self.unsharded_shape]
        if not self.expert.alone:
            bounds[0] = _part(self.unsharded_shape[0], self.expert.size, expert)
        if tensor is not None and self.tensor_parallel:
            assert self.tensor_dim is not None
            bounds[self.tensor_dim] = _part(self.unsharded_shape[self.tensor_dim], self.tensor.size, tensor)
        return bounds

    def _part_shape(self, tensor: int | None) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self._bounds(self.expert.index, tensor))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter in this rank's model."""
        return self._part_shape(self.tensor.index)

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Shape of the parts of this rank's experts, with those of all tensor-parallel ranks joined."""
        return self._part_shape(None)

    @property
    def part(self) -> tuple[slice, ...]:
        """This rank's part, as slices of the whole parameter."""
        return tuple(slice(*bounds) for bounds in self._bounds(self.expert.index, self.tensor.index))

    def region(self, rank: int) -> tuple[slice, ...]:
        """Return the piece of ``rank``, a rank of the whole mesh, as slices of the whole parameter."""
        rank, tensor = divmod(rank, self.tensor.size)
        rank, expert = divmod(rank, self.expert.size)
        bounds = self._bounds(expert, tensor)
        if self.sharded:
            start, stop = bounds[0]
            first, last = self._rows(stop - start, rank)
            bounds[0] = start + first, start + last
        return tuple(slice(*each) for each in bounds)

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks of the whole mesh whose pieces are the whole parameter, each element once, in the order of its rows
        (unless tensor parallelism cuts another dim)."""
        parts = self.tensor.size if self.tensor_parallel else 1
        return tuple(
            (data * self.expert.size + expert) * self.tensor.size + tensor
            for expert in range(self.expert.size)
            for tensor in range(parts)
            for data in self.data_holders
        )

    @property
    def cut_in_rows(self) -> bool:
        """Whether every piece consists of rows of the whole parameter."""
        return not self.tensor_parallel or self.tensor_dim == 0

    # ------------------------------------------------------------------------------------------ Newton-Schulz

    @property
    def owner_group(self) -> Axis:
        """The axis of the ranks whose pieces are a whole matrix, each element once; the owner is in such a group."""
        if self.owner_group_over is not None:
            return self.owner_group_over
        if self.cut_twice:
            return self.everyone
        return self.shard if self.sharded else Axis("shard")

    @property
    def replica_group(self) -> Axis:
        """The axis of the ranks that hold the same piece; one gets its direction first, and hands it round."""
        if self.replica_group_over is not None:
            return self.replica_group_over
        if self.cut_twice:
            return Axis("replicate")
        return self.replicate if self.sharded else self.everyone

    def owner_ranks(self, owner: int) -> tuple[int, ...]:
        """Return the ranks of the whole mesh that are owner number ``owner``: one for each place along ``expert``."""
        # Experts share one owner table, of places along replica group and owner group.
        replica, place = divmod(owner, self.owner_group.size)
        if self.tensor_parallel:
            place, tensor = divmod(place, self.tensor.size)
        else:
            replica, tensor = divmod(replica, self.tensor.size)
        data = replica * self.shard.size + place if self.sharded and not self.cut_twice else replica + place
        return tuple((data * self.expert.size + e) * self.tensor.size + tensor for e in range(self.expert.size))

    def _owner_group_place(self, place: int) -> tuple[int, int]:
        """Split a place along :attr:`owner_group` into ``(data, tensor)``."""
        return divmod(place, self.tensor.size) if self.tensor_parallel else (place, self.tensor.index)

    def owner_group_shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of the piece at ``place`` along :attr:`owner_group`."""
        data, tensor = self._owner_group_place(place)
        return self._piece_shape(self._part_shape(tensor), data)

    def owner_group_rows(self, place: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of the rows at ``place`` along :attr:`owner_group`, where it joins no columns."""
        return self._rows(self.shape[0], place) if self.sharded else (0, self.shape[0])

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Concatenate flat pieces, by place along :attr:`owner_group`, into a tensor of :attr:`joined_shape`."""
        if not self.tensor_parallel:
            return torch.cat([pieces[data] for data in self.data_holders]).view(self.joined_shape)
        parts = []
        for tensor in range(self.tensor.size):
            rows = [pieces[data * self.tensor.size + tensor] for data in self.data_holders]
            parts.append(torch.cat(rows).view(self._part_shape(tensor)))
        assert self.tensor_dim is not None
        return torch.cat(parts, dim=self.tensor_dim)

    def cut(self, matrix: Tensor, place: int) -> Tensor:
        """Return the piece at ``place`` along :attr:`owner_group`, of a tensor as large as :attr:`joined_shape`."""
        data, tensor = self._owner_group_place(place)
        part = matrix.reshape(self.joined_shape)
        if self.tensor_parallel:
            assert self.tensor_dim is not None
            start, stop = self._bounds(self.expert.index, tensor)[self.tensor_dim]
            part = part.narrow(self.tensor_dim, start, stop - start)
        return part[slice(*self._rows(part.shape[0], data))] if self.sharded else part

    @property
    def sharded(self) -> bool:
        """Whether ranks hold slices (along dim 0), not the whole parameter."""
        return self.stage > 0 and not self.shard.alone and len(self.shape) > 0

    @property
    def cut_twice(self) -> bool:
        """Whether pieces are smaller than slices: each replica holds a chunk of the slice (HFSDP)."""
        return self.state_over_all and self.sharded and not self.replicate.alone

    @property
    def replicated_weight(self) -> bool:
        """Whether the unsharded weight stays resident in compute dtype between steps (stages 1 and 2)."""
        return self.sharded and self.stage < 3

    @property
    def gathered(self) -> bool:
        """Whether every use of the weight unshards it by a collective (stage 3)."""
        return self.sharded and not self.replicated_weight

    @property
    def resident(self) -> bool:
        """Whether the full weight, or at stage 3 the slice to gather from (HFSDP), is resident in compute dtype."""
        return self.replicated_weight or self.cut_twice

    @property
    def accumulates(self) -> bool:
        """Whether micro-batches accumulate unreduced gradients on each rank, until the last of a step (stage 1)."""
        return self.stage == 1 and not self.everyone.alone

    @property
    def copies(self) -> int:
        """The number of ranks of the whole mesh that hold the same gradient and optimizer state."""
        same = 1 if self.tensor_parallel else self.tensor.size
        if self.cut_twice:
            return same
        return same * (self.replicate.size if self.sharded else self.everyone.size)

    @property
    def data_holders(self) -> tuple[int, ...]:
        """Ranks of :attr:`everyone` whose pieces are :attr:`shape`, each row once, in the order of the rows."""
        if not self.sharded:
            return (0,)
        replicas = self.replicate.size if self.cut_twice else 1
        return tuple(r * self.shard.size + s for s in range(self.shard.size) for r in range(replicas))

    @property
    def row_numel(self) -> int:
        """Elements of one index of dim 0."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Elements of :attr:`shape`."""
        return math.prod(self.shape)

    # ------------------------------------------------------------------------------------------ slices

    @property
    def chunk(self) -> int:
        """Rows of the largest slice: ``ceil(shape[0] / shard.size)``, as in ``torch.chunk`` and ``Shard(0)``."""
        return -(-self.shape[0] // self.shard.size)

    def shard_rows(self, index: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of the slice at ``index`` of ``shard``; the last slices may be empty."""
        return _part(self.shape[0], self.shard.size, index)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of this rank's slice."""
        start, stop = self.shard_rows(self.shard.index)
        return (stop - start, *self.shape[1:])

    # ------------------------------------------------------------------------------------------ pieces

    def _rows(self, total: int, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of the piece of ``rank``, of :attr:`everyone`, in a tensor of ``total`` rows."""
        replica, index = divmod(rank, self.shard.size)
        start, stop = _part(total, self.shard.size, index)
        if not self.cut_twice:
            return start, stop
        first, last = _part(stop - start, self.replicate.size, replica)  # as a Shard(0) of a Shard(0)
        return start + first, start + last

    def owner_of(self, shape: tuple[int, ...]) -> str | None:
        """Name the first holder whose piece has this shape, as ``"rank 0 of 4"``; None for the whole parameter."""
        if not (self.sharded or self.model_parallel) or shape == self.unsharded_shape:
            return None
        for rank in sorted(self.holders):
            if shape == tuple(part.stop - part.start for part in self.region(rank)):
                return f"rank {rank} of {len(self.holders)}"
        return None

    @property
    def widest_piece(self) -> int:
        """Elements of the largest piece of this rank's slice."""
        rows = -(-self.slice_shape[0] // self.replicate.size) if self.cut_twice else self.chunk
        return rows * self.row_numel

    def _piece_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of the piece of ``rank``, of :attr:`everyone`, in a tensor of this ``shape``."""
        if not self.sharded:
            return shape
        start, stop = self._rows(shape[0], rank)
        return (stop - start, *shape[1:])

    @property
    def local_rows(self) -> slice:
        """This rank's piece, as rows of :attr:`shape`."""
        return slice(*self._rows(self.shape[0], self.everyone.index))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's piece."""
        return self._piece_shape(self.shape, self.everyone.index)
