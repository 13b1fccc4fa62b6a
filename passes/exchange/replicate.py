"""Every matrix gathered on every rank: one collective an axis, and all of the work everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..spec import ParamSpec
from .local import here
from .matrices import as_matrices, newton_schulz
from .transfers import gather_matrices

__all__ = ["replicate"]


def replicate(updates: Sequence[Tensor], specs: Sequence[ParamSpec]) -> list[Tensor]:
    """Gather every matrix on every rank, orthogonalize all of them, keep one's own rows.

    Args:
        updates: momentum updates, ``spec.layout.local_shape``, in the dtype of the wire.
        specs: their static facts, of one group and setting.
    Returns:
        Directions like ``updates``, in the dtype of Newton-Schulz.
    """
    group = specs[0].layout.owner_group
    if group.alone:
        return here(updates, specs)
    matrices = gather_matrices(updates, specs, updates[0].dtype)
    whole = [as_matrices(matrix, spec.muon_settings) for matrix, spec in zip(matrices, specs, strict=True)]
    directions = newton_schulz(whole, specs[0].muon_settings)
    # A copy: directions wait for step(), and a view of some rows would keep the whole matrix that long.
    return [spec.layout.cut(direction, group.index).clone() for direction, spec in zip(directions, specs, strict=True)]
