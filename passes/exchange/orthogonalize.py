"""Gather ahead of Newton-Schulz, scatter behind it.

``orthogonalize_group`` is the whole Muon update of many parameters at once, up to the learning rate: momentum, the
exchange that brings whole matrices together, Newton-Schulz, and the exchange that brings each rank's rows back. Routing
is static: splits and owners follow from the specs, so nothing is negotiated at run time.

========== ============================================= ===================== ==========================
strategy   bytes sent per rank, matrix of S bytes, W     Newton-Schulz work    used for
========== ============================================= ===================== ==========================
local      0                                             each matrix once      world 1, expert stacks
replicate  S (W-1) / W                                   every rank all of it  tiny matrices
owner      2 S (W-1) / W**2 (all-to-all there and back)  each matrix once      the rule
========== ============================================= ===================== ==========================
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from compile_muon.kernels import muon_momentum

from ..costs import owner_work
from ..spec import MuonSpec, ParamSpec, decode_dtype
from .packing import pack, unpack
from .transfers import all_gather, all_to_all, shard_widths

__all__ = ["assign_owners", "orthogonalize_group"]


def _muon(spec: ParamSpec) -> MuonSpec:
    if spec.muon is None:
        raise ValueError(f"parameter of shape {spec.shape} is not a Muon matrix")
    return spec.muon


def assign_owners(specs: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Owner rank of each parameter: longest processing time first, by ``steps k^2 (2l + k)``.

    Deterministic (ties go to the earlier parameter and the lower rank), so every rank computes the same table.
    """
    if not specs:
        return ()
    work = [_muon(s).batch * owner_work(_muon(s).rows, _muon(s).cols, steps=_muon(s).steps) for s in specs]
    load = [0.0] * specs[0].world
    owners = [0] * len(specs)
    for index in sorted(range(len(specs)), key=lambda i: (-work[i], i)):
        rank = min(range(len(load)), key=lambda r: (load[r], r))
        owners[index] = rank
        load[rank] += work[index]
    return tuple(owners)


def _wire_dtype(muon: MuonSpec) -> torch.dtype:
    """Matrices travel in the compute dtype, except to float16: it may only be cast to after normalization."""
    dtype = decode_dtype(muon.dtype)
    return torch.float32 if dtype is torch.float16 else dtype


def _newton_schulz(matrices: list[Tensor], settings: MuonSpec) -> list[Tensor]:
    """Newton-Schulz of ``[rows, cols]`` or ``[batch, rows, cols]`` tensors through the opaque op."""
    if not matrices:
        return []
    return torch.ops.muon_zero.newton_schulz(
        matrices,
        list(settings.coefficients),
        settings.method,
        settings.dtype,
        settings.eps,
        settings.safety,
        list(settings.restarts),
    )


def _as_matrices(flat: Tensor, muon: MuonSpec) -> Tensor:
    """A whole parameter as one matrix, or as a stack of them."""
    return flat.reshape(muon.rows, muon.cols) if muon.batch == 1 else flat.reshape(muon.batch, muon.rows, muon.cols)


def _local(updates: list[Tensor], specs: list[ParamSpec]) -> list[Tensor]:
    """Whole matrices are already here: world 1, replicated gradients, or experts sharded by expert."""
    views = []
    for update, spec in zip(updates, specs, strict=True):
        muon = _muon(spec)
        views.append(update.reshape(-1, muon.rows, muon.cols) if muon.batch > 1 else _as_matrices(update, muon))
    present = [i for i, view in enumerate(views) if view.numel() > 0]
    results = dict(zip(present, _newton_schulz([views[i] for i in present], _muon(specs[0])), strict=True))
    # A rank past the last expert has nothing to orthogonalize.
    return [results[i].reshape(u.shape) if i in results else u for i, u in enumerate(updates)]


def _replicate(updates: list[Tensor], specs: list[ParamSpec]) -> list[Tensor]:
    """Gather every matrix on every rank, orthogonalize all of them, keep one's own rows."""
    world, rank = specs[0].world, specs[0].rank
    if not specs[0].sharded:
        return _local(updates, specs)
    widths = shard_widths(specs)
    gathered = all_gather(updates, widths, updates[0].dtype, specs[0])
    pieces = unpack(gathered, widths, [spec.numel for spec in specs], world=world)
    whole = [_as_matrices(piece, _muon(spec)) for piece, spec in zip(pieces, specs, strict=True)]
    directions = _newton_schulz(whole, _muon(specs[0]))
    return [
        direction.reshape(spec.shape)[slice(*spec.shard_rows(rank))]
        for direction, spec in zip(directions, specs, strict=True)
    ]


