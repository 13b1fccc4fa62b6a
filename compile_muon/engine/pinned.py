"""Numbers in pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pinned_numbers(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers in host memory, pinned for CUDA so that copying them to ``device`` does not block the host."""
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
