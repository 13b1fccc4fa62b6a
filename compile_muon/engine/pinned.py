"""Numbers of the host on their way to a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["pinned_numbers"]


def pinned_numbers(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """In host memory, from which a GPU copies them without a wait of the host."""
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
