"""Owners: each matrix is orthogonalized by one rank, to which pieces travel and from which directions return."""

from __future__ import annotations

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

__all__ = ["assign_owners", "owner"]


def assign_owners(specs: Sequence[ParamSpec], costs: Costs, buckets: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Return the owner of each share (:func:`~.shares.shares`), parameter by parameter.

    Quotas first: longest processing time first over all shares decides how many of each kind of matrix a rank gets.
    Which ones is then decided bucket by bucket (``buckets``: indices of parameters exchanged together, in order), for
    the rank with the least work so far, since a rank that is ahead waits for the others in the next collective. Ties go
    to the rank with the least work in this bucket: its exchange takes as long as the link of its fullest owner, and
    gathers are padded to that owner's elements.

    Owner ``c * owner_group.size + m`` is at place ``c`` along ``layout.replica_group`` and ``m`` along
    ``layout.owner_group``. Remaining ties go to the earlier parameter, so that every rank computes the same table.
    ValueError for a parameter without ``muon``.
    """
    places_of_kind: dict[tuple[object, ...], _Places] = {}
    tasks, parameter_of = [], []
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
                count = layout.owner_group.size * layout.replica_group.size
                ranks = tuple(map(layout.owner_ranks, range(count)))
                places_of_kind[key] = _Places(layout.owner_group.size, ranks, share.whole_at)
            tasks.append(_Task(owned_work(spec.muon_settings, costs, share.matrices), places_of_kind[key]))
            parameter_of.append(number)
    longest_first = sorted(range(len(tasks)), key=lambda i: (-tasks[i].work, i))
    # First no quota limits a place: each may take all tasks, where the owner may be at all.
    unlimited = {task: [len(tasks) * task.places.may(i) for i in range(len(task.places.ranks))] for task in tasks}
    quotas = {task: [0] * len(task.places.ranks) for task in tasks}
    for index, owner in _dealt(tasks, longest_first, {}, unlimited).items():
        quotas[tasks[index]][owner] += 1
    of_parameter = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    bucket_of = {i: of_parameter[number] for i, number in enumerate(parameter_of) if number in of_parameter}
    owners = _dealt(tasks, sorted(longest_first, key=lambda i: bucket_of.get(i, -1)), bucket_of, quotas)
    return tuple(owners[index] for index in range(len(tasks)))


@dataclass(frozen=True, eq=False)
class _Places:
    """The places at which the owner of a matrix may be."""

    width: int  # size of the owner group
    ranks: tuple[tuple[int, ...], ...]  # ranks of the mesh that each place stands for: one, or several with experts
    # The only place along the owner group that holds the whole matrix, and so has to own it; None for any.
    whole_at: int | None

    def may(self, owner: int) -> bool:
        """Whether place ``owner`` is allowed."""
        return self.whole_at is None or owner % self.width == self.whole_at


class _Task(NamedTuple):
    """A share to assign. Equal tasks are the same load, whichever rank gets which."""

    work: float
    places: _Places


def _dealt(
    tasks: Sequence[_Task],
    order: Sequence[int],
    bucket_of: Mapping[int, int],
    quotas: Mapping[_Task, list[int]],
) -> dict[int, int]:
    """Assign each task, in ``order``, to the place with the least work so far, ties by the least work in its bucket.
    ``quotas`` limits how many of each task a place takes, and is used up."""
    load: dict[int, float] = defaultdict(float)
    share: dict[tuple[int | None, int], float] = defaultdict(float)
    owners = {}
    for index in order:
        task, bucket = tasks[index], bucket_of.get(index)
        work, places = task
        quota = quotas[task]

        def had(owner: int, places: _Places = places, bucket: int | None = bucket) -> tuple[float, ...]:
            first = places.ranks[owner][0]  # all ranks of a place have the same load
            # Ties go round the replicas first, which balances the link between them, the scarcer one.
            return load[first], share[bucket, first], owner % places.width, owner

        owner = min((place for place, left in enumerate(quota) if left), key=had)
        quota[owner] -= 1
        for rank in places.ranks[owner]:
            load[rank] += work
            share[bucket, rank] += work
        owners[index] = owner
    return owners


def owner(
    updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int], inputs: Sequence[MethodInputs]
) -> list[Tensor]:
    """Return directions by way of the owners, like ``updates``, in the dtype of Newton-Schulz.

    Every owner group exchanges the pieces of the matrices that its ranks own. Then each replica group shares the
    directions that its ranks received. ``updates`` have ``spec.layout.local_shape`` and the wire dtype, ``owners`` one
    entry for each share.
    """
    layout = specs[0].layout
    width, replica = layout.owner_group.size, layout.replica_group.index
    all_shares = [share for spec in specs for share in shares(spec)]
    pieces = [share.piece(update) for update, spec in zip(updates, specs, strict=True) for share in shares(spec)]
    mine = [i for i, owner in enumerate(owners) if owner // width == replica]
    share_inputs = [own for own, spec in zip(inputs, specs, strict=True) for _ in shares(spec)]
    places, my_inputs = [owners[i] % width for i in mine], [share_inputs[i] for i in mine]
    directions = _among([pieces[i] for i in mine], [all_shares[i] for i in mine], places, my_inputs)
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
    for spec, own in zip(specs, parts, strict=True):
        joined.append((own[0] if len(own) == 1 else torch.cat(own, shares(spec)[0].dim)).view(spec.layout.local_shape))
    return joined


def _among(
    pieces: Sequence[Tensor], dealt: Sequence[Share], owners: Sequence[int], inputs: Sequence[MethodInputs]
) -> list[Tensor]:
    """Exchange within the owner group: all-to-all of pieces to owners, Newton-Schulz, all-to-all of directions back.
    ``owners`` are places along ``layout.owner_group``; results are flat, like ``pieces``."""
    if not pieces:  # No rank of this owner group owns anything: all of them skip the collectives.
        return []
    settings = dealt[0].spec.muon_settings
    axis = dealt[0].spec.layout.owner_group.serving(Category.EXCHANGE)
    if axis.alone:
        whole = [share.join([piece.reshape(-1)]) for piece, share in zip(pieces, dealt, strict=True)]
        return [made.reshape(-1) for made in orthogonalized(whole, settings, [share.view for share in dealt], inputs)]
    ranks = range(axis.size)
    owned_by = [[i for i, owner in enumerate(owners) if owner == r] for r in ranks]
    mine = owned_by[axis.index]
    numels = {(i, r): dealt[i].numel(r) for i in mine for r in ranks}
    piece_numels = [piece.numel() for piece in pieces]
    sent = [sum(piece_numels[i] for i in owned_by[r]) for r in ranks]
    received = [sum(numels[i, r] for i in mine) for r in ranks]

    by_owner = [i for r in ranks for i in owned_by[r]]
    outbound = [piece_numels[i] for i in by_owner]
    wire_dtype = pieces[0].dtype
    inbox = all_to_all(pack([pieces[i] for i in by_owner], outbound, dtype=wire_dtype), received, sent, axis.group)
    whole = []
    if mine:
        sizes = [numels[i, r] for r in ranks for i in mine]
        arrived = unpack(inbox, sizes, sizes)  # rank by rank, the pieces of each
        whole = [dealt[i].join(arrived[k :: len(mine)]) for k, i in enumerate(mine)]
    directions = orthogonalized(whole, settings, [dealt[i].view for i in mine], [inputs[i] for i in mine])
    dtype = decode_dtype(settings.dtype)
    if mine:
        cut = [dealt[i].cut(d, r) for r in ranks for d, i in zip(directions, mine, strict=True)]
        back = pack(cut, [piece.numel() for piece in cut], dtype=dtype)
    else:  # a rank that owns nothing takes part in both all-to-alls all the same
        back = pieces[0].new_empty(0, dtype=dtype)
    outbox = all_to_all(back, sent, received, axis.group)
    received_directions = dict(zip(by_owner, unpack(outbox, outbound, outbound), strict=True))
    return [received_directions[i] for i in range(len(pieces))]
