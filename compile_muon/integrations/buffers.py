"""Buffers that training writes, BatchNorm's statistics, where ranks have batches of their own."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from compile_muon.weights.named_tensors import check_alike

__all__ = ["take_those_of_rank_0"]


def take_those_of_rank_0(model: nn.Module) -> None:
    """What is evaluated has the persistent buffers that a checkpoint has; collective over all ranks.

    DDP does it before every forward; here ranks are free between evaluations.

    Raises:
        UnsupportedModelError: a rank has other buffers; on all of them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    saved = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    check_alike(buffers, dist.group.WORLD)
    for buffer in buffers.values():
        dist.broadcast(buffer, 0)
