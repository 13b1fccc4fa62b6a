"""Whose state a tensor is: the way from the ops in a graph, which get tensors alone, to the runtime."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["FETCH", "Holder", "hold", "holder_of"]

_ATTRIBUTE = "_muon_zero_holder"


class Holder(Protocol):
    """What the ops ask of whoever keeps the state of a parameter."""

    def await_refresh(self, read: Tensor | None = None) -> None:
        """Return when what is resident of the weight is that of the shards, and ``read``, which stands for it, too."""

    def fetch(self, grad: Tensor, out: Tensor) -> Tensor:
        """Write the momentum, which is not resident, to ``out``; returns it.

        Args:
            grad: that a direction is made of with it.
        """

    def tell(self, what: str, *facts: Any) -> None:
        """Something that an op has found out of the parameter; its backward runs.

        Args:
            what: of which kind; the op says what facts there are.
        """

    def to_reduce(self, grad: Tensor) -> Tensor | None:
        """What of the whole weight's gradient, made by an eager backward, is reduced now: with what earlier
        micro-batches have left here; None where it is left as well."""

    def reducing(self) -> AbstractContextManager[object]:
        """Around the reduction of a backward that no graph of this backend runs."""


_Holder = TypeVar("_Holder", bound=Holder)


def hold(state: Tensor, holder: Holder) -> None:
    """Have ``holder``, which is held weakly, found by this very tensor.

    Graphs are traced with other tensors than ``state`` itself, so nothing of it gets into one.
    """
    setattr(state, _ATTRIBUTE, weakref.ref(holder))


def holder_of(state: object) -> Holder | None:
    """The holder that this tensor was given by :func:`hold`, or None."""
    reference = getattr(state, _ATTRIBUTE, None) if isinstance(state, Tensor) else None
    return None if reference is None else reference()


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


#: A momentum that is not resident, where a graph uses it. ``state`` is empty and says whose; the result is
#: new memory like the gradient's, which lives as long as the graph needs it. Whoever keeps the momentum sees what it is
#: about to be moved toward.
FETCH = torch.ops.muon_zero.fetch.default
