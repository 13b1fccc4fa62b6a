"""Where the parts of one parameter are: which axes of the mesh cut it, and which hold the same again.

A layout says nothing of what is computed (:class:`~compile_muon.passes.spec.MuonSpec`) or in which dtype. Everything
that sends or places rows asks it, for any mesh: one with a single axis is one whose other axes have one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Axis", "Layout"]


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh, as a rank sees it.

    Args:
        name: as errors, metrics and users call it.
        size: ranks along it.
        index: this rank's place along it.
        group: name of its process group, as functional collectives take it ("" where ``size`` is 1).
    """

    name: str
    size: int = 1
    index: int = 0
    group: str = ""

    @property
    def alone(self) -> bool:
        """Whether there is nobody else along it."""
        return self.size == 1


@dataclass(frozen=True)
class Layout:
    """How the ranks hold a parameter, its gradient and its optimizer state.

    Args:
        shape: full (unsharded) shape.
        stage: ZeRO stage, 0 to 3: which of the three are cut.
        shard: what is cut is cut into rows over this axis; weights are gathered over it.
        replicate: every rank along it holds what the others hold; gradients are averaged over it too (HSDP).
        both: the ranks of both axes, ``replicate`` outside: rank ``r * shard.size + s``. None where one axis has one
            rank, and the other is all of the mesh.
        gather: the collective that gathers, ``"all_gather"``, or ``"all_to_all"`` with a copy for every rank: the same
            bytes, for groups whose all-gather is not safe (Gloo, docs/decisions.md).
        state_over_all: cut master weights, gradients and optimizer state once more, over ``replicate`` (HFSDP).

    Rows come in two kinds. The *slice* of a place along ``shard`` is what its ranks have of the weight to gather. The
    *piece* of a rank is what it has of master weight, gradient and state: all of the slice, or with ``state_over_all``
    the slice's chunk of its place along ``replicate``. Ranks are those of :attr:`everyone`.
    """

    shape: tuple[int, ...]
    stage: int
    shard: Axis = field(default_factory=lambda: Axis("shard"))
    replicate: Axis = field(default_factory=lambda: Axis("replicate"))
    both: Axis | None = None
    gather: str = "all_gather"
    state_over_all: bool = False

    @property
    def everyone(self) -> Axis:
        """All ranks that hold a part."""
        if self.both is not None:
            return self.both
        return self.shard if self.replicate.alone else self.replicate

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that collectives of this parameter may use, each once."""
        found = (self.shard, self.replicate, self.everyone)
        return tuple({axis.group: axis for axis in reversed(found) if not axis.alone}.values())

    @property
    def company(self) -> tuple[object, ...]:
        """What layouts must agree on to share a collective."""
        return self.shard, self.replicate, self.sharded, self.cut_twice

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
        """How many ranks hold the same gradient and state."""
        if self.cut_twice:
            return 1
        return self.replicate.size if self.sharded else self.everyone.size

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks whose pieces are the whole parameter, each row once, in the order of the rows."""
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
        """Elements of the full parameter."""
        return math.prod(self.shape)

    # ------------------------------------------------------------------------------------------ slices

    @property
    def chunk(self) -> int:
        """Rows of the largest slice: ``ceil(shape[0] / shard.size)``, as in ``torch.chunk`` and ``Shard(0)``."""
        return -(-self.shape[0] // self.shard.size)

    def shard_rows(self, index: int) -> tuple[int, int]:
        """``(start, stop)`` of the slice at ``index`` of ``shard``; empty for a place past the end."""
        start = min(index * self.chunk, self.shape[0])
        return start, min(start + self.chunk, self.shape[0])

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of this rank's slice of a sharded parameter."""
        start, stop = self.shard_rows(self.shard.index)
        return (stop - start, *self.shape[1:])

    # ------------------------------------------------------------------------------------------ pieces

    def piece_rows(self, rank: int) -> tuple[int, int]:
        """``(start, stop)`` of the piece of ``rank`` of a sharded parameter; may be empty."""
        replica, index = divmod(rank, self.shard.size)
        start, stop = self.shard_rows(index)
        if not self.cut_twice:
            return start, stop
        width = self._piece_chunk(index)
        begin = min(start + replica * width, stop)
        return begin, min(begin + width, stop)

    def _piece_chunk(self, index: int) -> int:
        """Rows of the largest piece of a slice that is cut again, as ``Shard(0)`` of a ``Shard(0)`` has it."""
        start, stop = self.shard_rows(index)
        return -(-(stop - start) // self.replicate.size)

    def owner_of(self, shape: tuple[int, ...]) -> str | None:
        """``"rank 0 of 4"``: the first whose piece has this shape, of a parameter whose whole has another."""
        if not self.sharded or shape == self.shape:
            return None
        for rank in sorted(self.holders):
            start, stop = self.piece_rows(rank)
            if shape == (stop - start, *self.shape[1:]):
                return f"rank {rank} of {len(self.holders)}"
        return None

    @property
    def widest_piece(self) -> int:
        """Elements of the largest piece among the ranks that this one shares its slice with."""
        rows = self._piece_chunk(self.shard.index) if self.cut_twice else self.chunk
        return rows * self.row_numel

    def piece_numel(self, rank: int) -> int:
        """Elements that ``rank`` holds."""
        if not self.sharded:
            return self.numel
        start, stop = self.piece_rows(rank)
        return (stop - start) * self.row_numel

    @property
    def local_rows(self) -> slice:
        """This rank's rows of a sharded parameter: its piece."""
        return slice(*self.piece_rows(self.everyone.index))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's piece."""
        if not self.sharded:
            return self.shape
        start, stop = self.piece_rows(self.everyone.index)
        return (stop - start, *self.shape[1:])

    @property
    def local_numel(self) -> int:
        """Elements of this rank's piece."""
        return self.piece_numel(self.everyone.index)
