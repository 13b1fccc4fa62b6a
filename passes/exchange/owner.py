"""Owners: each matrix is orthogonalized by one rank, to which pieces travel and from which directions return."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..costs import Costs, owned_work
from ..language.spec import ParamSpec, decode_dtype
from ..language.work import Category
from .matrices import MethodInputs, orthogonalized
from .packing import pack, unpack
from .shares import Share, by_parameter, shares
from .transfers import all_to_all, hand_round


def assign_owners(specs: Sequence[ParamSpec], costs: Costs, buckets: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Return the owner of each share (:func:`~.shares.shares`), parameter by parameter, the same on every rank.

    Owner ``c * owner_group.size + m`` is at place ``c`` along ``layout.replica_group`` and ``m`` along
    ``layout.owner_group``. ``buckets``: indices of parameters exchanged together, in order. ValueError for a parameter
    without ``muon``.

    Shares are dealt twice, each to the rank with the least work so far. The first deal, longest shares first, sets how
    many shares of each kind a rank gets: its quota. The second deal, bucket by bucket, sets which shares, because a
    rank that is ahead waits for the others in the next collective. Ties go to the rank with the least work in the
    bucket: an exchange takes as long as the link of its fullest owner, to whose elements all-gathers are padded.
    """
    places_of_kind: dict[tuple[object, ...], _Places] = {}
    tasks, parameter_of = [], []  # of each share
    for number, spec in enumerate(specs):
        layout = spec.layout
        for share in shares(spec):
            key = (
                layout.redistribution_key,
                layout.owner_group,
                layout.replica_group,
                layout.tensor_parallel,
                share.whole_at,
            )
            if key not in places_of_kind:
                width = layout.owner_group.size
                numbers = range(width * layout.replica_group.size)
                allowed = tuple(share.whole_at in (None, number % width) for number in numbers)
                places_of_kind[key] = _Places(width, tuple(map(layout.owner_ranks, numbers)), allowed)
            tasks.append(_Task(owned_work(spec.muon_settings, costs, share.matrices), places_of_kind[key]))
            parameter_of.append(number)
    longest_first = sorted(range(len(tasks)), key=lambda i: (-tasks[i].work, i))  # of equals the earlier parameter
    # In the first deal an allowed place may take all tasks, another one none.
    unlimited = {task: [len(tasks) * allowed for allowed in task.places.allowed] for task in tasks}
    quotas = {task: [0] * len(task.places.ranks) for task in tasks}
    for index, owner in _dealt(tasks, longest_first, {}, unlimited).items():
        quotas[tasks[index]][owner] += 1
    parameter_buckets = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    bucket_of = {i: parameter_buckets[number] for i, number in enumerate(parameter_of) if number in parameter_buckets}
    owners = _dealt(tasks, sorted(longest_first, key=lambda i: bucket_of.get(i, -1)), bucket_of, quotas)
    return tuple(owners[index] for index in range(len(tasks)))


@dataclass(frozen=True, eq=False)
class _Places:
    """The places, by owner number, at which the owner of a matrix may be."""

    width: int  # size of the owner group
    ranks: tuple[tuple[int, ...], ...]  # of each place, its rank of the whole mesh; with experts one rank for each part
    allowed: tuple[bool, ...]  # of each place: False beside one that holds the whole matrix and so has to own it


class _Task(NamedTuple):
    """The load of a share. Shares with equal tasks are of one kind: a quota counts them together."""

    work: float
    places: _Places


def _dealt(
    tasks: Sequence[_Task],
    order: Sequence[int],
    bucket_of: Mapping[int, int],
    quotas: Mapping[_Task, list[int]],
) -> dict[int, int]:
    """Assign each task, in ``order``, to the place with the least work so far, ties by the least work in its bucket.
    ``quotas[task][place]``, counted down, is the number of equal tasks that the place may still take."""
    load: dict[int, float] = defaultdict(float)  # work by rank
    bucket_load: dict[tuple[int | None, int], float] = defaultdict(float)  # work by bucket and rank
    owners = {}
    for index in order:
        task, bucket = tasks[index], bucket_of.get(index)
        work, places = task
        quota = quotas[task]

        def load_of(owner: int, places: _Places = places, bucket: int | None = bucket) -> tuple[float, ...]:
            first_rank = places.ranks[owner][0]  # all ranks of a place have the same load
            # Ties go round the replicas first, which balances the link between them, the scarcer one.
            return load[first_rank], bucket_load[bucket, first_rank], owner % places.width, owner

        owner = min((place for place, left in enumerate(quota) if left), key=load_of)
        quota[owner] -= 1
        for rank in places.ranks[owner]:
            load[rank] += work
            bucket_load[bucket, rank] += work
        owners[index] = owner
    return owners


