"""States of a method beside the momentum: zeros that are cut as the parameter is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_muon.passes.methods import State
from compile_muon.runtime.account import Account
from compile_muon.runtime.shards import contiguous_stride

__all__ = ["new_state"]


def new_state(account: Account, state: State) -> Tensor:
    """Zeros, as the kind of tensor that the parameter is."""
    param, local = account.param, account.local
    if state.each == "parameter":
        # Where torch's fused AdamW counts: on the GPU itself.
        return torch.zeros((), device=local.device if local.is_cuda else "cpu")
    if state.each == "element":
        shape, own, last = param.shape, local.shape, param.ndim
    else:
        last = 2 if account.spec.stacked else 1
        view = account.spec.muon_settings.view
        width = view.count if view is not None and view.dim == 1 else 1
        shape, own = (torch.Size([*x.shape[:last], width]) for x in (param, local))
    zeros = torch.zeros(own, dtype=local.dtype, device=local.device)
    if not isinstance(param, DTensor):
        return zeros
    # Ranks that have other columns of the same rows have the same number of each row.
    whole = [Replicate() if isinstance(p, Shard) and p.dim >= last else p for p in param.placements]
    return DTensor.from_local(
        zeros, param.device_mesh, whole, run_check=False, shape=shape, stride=contiguous_stride(tuple(shape))
    )
