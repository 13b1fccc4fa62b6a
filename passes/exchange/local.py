"""The strategy for matrices that are whole on a rank, whose updates need no exchange: one rank, or stacks (experts)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..language.spec import ParamSpec, decode_dtype
from ..language.work import Category
from .matrices import MethodInputs, as_matrices, orthogonalized
from .transfers import hand_round


def local(
    updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int] | None, inputs: Sequence[MethodInputs]
) -> list[Tensor]:
    """Return directions of matrices that are whole on this rank, like ``updates``, in the dtype of Newton-Schulz.

    Ranks of a replica group hold the same stacks: each orthogonalizes one part of every stack, and a collective hands
    the parts round. The first part of stack i goes to the replica of ``owners[i]`` (as for :func:`~.owner.owner`), the
    next parts to the replicas behind it; the last ones are empty where there are fewer matrices than replicas.
    """
    layout = specs[0].layout
    replicas = layout.replica_group.serving(Category.EXCHANGE)
    if replicas.alone:
        return _here(updates, specs, inputs, fresh=True)
    count = replicas.size
    first_holders = [owner // layout.owner_group.size for owner in owners or [0] * len(updates)]
    parts = [part for update in updates for part in update.tensor_split(count)]
    holders = [(start + part) % count for start in first_holders for part in range(count)]
    mine = _here([part for part, holder in zip(parts, holders, strict=True) if holder == replicas.index], specs, inputs)
    example = updates[0].new_empty(0, dtype=decode_dtype(specs[0].muon_settings.dtype))
    numels = [part.numel() for part in parts]
    directions = hand_round([d.reshape(-1) for d in mine], holders, numels, replicas, layout.pairwise, like=example)
    return [torch.cat(directions[i * count : (i + 1) * count]).view(u.shape) for i, u in enumerate(updates)]


def _here(
    updates: Sequence[Tensor], specs: Sequence[ParamSpec], inputs: Sequence[MethodInputs], *, fresh: bool = False
) -> list[Tensor]:
    """Return directions of matrices that this rank orthogonalizes; ``fresh``: see :func:`.orthogonalized`."""
    muon = specs[0].muon_settings
    stacks, views = [], []
    for update, spec in zip(updates, specs, strict=True):
        settings = spec.muon_settings
        stack = settings.batch > 1  # ``batch`` counts the whole stack; this rank may hold fewer matrices
        view = settings.view
        if view is not None and spec.layout.sharded:
            view = view.within(spec.layout.local_rows.start, spec.layout.local_rows.stop)
            stacks.append(update.reshape(update.shape[0], settings.cols))
        else:
            stacks.append(update.reshape(-1, settings.rows, settings.cols) if stack else as_matrices(update, settings))
        views.append(view)
    filled = [i for i, x in enumerate(stacks) if x.numel() > 0]
    my_inputs = [inputs[i] for i in filled]
    directions = orthogonalized([stacks[i] for i in filled], muon, [views[i] for i in filled], my_inputs, fresh=fresh)
    direction_of = dict(zip(filled, directions, strict=True))
    # A rank past the last expert has nothing to orthogonalize.
    dtype = decode_dtype(muon.dtype)
    return [
        direction_of[i].reshape(u.shape) if i in direction_of else u.new_empty(u.shape, dtype=dtype)
        for i, u in enumerate(updates)
    ]