def owner(
    updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int], inputs: Sequence[MethodInputs]
) -> list[Tensor]:
    """Return directions by way of the owners, like ``updates``, in the dtype of Newton-Schulz.

    A share is exchanged in its owner's group. Then each rank of that group hands the directions that it received to its
    replicas, which hold the same rows. ``updates`` have ``spec.layout.local_shape`` and the wire dtype, ``owners`` one
    entry for each share.
    """
    layout = specs[0].layout
    width, replica = layout.owner_group.size, layout.replica_group.index
    all_shares = [share for spec in specs for share in shares(spec)]
    pieces = [share.piece(update) for update, spec in zip(updates, specs, strict=True) for share in shares(spec)]
    in_group = [i for i, owner in enumerate(owners) if owner // width == replica]
    share_inputs = [per_param for per_param, spec in zip(inputs, specs, strict=True) for _ in shares(spec)]
    places, group_inputs = [owners[i] % width for i in in_group], [share_inputs[i] for i in in_group]
    directions = _among([pieces[i] for i in in_group], [all_shares[i] for i in in_group], places, group_inputs)
    if not layout.replica_group.alone:
        directions = hand_round(
            directions,
            [owner // width for owner in owners],
            [piece.numel() for piece in pieces],
            layout.replica_group.serving(Category.EXCHANGE),
            layout.pairwise,
            like=updates[0].new_empty(0, dtype=decode_dtype(specs[0].muon_settings.dtype)),
        )
    parts = by_parameter(specs, (part.view(piece.shape) for part, piece in zip(directions, pieces, strict=True)))
    joined = []
    for spec, per_param in zip(specs, parts, strict=True):
        direction = per_param[0] if len(per_param) == 1 else torch.cat(per_param, shares(spec)[0].dim)
        joined.append(direction.view(spec.layout.local_shape))
    return joined


def _among(
    pieces: Sequence[Tensor], dealt: Sequence[Share], owners: Sequence[int], inputs: Sequence[MethodInputs]
) -> list[Tensor]:
    """Exchange within the owner group: all-to-all of pieces to owners, Newton-Schulz, all-to-all of directions back.
    ``dealt`` are the shares of ``pieces``, ``owners`` their places along ``layout.owner_group``; results are flat."""
    if not pieces:  # no rank of this owner group owns anything: all of them skip the collectives
        return []
    settings = dealt[0].spec.muon_settings
    axis = dealt[0].spec.layout.owner_group.serving(Category.EXCHANGE)
    if axis.alone:
        whole = [share.join([piece.reshape(-1)]) for piece, share in zip(pieces, dealt, strict=True)]
        return [d.reshape(-1) for d in orthogonalized(whole, settings, [share.view for share in dealt], inputs)]
    ranks = range(axis.size)
    owned_by = [[i for i, owner in enumerate(owners) if owner == r] for r in ranks]
    owned = owned_by[axis.index]
    numels = {(i, r): dealt[i].numel(r) for i in owned for r in ranks}
    piece_numels = [piece.numel() for piece in pieces]
    send_counts = [sum(piece_numels[i] for i in owned_by[r]) for r in ranks]
    recv_counts = [sum(numels[i, r] for i in owned) for r in ranks]

    by_owner = [i for r in ranks for i in owned_by[r]]
    sent_numels = [piece_numels[i] for i in by_owner]
    wire_dtype = pieces[0].dtype
    arrived = all_to_all(
        pack([pieces[i] for i in by_owner], sent_numels, dtype=wire_dtype), recv_counts, send_counts, axis.group
    )
    whole = []
    if owned:
        sizes = [numels[i, r] for r in ranks for i in owned]
        pieces_by_rank = unpack(arrived, sizes, sizes)  # rank by rank, the pieces of each
        whole = [dealt[i].join(pieces_by_rank[k :: len(owned)]) for k, i in enumerate(owned)]
    directions = orthogonalized(whole, settings, [dealt[i].view for i in owned], [inputs[i] for i in owned])
    dtype = decode_dtype(settings.dtype)
    if owned:
        cut_directions = [dealt[i].cut(d, r) for r in ranks for d, i in zip(directions, owned, strict=True)]
        outgoing = pack(cut_directions, [piece.numel() for piece in cut_directions], dtype=dtype)
    else:  # a rank that owns nothing takes part in both all-to-alls all the same
        outgoing = pieces[0].new_empty(0, dtype=dtype)
    returned = all_to_all(outgoing, send_counts, recv_counts, axis.group)
    received_directions = dict(zip(by_owner, unpack(returned, sent_numels, sent_numels), strict=True))
    return [received_directions[i] for i in range(len(pieces))]
