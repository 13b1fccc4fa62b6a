"""The plan of a Newton-Schulz call: every choice that does not depend on a shape, already made."""

from dataclasses import dataclass

import torch

from .stability import Triple

MEMORY_LIMIT = 2**30
#: tells the operator to take MEMORY_LIMIT, or as many bytes as the graph around it has room for
AUTO_LIMIT = -1


@dataclass(frozen=True)
class Plan:
    """The resolved settings of one Newton-Schulz call."""

    steps: tuple[Triple, ...]  # (a, b, c) of each step
    method: str  # "standard", "gram", or "auto" where either will do and the shape decides
    dtype: torch.dtype  # of the products and the result
    eps: float  # smallest norm that X is divided by
    safety: float = 1.0  # multiplies the norm
    restarts: tuple[int, ...] = ()  # numbers of steps after which the gram form restarts
    backend: str = "auto"  # "aten" or "triton"; "auto" for the one expected to be fastest
    memory_limit: int = MEMORY_LIMIT  # bytes of work memory on a GPU; a single matrix may exceed it
