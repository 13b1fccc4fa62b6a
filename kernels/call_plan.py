"""What one Newton-Schulz call does, with every choice that does not depend on a shape already made."""

from dataclasses import dataclass

import torch

from .stability import Triple

__all__ = ["AUTO_LIMIT", "MEMORY_LIMIT", "Plan"]

MEMORY_LIMIT = 2**30
#: to the operator: MEMORY_LIMIT, or what a graph that it is part of has room for
AUTO_LIMIT = -1


@dataclass(frozen=True)
class Plan:
    """One call's settings, resolved.

    Args:
        steps: (a, b, c) of each step.
        method: "standard", "gram", or "auto" where either will do and the shape decides.
        dtype: of the products and the result.
        eps: smallest norm that X is divided by.
        safety: multiplies the norm.
        restarts: numbers of steps after which the gram form restarts.
        backend: "aten" or "triton", or "auto" for whichever is expected to be fastest.
        memory_limit: bytes that may be held on a GPU beside inputs and results; one matrix at a time is always taken.
    """

    steps: tuple[Triple, ...]
    method: str
    dtype: torch.dtype
    eps: float
    safety: float = 1.0
    restarts: tuple[int, ...] = ()
    backend: str = "auto"
    memory_limit: int = MEMORY_LIMIT
