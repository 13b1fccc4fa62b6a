"""Each matrix at one rank, its owner: rows travel to it and directions back, and no rank repeats another's work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..costs import owner_work
from ..layout import Axis
from ..spec import ParamSpec, decode_dtype
from .matrices import as_matrices, newton_schulz
from .packing import pack, unpack
from .transfers import all_to_all, hand_round

__all__ = ["assign_owners", "owner"]


def assign_owners(specs: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Owner of each parameter among all ranks of its mesh: longest processing time first, by the operations of the
    standard form.

    Deterministic (ties go to the earlier parameter), so every rank computes the same table.

    Raises:
        ValueError: a parameter without ``muon``.
    """
    if not specs:
        return ()
    settings = [spec.muon_settings for spec in specs]
    work = [muon.batch * owner_work(muon.rows, muon.cols, steps=muon.steps) for muon in settings]
    layout = specs[0].layout
    width = layout.shard.size if layout.sharded else layout.everyone.size
    load = [0.0] * layout.everyone.size
    owners = [0] * len(specs)
    for index in sorted(range(len(specs)), key=lambda i: (-work[i], i)):
        # Ties go round the replicas first: what they share less of is the link between them.
        rank = min(range(len(load)), key=lambda r: (load[r], r % width, r))
        owners[index] = rank
        load[rank] += work[index]
    return tuple(owners)


def owner(updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
    """Directions through the owners of the matrices.

    Args:
        updates: momentum updates, ``spec.layout.local_shape``, in the dtype of the wire.
        specs: their static facts, of one group and setting.
        owners: owner rank of each.
    Returns:
        Directions like ``updates``, in the dtype of Newton-Schulz.
    """
    return (_sharded if specs[0].layout.sharded else _whole)(updates, specs, owners)


def _sharded(updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
    """Rows meet at an owner inside one replica, each replica for its part; then replicas hand their rows round.

    Where every rank has rows of its own, they meet at an owner anywhere, and nobody else wants the direction's.
    """
    layout = specs[0].layout
    if layout.cut_twice:
        return _among(layout.everyone, updates, specs, owners)
    width, here = layout.shard.size, layout.replicate.index
    mine = [i for i, owner in enumerate(owners) if owner // width == here]
    chosen = [specs[i] for i in mine]
    made = _among(layout.shard, [updates[i] for i in mine], chosen, [owners[i] % width for i in mine])
    if layout.replicate.alone:
        return made
    found = hand_round(
        made,
        [owner // width for owner in owners],
        [spec.layout.local_numel for spec in specs],
        layout.replicate,
        layout.gather,
        like=_direction_like(updates, specs),
    )
    return [piece.view(spec.layout.local_shape) for piece, spec in zip(found, specs, strict=True)]


def _direction_like(updates: Sequence[Tensor], specs: Sequence[ParamSpec]) -> Tensor:
    return updates[0].new_empty(0, dtype=decode_dtype(specs[0].muon_settings.dtype))


def _among(axis: Axis, updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
    """All-to-all rows to the owners, Newton-Schulz once per matrix, all-to-all the directions back.

    Args:
        axis: ranks that together hold every row once, ``layout.holders``.
        owners: places along it.
    """
    if not updates:  # for nobody in this replica
        return []
    rank, group = axis.index, axis.group
    ranks = range(axis.size)
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in ranks]
    mine = owned[rank]
    sent = [sum(specs[i].layout.piece_numel(rank) for i in owned[r]) for r in ranks]
    received = [sum(specs[i].layout.piece_numel(r) for i in mine) for r in ranks]

    by_owner = [i for r in ranks for i in owned[r]]
    outbound = [specs[i].layout.piece_numel(rank) for i in by_owner]
    wire = updates[0].dtype
    inbox = all_to_all(pack([updates[i] for i in by_owner], outbound, dtype=wire), received, sent, group)
    rows = _join(inbox, mine, specs, axis.size)
    whole = [as_matrices(flat, specs[i].muon_settings) for flat, i in zip(rows, mine, strict=True)]
    directions = newton_schulz(whole, specs[0].muon_settings)
    outbox = all_to_all(_cut(directions, mine, specs, axis.size, updates[0]), sent, received, group)
    pieces = dict(zip(by_owner, unpack(outbox, outbound, outbound), strict=True))
    return [pieces[i].view(spec.layout.local_shape) for i, spec in enumerate(specs)]


def _join(inbox: Tensor, mine: list[int], specs: Sequence[ParamSpec], ranks: int) -> list[Tensor]:
    """Whole flat matrices from an inbox that holds, rank by rank, the rows of each."""
    if not mine:
        return []
    sizes = [specs[i].layout.piece_numel(r) for r in range(ranks) for i in mine]
    pieces = unpack(inbox, sizes, sizes)
    # Ranks are counted replica by replica, and so is the inbox; rows are not.
    return [torch.cat([pieces[r * len(mine) + k] for r in specs[i].layout.holders]) for k, i in enumerate(mine)]


def _cut(directions: list[Tensor], mine: list[int], specs: Sequence[ParamSpec], ranks: int, like: Tensor) -> Tensor:
    """The outbox: rank by rank, the rows of each owned direction."""
    dtype = decode_dtype(specs[0].muon_settings.dtype)
    if not mine:
        return like.new_empty(0, dtype=dtype)
    rows = []
    for r in range(ranks):
        for direction, i in zip(directions, mine, strict=True):
            start, stop = specs[i].layout.piece_rows(r)
            rows.append(direction.reshape(specs[i].layout.shape[0], -1)[start:stop])
    return pack(rows, [piece.numel() for piece in rows], dtype=dtype)


def _whole(updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
    """Every rank has the whole update; owners orthogonalize, one all-gather hands the directions round."""
    layout = specs[0].layout
    mine = [i for i, owner in enumerate(owners) if owner == layout.everyone.index]
    directions = newton_schulz([as_matrices(updates[i], specs[i].muon_settings) for i in mine], specs[0].muon_settings)
    sizes = [spec.layout.numel for spec in specs]
    found = hand_round(directions, owners, sizes, layout.everyone, layout.gather, like=_direction_like(updates, specs))
    return [piece.view(spec.layout.shape) for piece, spec in zip(found, specs, strict=True)]
