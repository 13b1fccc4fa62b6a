"""No exchange: whole matrices are already here (world 1, replicated gradients, experts sharded by expert)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..language.spec import ParamSpec, decode_dtype
from ..language.work import Category
from .matrices import MethodInputs, as_matrices, orthogonalized
from .transfers import hand_round

__all__ = ["local"]


def local(
    updates: Sequence[Tensor], specs: Sequence[ParamSpec], owners: Sequence[int] | None, inputs: Sequence[MethodInputs]
) -> list[Tensor]:
    """Directions of matrices of one setting that lie whole on this rank.

    Ranks that hold the same stacks orthogonalize a part of each, and hand the parts round.

    Args:
        updates: momentum updates, ``spec.layout.local_shape``, in the dtype of the wire.
        specs: their static facts.
        owners: as :func:`~.owner.owner` has them; who begins, since of fewer experts than ranks the last get none.
        inputs: of each parameter.
    Returns:
        Directions like ``updates``, in the dtype of Newton-Schulz.
    """
    layout = specs[0].layout
    replicas = layout.replica_group.serving(Category.EXCHANGE)
    if replicas.alone:
        return _here(updates, specs, inputs, fresh=True)
    count = replicas.size
    first = [owner // layout.owner_group.size for owner in owners or [0] * len(updates)]
    parts = [part for update in updates for part in update.tensor_split(count)]
    holders = [(start + part) % count for start in first for part in range(count)]
    mine = _here([part for part, holder in zip(parts, holders, strict=True) if holder == replicas.index], specs, inputs)
    like = updates[0].new_empty(0, dtype=decode_dtype(specs[0].muon_settings.dtype))
    numels = [part.numel() for part in parts]
    found = hand_round([m.reshape(-1) for m in mine], holders, numels, replicas, layout.pairwise, like=like)
    return [torch.cat(found[i * count : (i + 1) * count]).view(u.shape) for i, u in enumerate(updates)]


def _here(
    updates: Sequence[Tensor], specs: Sequence[ParamSpec], inputs: Sequence[MethodInputs], *, fresh: bool = False
) -> list[Tensor]:
    """Directions of matrices that lie whole on this rank, all made by it; ``fresh`` as for :func:`.orthogonalized`."""
    muon = specs[0].muon_settings
    seen, views = [], []
    for update, spec in zip(updates, specs, strict=True):
        settings = spec.muon_settings
        stack = settings.batch > 1  # of which this rank may hold fewer
        view = settings.view
        if view is not None and spec.layout.sharded:
            view = view.within(spec.layout.local_rows.start, spec.layout.local_rows.stop)
            seen.append(update.reshape(update.shape[0], settings.cols))
        else:
            seen.append(update.reshape(-1, settings.rows, settings.cols) if stack else as_matrices(update, settings))
        views.append(view)
    present = [i for i, x in enumerate(seen) if x.numel() > 0]
    there = [inputs[i] for i in present]
    made = orthogonalized([seen[i] for i in present], muon, [views[i] for i in present], there, fresh=fresh)
    found = dict(zip(present, made, strict=True))
    # A rank past the last expert has nothing to orthogonalize.
    return [
        (found[i] if found[i].shape == u.shape else found[i].reshape(u.shape))
        if i in found
        else u.new_empty(u.shape, dtype=decode_dtype(muon.dtype))
        for i, u in enumerate(updates)
    ]
