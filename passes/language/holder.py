"""Holders: the way from an op in a graph, which receives tensors only, to the runtime state of a parameter."""

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..operators import operator

_ATTRIBUTE = "_muon_zero_holder"


class Holder(Protocol):
    """The runtime state of one parameter, as ops of a graph call it."""

    def await_refresh(self, read: Tensor | None = None) -> None:
        """Wait until the resident weight, and ``read``, which a graph reads in its place, equal the shards."""

    def fetch(self, grad: Tensor, out: Tensor) -> Tensor:
        """Write the offloaded momentum to ``out`` and return it; ``grad`` is the gradient to be mixed with it."""

    def notify(self, what: str, *facts: Any) -> None:
        """Pass on ``facts`` of kind ``what`` that an op found about the parameter during its backward."""

    def to_reduce(self, grad: Tensor) -> Tensor | None:
        """Return what an eager backward reduces: the full weight's gradient ``grad``, plus the unreduced sum of earlier
        micro-batches. None where the holder adds ``grad`` to that sum, which stays unreduced."""

    def reducing(self) -> AbstractContextManager[object]:
        """Return the context in which a backward outside of this backend's graphs reduces."""


def hold(state: Tensor, holder: Holder) -> None:
    """Attach ``holder`` to this tensor object, by a weak reference."""
    # Graphs are traced with fake tensors in place of ``state``, so no reference to the holder enters one.
    setattr(state, _ATTRIBUTE, weakref.ref(holder))


def holder_of(state: object) -> Holder | None:
    """Return the holder that :func:`hold` attached to this tensor, or None."""
    reference = getattr(state, _ATTRIBUTE, None) if isinstance(state, Tensor) else None
    return None if reference is None else reference()


def _fetch(state: Tensor, grad: Tensor) -> Tensor:
    holder = holder_of(state)
    if holder is None:
        raise RuntimeError("muon_zero::fetch: the optimizer that keeps this momentum is gone")
    return holder.fetch(grad, _like(state, grad))


def _like(state: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


#: ``fetch(state, grad)``: an offloaded momentum, at its use in a graph. ``state`` is empty and identifies the holder;
#: the result is new memory shaped like ``grad``, freed after its last use. The holder receives ``grad``, which the
#: momentum is about to be mixed with.
FETCH = operator("fetch(Tensor state, Tensor grad) -> Tensor", _fetch, _like, calls_python=True)
