"""Each matrix at one rank, its owner: rows travel to it and directions back, and no rank repeats another's work."""

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
    """Owners among all ranks that hold a piece: of each share (:func:`~.shares.shares`), parameter by parameter.

    How many of which matrices a rank gets is by longest processing time first, over all of them. Which ones is then
    decided bucket by bucket, to the rank that has had least so far: one that is ahead of others waits for them in the
    next collective, and is not repaid by having more later. Of ranks that have had the same, the one that has least of
    the bucket: what is exchanged together arrives as fast as the fullest owner's link lets it, and gathers are padded
    to what that has.

    Owners are counted owner group by owner group: ``c * owner_group.size + m`` has the places ``c`` along
    ``layout.replica_group`` and ``m`` along ``layout.owner_group``. Deterministic (ties go to the earlier parameter),
    so every rank computes the same table.

    Args:
        buckets: indices of parameters that are exchanged together, in the order in which they are.
    Raises:
        ValueError: a parameter without ``muon``.
    """
    found: dict[tuple[object, ...], _Places] = {}
    tasks, parameter_of = [], []
    for number, spec in enumerate(specs):
        layout = spec.layout
        for share in shares(spec):
            kind = (layout.company, layout.owner_group, layout.replica_group, layout.joined, share.whole_at)
            if kind not in found:
                count = layout.owner_group.size * layout.replica_group.size
                ranks = tuple(map(layout.owner_ranks, range(count)))
                found[kind] = _Places(layout.owner_group.size, ranks, share.whole_at)
            tasks.append(_Task(owned_work(spec.muon_settings, costs, share.matrices), found[kind]))
            parameter_of.append(number)
    longest_first = sorted(range(len(tasks)), key=lambda i: (-tasks[i].work, i))
    as_many_as_may_be = {
        task: [len(tasks) * task.places.may(i) for i in range(len(task.places.ranks))] for task in tasks
    }
    quotas = {task: [0] * len(task.places.ranks) for task in tasks}
    for index, owner in _dealt(tasks, longest_first, {}, as_many_as_may_be).items():
        quotas[tasks[index]][owner] += 1
    of_parameter = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    bucket_of = {i: of_parameter[number] for i, number in enumerate(parameter_of) if number in of_parameter}
    owners = _dealt(tasks, sorted(longest_first, key=lambda i: bucket_of.get(i, -1)), bucket_of, quotas)
    return tuple(owners[index] for index in range(len(tasks)))


@dataclass(frozen=True, eq=False)
class _Places:
    """Where the owner of a matrix may be.

    Args:
        width: how many of them are one company.
        ranks: that each is, one or (for experts) several.
        whole_at: the only one of each company that it may be, as that has all of it; None for any.
    """

    width: int
    ranks: tuple[tuple[int, ...], ...]
    whole_at: int | None

    def may(self, owner: int) -> bool:
        """Whether the owner may be there."""
        return self.whole_at is None or owner % self.width == self.whole_at


class _Task(NamedTuple):
    """A matrix to own. Of equal ones it makes no difference to the ranks' work which of them each has."""

    work: float
    places: _Places


def _dealt(
    tasks: Sequence[_Task],
    order: Sequence[int],
    bucket_of: Mapping[int, int],
    quotas: Mapping[_Task, list[int]],
) -> dict[int, int]:
    """Owner of each, in ``order`` to the place that has had least until then.

    Args:
        quotas: how many of each task a place takes, which are used up.
    """
    load: dict[int, float] = defaultdict(float)
    share: dict[tuple[int | None, int], float] = defaultdict(float)
    owners = {}
    for index in order:
        task, bucket = tasks[index], bucket_of.get(index)
        work, places = task
        quota = quotas[task]

        def had(owner: int, places: _Places = places, bucket: int | None = bucket) -> tuple[float, ...]:
            first = places.ranks[owner][0]
            # Ties go round the copies: what replicas share less of is the link between them.
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
    """Directions through the owners of the matrices.

    Pieces meet at an owner among those that hold a matrix once, each such company of ranks for its part of the
    matrices; then those that hold the same pieces hand them round. Where no rank holds what another does there is one
    company, and where every rank holds all, each is a company by itself.

    Args:
        updates: momentum updates, ``spec.layout.local_shape``, in the dtype of the wire.
        specs: their static facts, of one group and setting.
        owners: of each share, parameter by parameter.
        inputs: of each parameter.
    Returns:
        Directions like ``updates``, in the dtype of Newton-Schulz.
    """
    layout = specs[0].layout
    width, here = layout.owner_group.size, layout.replica_group.index
    dealt = [share for spec in specs for share in shares(spec)]
    pieces = [share.piece(update) for update, spec in zip(updates, specs, strict=True) for share in shares(spec)]
    mine = [i for i, owner in enumerate(owners) if owner // width == here]
    whose = [own for own, spec in zip(inputs, specs, strict=True) for _ in shares(spec)]
    places, there = [owners[i] % width for i in mine], [whose[i] for i in mine]
    made = _among([pieces[i] for i in mine], [dealt[i] for i in mine], places, there)
    if not layout.replica_group.alone:
        made = hand_round(
            made,
            [owner // width for owner in owners],
            [piece.numel() for piece in pieces],
            layout.replica_group.serving(Category.EXCHANGE),
            layout.pairwise,
            like=updates[0].new_empty(0, dtype=decode_dtype(specs[0].muon_settings.dtype)),
        )
    parts = by_parameter(specs, (part.view(piece.shape) for part, piece in zip(made, pieces, strict=True)))
    found = []
    for spec, own in zip(specs, parts, strict=True):
        found.append((own[0] if len(own) == 1 else torch.cat(own, shares(spec)[0].dim)).view(spec.layout.local_shape))
    return found


def _among(
    pieces: Sequence[Tensor], dealt: Sequence[Share], owners: Sequence[int], inputs: Sequence[MethodInputs]
) -> list[Tensor]:
    """All-to-all pieces to the owners, Newton-Schulz once per matrix, all-to-all the directions back.

    Args:
        owners: places along ``layout.owner_group``.
        inputs: of the parameter of each.
    Returns:
        Flat, like ``pieces``.
    """
    if not pieces:  # for nobody in this company
        return []
    settings = dealt[0].spec.muon_settings
    axis = dealt[0].spec.layout.owner_group.serving(Category.EXCHANGE)
    if axis.alone:
        whole = [share.join([piece.reshape(-1)]) for piece, share in zip(pieces, dealt, strict=True)]
        return [made.reshape(-1) for made in orthogonalized(whole, settings, [share.view for share in dealt], inputs)]
    ranks = range(axis.size)
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in ranks]
    mine = owned[axis.index]
    numels = {(i, r): dealt[i].numel(r) for i in mine for r in ranks}
    own = [piece.numel() for piece in pieces]
    sent = [sum(own[i] for i in owned[r]) for r in ranks]
    received = [sum(numels[i, r] for i in mine) for r in ranks]

    by_owner = [i for r in ranks for i in owned[r]]
    outbound = [own[i] for i in by_owner]
    wire = pieces[0].dtype
    inbox = all_to_all(pack([pieces[i] for i in by_owner], outbound, dtype=wire), received, sent, axis.group)
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
    else:
        back = pieces[0].new_empty(0, dtype=dtype)
    outbox = all_to_all(back, sent, received, axis.group)
    found = dict(zip(by_owner, unpack(outbox, outbound, outbound), strict=True))
    return [found[i] for i in range(len(pieces))]
