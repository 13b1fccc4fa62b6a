"""``muon_zero::fetch``: a momentum that is not beside its parameter, where a graph uses it.

    fetch(Tensor state, Tensor like) -> Tensor

The way to it is the parameter's own (``holder``), as of a refresh: ``state`` is empty and says whose. The result is new
memory on the device of ``like``, of its shape and dtype, which lives as long as the graph needs it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .holder import holder_of

__all__ = ["fetch"]

_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")
# A CUDA graph that is replayed would not ask: Inductor runs the op between the graphs.
_LIBRARY.define("fetch(Tensor state, Tensor like) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))


@torch.library.impl(_LIBRARY, "fetch", "CompositeExplicitAutograd")
def _fetch(state: Tensor, like: Tensor) -> Tensor:
    holder = holder_of(state)
    if holder is None:
        raise RuntimeError("muon_zero::fetch: the optimizer that keeps this momentum is gone")
    return holder.fetch(torch.empty_like(like, memory_format=torch.contiguous_format))


@torch.library.register_fake("muon_zero::fetch", lib=_LIBRARY)
def _(state: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def fetch(state: Tensor, like: Tensor) -> Tensor:
    """The parameter's momentum, as new memory like ``like``."""
    return torch.ops.muon_zero.fetch(state, like)
