"""States of a method beside the momentum: their memory, and how they lie beside a piece of a matrix."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_muon.passes.methods import State
from compile_muon.passes.spec import ParamSpec
from compile_muon.passes.views import Segment
from compile_muon.runtime.account import Account
from compile_muon.runtime.shards import contiguous_stride

__all__ = ["Part", "cut_in_columns", "is_stack", "matrices_of", "new_state", "parts_of"]


def is_stack(spec: ParamSpec) -> bool:
    """Whether dim 0 of the parameter counts matrices."""
    whole, muon = spec.layout.whole, spec.muon_settings
    return len(whole) == 3 and (muon.rows, muon.cols) == whole[1:]


def cut_in_columns(spec: ParamSpec) -> bool:
    """Whether ranks of a tensor-parallel group have parts of the same rows."""
    layout = spec.layout
    return layout.joined and layout.tensor_dim is not None and layout.tensor_dim > is_stack(spec)


@dataclass(frozen=True)
class Part:
    """Equal matrices, or rows of matrices, in a rank's piece of a parameter.

    Args:
        first: number of the first of them in the whole parameter.
        rows, cols: of each whole matrix.
        segment: where they are, None for all of the piece.
        stack: whether dim 0 of the piece counts them.
    """

    first: int
    rows: int
    cols: int
    segment: Segment | None
    stack: bool

    def of(self, tensor: Tensor) -> Tensor:
        """A piece, or a state of its elements, as ``[n, r, c]``: the same memory."""
        if self.segment is not None:
            return self.segment.of(tensor)
        return tensor if self.stack else tensor.flatten(1).unsqueeze(0)

    def of_rows(self, state: Tensor) -> Tensor:
        """A state of the piece's rows, as ``[n, r, 1]``: the same memory."""
        if self.segment is not None:
            return self.segment.of_rows(state)
        return state if self.stack else state.unsqueeze(0)


@functools.cache
def matrices_of(spec: ParamSpec) -> int:
    """How many matrices the whole parameter is."""
    view = spec.muon_settings.view
    if view is not None:
        return view.count
    return spec.layout.whole[0] if is_stack(spec) else 1


@functools.cache
def parts_of(spec: ParamSpec) -> tuple[Part, ...]:
    """What this rank has of the matrices of a parameter."""
    layout, muon = spec.layout, spec.muon_settings
    first = layout.part[0].start + (layout.local_rows.start if layout.sharded else 0)
    if muon.view is None:
        stack = is_stack(spec)
        return (Part(first if stack else 0, muon.rows, muon.cols, None, stack),)
    if muon.view.dim == 0:
        segments = muon.view.segments(first, first + layout.local_shape[0])
    else:
        part = layout.part[1]
        segments = muon.view.segments(part.start, part.stop)
    return tuple(Part(s.first, *muon.view.shape_of(s.first, muon.rows, muon.cols), s, False) for s in segments)


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
