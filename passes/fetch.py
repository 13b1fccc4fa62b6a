"""``muon_zero::fetch``: a momentum that is not beside its parameter, where a graph uses it.

    fetch(Tensor state, Tensor grad) -> Tensor

The way to it is the parameter's own (``holder``), as of a refresh: ``state`` is empty and says whose. The result is new
memory like the gradient's, which lives as long as the graph needs it. Whoever keeps the momentum sees what it is about
to be moved toward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .holder import holder_of

__all__ = ["fetch"]

_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")
# A CUDA graph that is replayed would not ask: Inductor runs the op between the graphs.
_LIBRARY.define("fetch(Tensor state, Tensor grad) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))


@torch.library.impl(_LIBRARY, "fetch", "CompositeExplicitAutograd")
def _fetch(state: Tensor, grad: Tensor) -> Tensor:
    holder = holder_of(state)
    if holder is None:
        raise RuntimeError("muon_zero::fetch: the optimizer that keeps this momentum is gone")
    return holder.fetch(grad, torch.empty_like(grad, memory_format=torch.contiguous_format))


@torch.library.register_fake("muon_zero::fetch", lib=_LIBRARY)
def _(state: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def fetch(state: Tensor, grad: Tensor) -> Tensor:
    """The momentum of the parameter with this gradient."""
    return torch.ops.muon_zero.fetch(state, grad)
