"""A cheap test for non-finite directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compile_muon.passes.language.spec import ParamSpec
from compile_muon.passes.methods import matrix_method
from compile_muon.passes.norms import not_finite


def directions_not_finite(specs: Sequence[ParamSpec], directions: Sequence[Tensor]) -> Tensor:
    """Return 1.0 for each direction with an inf or NaN, else 0.0, ``[len(directions)]`` fp32, without waiting.

    Newton-Schulz makes all entries of a matrix finite or none, so each rank reads one of those that it holds. It reads
    all where a method computes more, or coefficients may diverge. ``directions``: at least one, each of its spec's
    ``layout.local_shape``.
    """
    corners = [_corners(spec, direction) for spec, direction in zip(specs, directions, strict=True)]
    sizes = [0 if parts is None else sum(part.numel() for part in parts) for parts in corners]
    entries = [part for parts in corners if parts is not None for part in parts]
    flat = torch.cat(entries) if entries else directions[0].new_empty(0)
    if set(sizes) == {1}:
        return (~torch.isfinite(flat)).float()
    pairs = zip(corners, directions, flat.split(sizes), strict=True)
    return not_finite([direction if parts is None else corner for parts, direction, corner in pairs])


def _corners(spec: ParamSpec, direction: Tensor) -> list[Tensor] | None:
    """Return one entry of each matrix, or None if one entry does not suffice."""
    muon = spec.muon_settings
    if matrix_method(muon.method).whole is not None or not muon.all_or_nothing:
        return None
    return [part.corners(direction) for part in spec.parts]
