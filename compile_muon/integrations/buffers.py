"""Buffers that training writes, BatchNorm's statistics, where ranks have batches of their own."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

__all__ = ["take_those_of_rank_0"]


def take_those_of_rank_0(model: nn.Module) -> None:
    """What is evaluated has the persistent buffers that a checkpoint has; collective over all ranks.

    DDP does it before every forward; here ranks are free between evaluations.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    saved = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            dist.broadcast(buffer, 0)
