"""States of a method beside the momentum: zeros that are cut as the parameter is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_muon.passes.methods import State
from compile_muon.passes.spec import ParamSpec
from compile_muon.runtime.account import Account
from compile_muon.runtime.shards import contiguous_stride

__all__ = ["as_state", "new_state", "row_state_shape"]


def row_state_shape(spec: ParamSpec, shape: Sequence[int], width: int) -> torch.Size:
    """Of ``width`` numbers for each row of the matrices in ``shape``, the parameter's or its shard's."""
    return torch.Size([*shape[: 2 if spec.stacked else 1], width])


def as_state(account: Account, own: Tensor, each: str, mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's part of a state as the kind of tensor that the parameter is.

    Args:
        each: of :class:`~compile_muon.passes.methods.State`, "element" or "row".
        mesh: of the same ranks, on the device of ``own``; None for that of the parameter.
    """
    param = account.param
    if not isinstance(param, DTensor):
        return own
    last, shape = param.ndim, param.shape
    if each == "row":
        shape = row_state_shape(account.spec, shape, own.shape[-1])
        last = len(shape) - 1
    # Ranks that have other columns of the same rows have the same number of each row.
    whole = [Replicate() if isinstance(p, Shard) and p.dim >= last else p for p in param.placements]
    return DTensor.from_local(
        own, mesh or param.device_mesh, whole, run_check=False, shape=shape, stride=contiguous_stride(tuple(shape))
    )


def new_state(account: Account, state: State) -> Tensor:
    """Zeros, as the kind of tensor that the parameter is."""
    local = account.local.detach()
    if state.each == "parameter":
        # Where torch's fused AdamW counts: on the GPU itself.
        return torch.zeros((), device=local.device if local.is_cuda else "cpu")
    own = local.shape
    if state.each == "row":
        view = account.spec.muon_settings.view
        own = row_state_shape(account.spec, own, view.count if view is not None and view.dim == 1 else 1)
    return as_state(account, local.new_zeros(own), state.each)  # in plans, fake
