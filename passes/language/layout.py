"""Where the parts of one parameter are: which axes of the mesh cut it, and which hold the same again.

A layout says nothing of what is computed (:class:`~compile_muon.passes.language.spec.MuonSpec`) or in which dtype.
All that sends or places rows asks it, for any mesh: one with a single axis is one whose other axes have one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .work import Category

__all__ = ["Axis", "Layout"]


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh, as a rank sees it.

    Args:
        name: as errors, metrics and users call it.
        size: ranks along it.
        index: this rank's place along it.
        group: name of its process group, as functional collectives take it ("" where ``size`` is 1).
        reduce_group, exchange_group: of a communicator of its own for gradients, and for Newton-Schulz, so that neither
            waits behind what goes over another; "" for the same.
    """

    name: str
    size: int = 1
    index: int = 0
    group: str = ""
    reduce_group: str = ""
    exchange_group: str = ""

    @property
    def alone(self) -> bool:
        """Whether there is nobody else along it."""
        return self.size == 1

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of all its process groups."""
        return tuple({name: None for name in (self.group, self.reduce_group, self.exchange_group) if name})

    def serving(self, category: Category) -> Axis:
        """The same ranks, with the group of that category's collectives alone."""
        own = {Category.REDUCE: self.reduce_group, Category.EXCHANGE: self.exchange_group}.get(category)
        return Axis(self.name, self.size, self.index, own or self.group)


