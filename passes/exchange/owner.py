"""Each matrix at one rank, its owner: rows travel to it and directions back, and no rank repeats another's work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..costs import owner_work
from ..spec import ParamSpec, decode_dtype
from .matrices import as_matrices, newton_schulz
from .packing import pack, unpack
from .transfers import all_gather, all_to_all

__all__ = ["assign_owners", "owner"]


def assign_owners(specs: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Owner rank of each parameter: longest processing time first, by the operations of the standard form.

    Deterministic (ties go to the earlier parameter and the lower rank), so every rank computes the same table.

    Raises:
        ValueError: a parameter without ``muon``.
    """
    if not specs:
        return ()
    settings = [spec.muon_settings for spec in specs]
    work = [muon.batch * owner_work(muon.rows, muon.cols, steps=muon.steps) for muon in settings]
    load = [0.0] * specs[0].world
    owners = [0] * len(specs)
    for index in sorted(range(len(specs)), key=lambda i: (-work[i], i)):
        rank = min(range(len(load)), key=lambda r: (load[r], r))
        owners[index] = rank
        load[rank] += work[index]
    return tuple(owners)


def owner(updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
    """Directions through the owners of the matrices.

    Args:
        updates: momentum updates, ``spec.local_shape``, in the dtype of the wire.
        specs: their static facts, of one group and setting.
        owners: owner rank of each.
    Returns:
        Directions like ``updates``, in the dtype of Newton-Schulz.
    """
    return (_sharded if specs[0].sharded else _whole)(updates, specs, owners)


def _sharded(updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
    """All-to-all rows to the owners, Newton-Schulz once per matrix, all-to-all the directions back."""
    world, rank, group = specs[0].world, specs[0].rank, specs[0].group
    ranks = range(world)
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in ranks]
    mine = owned[rank]
    sent = [sum(specs[i].shard_numel(rank) for i in owned[r]) for r in ranks]
    received = [sum(specs[i].shard_numel(r) for i in mine) for r in ranks]

    by_owner = [i for r in ranks for i in owned[r]]
    outbound = [specs[i].shard_numel(rank) for i in by_owner]
    wire = updates[0].dtype
    inbox = all_to_all(pack([updates[i] for i in by_owner], outbound, dtype=wire), received, sent, group)
    rows = _join(inbox, mine, specs)
    whole = [as_matrices(flat, specs[i].muon_settings) for flat, i in zip(rows, mine, strict=True)]
    directions = newton_schulz(whole, specs[0].muon_settings)
    outbox = all_to_all(_cut(directions, mine, specs, updates[0]), sent, received, group)
    shards = dict(zip(by_owner, unpack(outbox, outbound, outbound), strict=True))
    return [shards[i].view(spec.local_shape) for i, spec in enumerate(specs)]


def _join(inbox: Tensor, mine: list[int], specs: Sequence[ParamSpec]) -> list[Tensor]:
    """Whole flat matrices from an inbox that holds, rank by rank, the rows of each."""
    if not mine:
        return []
    sizes = [specs[i].shard_numel(r) for r in range(specs[0].world) for i in mine]
    pieces = unpack(inbox, sizes, sizes)
    return [torch.cat(pieces[k :: len(mine)]) for k in range(len(mine))]


def _cut(directions: list[Tensor], mine: list[int], specs: Sequence[ParamSpec], like: Tensor) -> Tensor:
    """The outbox: rank by rank, the rows of each owned direction."""
    dtype = decode_dtype(specs[0].muon_settings.dtype)
    if not mine:
        return like.new_empty(0, dtype=dtype)
    rows = []
    for r in range(specs[0].world):
        for direction, i in zip(directions, mine, strict=True):
            start, stop = specs[i].shard_rows(r)
            rows.append(direction.reshape(specs[i].shape[0], -1)[start:stop])
    return pack(rows, [piece.numel() for piece in rows], dtype=dtype)


def _whole(updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
    """Stage 0: every rank has the whole update; owners orthogonalize, one all-gather hands the directions round."""
    world, rank = specs[0].world, specs[0].rank
    muon = specs[0].muon_settings
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in range(world)]
    mine = owned[rank]
    width = max(sum(specs[i].numel for i in indices) for indices in owned)
    directions = newton_schulz([as_matrices(updates[i], specs[i].muon_settings) for i in mine], muon)
    dtype = decode_dtype(muon.dtype)
    padding = [width - sum(specs[i].numel for i in indices) for indices in owned]
    # The padding is a tensor of its own: a rank that owns nothing sends only that.
    filler = updates[0].new_zeros(padding[rank], dtype=dtype)
    sent = [*(specs[i].numel for i in mine), padding[rank]]
    gathered = all_gather([*directions, filler], sent, dtype, specs[0])
    slots = [slot for r in range(world) for slot in (*((i, specs[i].numel) for i in owned[r]), (-1, padding[r]))]
    sizes = [size for _, size in slots]
    pieces = unpack(gathered, sizes, sizes)
    found = {i: piece for (i, _), piece in zip(slots, pieces, strict=True) if i >= 0}
    return [found[i].view(spec.shape) for i, spec in enumerate(specs)]
