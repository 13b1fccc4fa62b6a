"""States of a method beside the momentum: their memory, and how they lie beside a piece of a matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_muon.passes.methods import State
from compile_muon.passes.spec import ParamSpec
from compile_muon.runtime.account import Account
from compile_muon.runtime.shards import contiguous_stride

__all__ = ["cut_in_columns", "is_stack", "matrices_of", "new_state", "view"]


def is_stack(spec: ParamSpec) -> bool:
    """Whether dim 0 of the parameter counts matrices."""
    whole, muon = spec.layout.whole, spec.muon_settings
    return len(whole) == 3 and (muon.rows, muon.cols) == whole[1:]


def cut_in_columns(spec: ParamSpec) -> bool:
    """Whether ranks of a tensor-parallel group have parts of the same rows."""
    layout = spec.layout
    return layout.joined and layout.tensor_dim is not None and layout.tensor_dim > is_stack(spec)


def matrices_of(spec: ParamSpec) -> tuple[int, int]:
    """How many matrices the whole parameter is, and the first that this rank has rows of."""
    layout = spec.layout
    if not is_stack(spec):
        return 1, 0
    return layout.whole[0], layout.part[0].start + (layout.local_rows.start if layout.sharded else 0)


def view(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """A piece of a parameter, or a state of its rows (one column), as ``[n, rows, columns]``."""
    lead = tensor.shape[:2] if is_stack(spec) else (1, tensor.shape[0])
    return tensor.reshape(*lead, math.prod(tensor.shape[2 if is_stack(spec) else 1 :]))


def new_state(account: Account, state: State) -> Tensor:
    """Zeros, as the kind of tensor that the parameter is."""
    param, local = account.param, account.local
    if state.each == "parameter":
        # Where torch's fused AdamW counts: on the GPU itself.
        return torch.zeros((), device=local.device if local.is_cuda else "cpu")
    if state.each == "element":
        shape, own, last = param.shape, local.shape, param.ndim
    else:
        last = 2 if is_stack(account.spec) else 1
        shape, own = (torch.Size([*x.shape[:last], 1]) for x in (param, local))
    zeros = torch.zeros(own, dtype=local.dtype, device=local.device)
    if not isinstance(param, DTensor):
        return zeros
    # Ranks that have other columns of the same rows have the same number of each row.
    whole = [Replicate() if isinstance(p, Shard) and p.dim >= last else p for p in param.placements]
    return DTensor.from_local(
        zeros, param.device_mesh, whole, run_check=False, shape=shape, stride=contiguous_stride(tuple(shape))
    )