def _owner_sharded(updates: list[Tensor], specs: list[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
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
    whole = [_as_matrices(rows, _muon(specs[i])) for rows, i in zip(_join(inbox, mine, specs), mine, strict=True)]
    directions = _newton_schulz(whole, _muon(specs[0]))
    outbox = all_to_all(_cut(directions, mine, specs, updates[0]), sent, received, group)
    shards = dict(zip(by_owner, unpack(outbox, outbound, outbound), strict=True))
    return [shards[i].view(spec.local_shape) for i, spec in enumerate(specs)]


def _join(inbox: Tensor, mine: list[int], specs: list[ParamSpec]) -> list[Tensor]:
    """Whole flat matrices from an inbox that holds, rank by rank, the rows of each."""
    if not mine:
        return []
    sizes = [specs[i].shard_numel(r) for r in range(specs[0].world) for i in mine]
    pieces = unpack(inbox, sizes, sizes)
    return [torch.cat(pieces[k :: len(mine)]) for k in range(len(mine))]


def _cut(directions: list[Tensor], mine: list[int], specs: list[ParamSpec], like: Tensor) -> Tensor:
    """The outbox: rank by rank, the rows of each owned direction."""
    dtype = decode_dtype(_muon(specs[0]).dtype)
    if not mine:
        return like.new_empty(0, dtype=dtype)
    rows = []
    for r in range(specs[0].world):
        for direction, i in zip(directions, mine, strict=True):
            start, stop = specs[i].shard_rows(r)
            rows.append(direction.reshape(specs[i].shape[0], -1)[start:stop])
    return pack(rows, [piece.numel() for piece in rows], dtype=dtype)


def _owner_whole(updates: list[Tensor], specs: list[ParamSpec], owners: Sequence[int]) -> list[Tensor]:
    """Stage 0: every rank has the whole update; owners orthogonalize, one all-gather hands the directions round."""
    world, rank = specs[0].world, specs[0].rank
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in range(world)]
    mine = owned[rank]
    width = max(sum(specs[i].numel for i in indices) for indices in owned)
    directions = _newton_schulz([_as_matrices(updates[i], _muon(specs[i])) for i in mine], _muon(specs[0]))
    dtype = decode_dtype(_muon(specs[0]).dtype)
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


def _dispatch(strategy: str, updates: list[Tensor], specs: list[ParamSpec], owners: list[int]) -> list[Tensor]:
    if strategy == "owner":
        return (_owner_sharded if specs[0].sharded else _owner_whole)(updates, specs, owners)
    return {"local": _local, "replicate": _replicate}[strategy](updates, specs)


def _route(spec: ParamSpec) -> tuple[object, ...]:
    """What parameters must agree on to share one exchange."""
    muon = _muon(spec)
    return (muon.exchange, spec.group, spec.world, spec.sharded, *map(repr, muon.kernel_settings))


def orthogonalize_group(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    hypers: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    owners: Sequence[int] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Muon directions of many parameters.

    Args:
        grads: averaged gradient of each shard, ``spec.local_shape``, master dtype.
        momenta: EMA of the gradients, same shapes.
        hypers: per parameter a ``[2]`` fp32 tensor ``(1 - momentum, momentum)``.
        specs: static facts; all with ``muon`` set.
        owners: owner rank per parameter for the ``owner`` strategy (default: :func:`assign_owners`).
    Returns:
        ``(directions, new_momenta)``, each like ``grads``. Inputs are not modified.
    """
    updates, new_momenta = [], []
    for grad, momentum, hyper, spec in zip(grads, momenta, hypers, specs, strict=True):
        muon = _muon(spec)
        update, new = muon_momentum(
            grad, momentum, beta=(hyper[0], hyper[1]), nesterov=muon.nesterov, out_dtype=_wire_dtype(muon)
        )
        updates.append(update)
        new_momenta.append(new)

    directions: list[Tensor] = list(updates)
    keys = [_route(spec) for spec in specs]
    for _, members in groupby(sorted(range(len(specs)), key=lambda i: (keys[i], i)), key=lambda i: keys[i]):
        indices = list(members)
        chosen = [specs[i] for i in indices]
        table = [owners[i] for i in indices] if owners is not None else list(assign_owners(chosen))
        outputs = _dispatch(_muon(chosen[0]).exchange, [updates[i] for i in indices], chosen, table)
        for i, output in zip(indices, outputs, strict=True):
            directions[i] = output.to(decode_dtype(specs[i].dtype))
    return directions, new_momenta
