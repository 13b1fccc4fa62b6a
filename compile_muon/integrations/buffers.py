"""Buffers that training writes, such as BatchNorm's statistics, which differ between ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from compile_muon.weights.full import check_alike


def take_those_of_rank_0(model: nn.Module) -> None:
    """Broadcast rank 0's persistent buffers, those of a checkpoint, ahead of an evaluation; collective over all ranks.

    DDP does so before every forward. Raises an UnsupportedModelError, on all ranks, if a rank has other buffers.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    saved = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    check_alike(buffers, dist.group.WORLD)
    for buffer in buffers.values():
        dist.broadcast(buffer, 0)
