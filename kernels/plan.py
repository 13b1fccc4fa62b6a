"""What one Newton–Schulz call does, with every choice that does not depend on a shape already made."""

from dataclasses import dataclass

import torch

from .stability import Triple

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """`method` is "standard", "gram", or "auto" where either will do and the shape decides."""

    steps: tuple[Triple, ...]
    method: str
    dtype: torch.dtype
    eps: float
    safety: float = 1.0
    restarts: tuple[int, ...] = ()