def _part(total: int, parts: int, index: int) -> tuple[int, int]:
    """``(start, stop)`` of one of ``parts`` chunks, as ``torch.chunk`` and ``Shard`` cut; empty past the end."""
    chunk = -(-total // parts)
    start = min(index * chunk, total)
    return start, min(start + chunk, total)


@dataclass(frozen=True)
class Layout:
    """How the ranks hold a parameter, its gradient and its optimizer state.

    Two kinds of axes. Those of data parallelism, ``shard`` and ``replicate``, are ours: ranks along them have the same
    model and other data. Those of model parallelism, ``expert`` and ``tensor``, are the user's: ranks along them have
    different parts of a model, and what of a parameter a rank's model has, :attr:`shape`, is all that the other axes
    see of it.

    Args:
        whole: shape of the whole parameter.
        stage: ZeRO stage, 0 to 3: which of the three are cut.
        shard: what is cut is cut into rows over this axis; weights are gathered over it.
        replicate: every rank along it holds what the others hold; gradients are averaged over it too (HSDP).
        both: the ranks of both axes, ``replicate`` outside: rank ``r * shard.size + s``. None where one axis has one
            rank, and the other is all of the data-parallel mesh.
        pairwise: gathers and reduce-scatters are made of all-to-alls, with a copy for every rank or a sum of what all
            sent: for groups whose own are not safe, or send more (Gloo, docs/why/decisions.md).
        state_over_all: cut master weights, gradients and optimizer state once more, over ``replicate`` (HFSDP).
        expert: the parameter is cut along dim 0 over this axis, into parts that are stacks of whole matrices.
        tensor: it is cut over this axis along ``tensor_dim``, into parts of matrices; None for a copy on every rank.
        owner_group_over: what :attr:`owner_group` is where ``tensor`` has several ranks.
        replica_group_over: what :attr:`replica_group` is there.
        averaged: ranks whose losses a gradient is the mean of; None for those of :attr:`everyone`. Experts get tokens
            of more ranks than they are replicated on.

    The ranks of the whole mesh are counted row by row: replicate, shard, expert, tensor.

    Rows come in two kinds. The *slice* of a place along ``shard`` is what its ranks have of the weight to gather. The
    *piece* of a rank is what it has of master weight, gradient and state: all of the slice, or with ``state_over_all``
    the slice's chunk of its place along ``replicate``.
    """

    whole: tuple[int, ...]
    stage: int
    shard: Axis = field(default_factory=lambda: Axis("shard"))
    replicate: Axis = field(default_factory=lambda: Axis("replicate"))
    both: Axis | None = None
    pairwise: bool = False
    state_over_all: bool = False
    expert: Axis = field(default_factory=lambda: Axis("expert"))
    tensor: Axis = field(default_factory=lambda: Axis("tensor"))
    tensor_dim: int | None = None
    owner_group_over: Axis | None = None
    replica_group_over: Axis | None = None
    averaged: int | None = None

    @property
    def everyone(self) -> Axis:
        """All ranks that have the same part of the model, and other data."""
        if self.both is not None:
            return self.both
        return self.shard if self.replicate.alone else self.replicate

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that collectives of this parameter may use, each once."""
        own = (self.shard, self.replicate, self.expert, self.tensor)
        found = (*own, self.everyone, self.owner_group, self.replica_group)
        return tuple({axis.group: axis for axis in reversed(found) if not axis.alone}.values())

    @property
    def company(self) -> tuple[object, ...]:
        """What layouts must agree on to share a collective."""
        return self.shard, self.replicate, self.sharded, self.cut_twice, self.divisor

    @property
    def divisor(self) -> int:
        """What the sum of gradients is divided by."""
        return self.averaged or self.everyone.size

    # ------------------------------------------------------------------------------------------ parts of a model

    @property
    def joined(self) -> bool:
        """Whether a rank's model has parts of matrices, which Newton-Schulz needs whole."""
        return self.tensor_dim is not None and not self.tensor.alone

    @property
    def parted(self) -> bool:
        """Whether a rank's model has only a part of the parameter."""
        return self.joined or not self.expert.alone

    def _bounds(self, expert: int, tensor: int | None) -> list[tuple[int, int]]:
        """``(start, stop)`` along each dim, of the part at these places; of all parts along ``tensor`` for None."""
        bounds = [(0, size) for size in self.whole]
        if not self.expert.alone:
            bounds[0] = _part(self.whole[0], self.expert.size, expert)
        if tensor is not None and self.joined:
            assert self.tensor_dim is not None
            bounds[self.tensor_dim] = _part(self.whole[self.tensor_dim], self.tensor.size, tensor)
        return bounds

    def _part_shape(self, tensor: int | None) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self._bounds(self.expert.index, tensor))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank's model has of the parameter."""
        return self._part_shape(self.tensor.index)

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Of the whole matrices that this rank's model has parts of."""
        return self._part_shape(None)

    @property
    def part(self) -> tuple[slice, ...]:
        """Where in the whole this rank's part is."""
        return tuple(slice(*bounds) for bounds in self._bounds(self.expert.index, self.tensor.index))

    @property
    def ranks(self) -> int:
        """Of the whole mesh."""
        return self.replicate.size * self.shard.size * self.expert.size * self.tensor.size

    def region(self, rank: int) -> tuple[slice, ...]:
        """Where in the whole the piece of ``rank`` of the whole mesh is."""
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
        """Ranks of the whole mesh whose pieces are the whole parameter, each element once, in the order of the rows.

        Pieces of matrices that are cut along another dim than 0 are no rows of them.
        """
        parts = self.tensor.size if self.joined else 1
        return tuple(
            (data * self.expert.size + expert) * self.tensor.size + tensor
            for expert in range(self.expert.size)
            for tensor in range(parts)
            for data in self.data_holders
        )

    @property
    def cut_in_rows(self) -> bool:
        """Whether every piece is rows of the whole."""
        return not self.joined or self.tensor_dim == 0

    # ------------------------------------------------------------------------------------------ Newton-Schulz

    @property
    def owner_group(self) -> Axis:
        """Ranks whose pieces are the whole of a matrix, each element once: it is joined at one of them."""
        if self.owner_group_over is not None:
            return self.owner_group_over
        if self.cut_twice:
            return self.everyone
        return self.shard if self.sharded else Axis("shard")

    @property
    def replica_group(self) -> Axis:
        """Ranks that hold the same piece: what one of them makes is handed to the others."""
        if self.replica_group_over is not None:
            return self.replica_group_over
        if self.cut_twice:
            return Axis("replicate")
        return self.replicate if self.sharded else self.everyone

    def owner_ranks(self, owner: int) -> tuple[int, ...]:
        """The ranks of the whole mesh with the places ``divmod(owner, owner_group.size)`` along replica group and owner
        group.

        Of experts it is one at each place along ``expert``, which all go by the same table.
        """
        copy, place = divmod(owner, self.owner_group.size)
        if self.joined:
            place, tensor = divmod(place, self.tensor.size)
        else:
            copy, tensor = divmod(copy, self.tensor.size)
        data = copy * self.shard.size + place if self.sharded and not self.cut_twice else copy + place
        return tuple((data * self.expert.size + e) * self.tensor.size + tensor for e in range(self.expert.size))

    def _owner_group_place(self, place: int) -> tuple[int, int]:
        """``(data, tensor)`` of a place along :attr:`owner_group`."""
        return divmod(place, self.tensor.size) if self.joined else (place, self.tensor.index)

    def owner_group_shape(self, place: int) -> tuple[int, ...]:
        """Shape of the piece that ``place`` along :attr:`owner_group` has of a matrix."""
        data, tensor = self._owner_group_place(place)
        return self._piece_shape(self._part_shape(tensor), data)

    def owner_group_rows(self, place: int) -> tuple[int, int]:
        """``(start, stop)`` of the rows that ``place`` along :attr:`owner_group` has, where that joins no columns."""
        return self._rows(self.shape[0], place) if self.sharded else (0, self.shape[0])

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """A matrix, or stack, :attr:`joined_shape`, of flat pieces by place along :attr:`owner_group`."""
        if not self.joined:
            return torch.cat([pieces[data] for data in self.data_holders]).view(self.joined_shape)
        parts = []
        for tensor in range(self.tensor.size):
            rows = [pieces[data * self.tensor.size + tensor] for data in self.data_holders]
            parts.append(torch.cat(rows).view(self._part_shape(tensor)))
        assert self.tensor_dim is not None
        return torch.cat(parts, dim=self.tensor_dim)

    def cut(self, matrix: Tensor, place: int) -> Tensor:
        """The piece of ``place`` along :attr:`owner_group`, of a tensor of as many elements as :attr:`joined_shape`."""
        data, tensor = self._owner_group_place(place)
        found = matrix.reshape(self.joined_shape)
        if self.joined:
            assert self.tensor_dim is not None
            start, stop = self._bounds(self.expert.index, tensor)[self.tensor_dim]
            found = found.narrow(self.tensor_dim, start, stop - start)
        return found[slice(*self._rows(found.shape[0], data))] if self.sharded else found

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a slice (along dim 0) rather than the whole parameter."""
        return self.stage > 0 and not self.shard.alone and len(self.shape) > 0

    @property
    def cut_twice(self) -> bool:
        """Whether pieces are parts of slices, each on one rank alone."""
        return self.state_over_all and self.sharded and not self.replicate.alone

    @property
    def replicated_weight(self) -> bool:
        """Whether a full copy in compute dtype is resident between steps (stages 1 and 2)."""
        return self.sharded and self.stage < 3

    @property
    def gathered(self) -> bool:
        """Whether every use of the full weight starts with a collective (stage 3)."""
        return self.sharded and not self.replicated_weight

    @property
    def resident(self) -> bool:
        """Whether anything of the weight is resident in compute dtype between steps.

        It is all of the weight, or where it is gathered for every use, the slice that gathers start from.
        """
        return self.replicated_weight or self.cut_twice

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay on the rank, unreduced, between the boundaries of a step (stage 1)."""
        return self.stage == 1 and not self.everyone.alone

    @property
    def copies(self) -> int:
        """How many ranks of the whole mesh hold the same gradient and state."""
        same = 1 if self.joined else self.tensor.size
        if self.cut_twice:
            return same
        return same * (self.replicate.size if self.sharded else self.everyone.size)

    @property
    def data_holders(self) -> tuple[int, ...]:
        """Ranks of :attr:`everyone` whose pieces are what this rank's model has, in the order of the rows."""
        if not self.sharded:
            return (0,)
        replicas = self.replicate.size if self.cut_twice else 1
        return tuple(r * self.shard.size + s for s in range(self.shard.size) for r in range(replicas))

    @property
    def row_numel(self) -> int:
        """Elements behind one index of dim 0."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Elements of what this rank's model has."""
        return math.prod(self.shape)

    # ------------------------------------------------------------------------------------------ slices

    @property
    def chunk(self) -> int:
        """Rows of the largest slice: ``ceil(shape[0] / shard.size)``, as in ``torch.chunk`` and ``Shard(0)``."""
        return -(-self.shape[0] // self.shard.size)

    def shard_rows(self, index: int) -> tuple[int, int]:
        """``(start, stop)`` of the slice at ``index`` of ``shard``; empty for a place past the end."""
        return _part(self.shape[0], self.shard.size, index)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of this rank's slice of a sharded parameter."""
        start, stop = self.shard_rows(self.shard.index)
        return (stop - start, *self.shape[1:])

    # ------------------------------------------------------------------------------------------ pieces

    def _rows(self, total: int, rank: int) -> tuple[int, int]:
        """``(start, stop)`` of the piece that ``rank`` of :attr:`everyone` has of ``total`` rows."""
        replica, index = divmod(rank, self.shard.size)
        start, stop = _part(total, self.shard.size, index)
        if not self.cut_twice:
            return start, stop
        first, last = _part(stop - start, self.replicate.size, replica)  # as Shard(0) of a Shard(0) has it
        return start + first, start + last

    def owner_of(self, shape: tuple[int, ...]) -> str | None:
        """``"rank 0 of 4"``: the first whose piece has this shape, of a parameter whose whole has another."""
        if not (self.sharded or self.parted) or shape == self.whole:
            return None
        for rank in sorted(self.holders):
            if shape == tuple(part.stop - part.start for part in self.region(rank)):
                return f"rank {rank} of {len(self.holders)}"
        return None

    @property
    def widest_piece(self) -> int:
        """Elements of the largest piece among the ranks that this one shares its slice with."""
        rows = -(-self.slice_shape[0] // self.replicate.size) if self.cut_twice else self.chunk
        return rows * self.row_numel

    def _piece_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Of the piece that ``rank`` of :attr:`everyone` has of a tensor of this shape."""
        if not self.sharded:
            return shape
        start, stop = self._rows(shape[0], rank)
        return (stop - start, *shape[1:])

    def piece_numel(self, rank: int) -> int:
        """Elements that ``rank`` of :attr:`everyone` holds."""
        return math.prod(self._piece_shape(self.shape, rank))

    @property
    def local_rows(self) -> slice:
        """This rank's rows of a sharded parameter: its piece."""
        return slice(*self._rows(self.shape[0], self.everyone.index))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's piece."""
        return self._piece_shape(self.shape, self.everyone.index)

    @property
    def local_numel(self) -> int:
        """Elements of this rank's piece."""
        return self.piece_numel(self.everyone.index)
