"""Shards in host memory, on their way to the device.

Weights that ``offload_param`` keeps in host memory are tensors of the device all the same: their memory is pinned, and
a GPU reads and writes it over its link (unified addressing). So optimizers, checkpoints and averages see what they
always see. What is read for every use, by the gathers of forward and backward, is copied ahead by a copy engine.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["LIFT", "land"]

_ARRIVED = "_muon_zero_arrived"

_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")
_LIBRARY.define("lift(Tensor shard) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))


@cache
def _copies(device: torch.device) -> torch.Stream:
    """Of the device, beside the one that computes. A copy of every shard takes its turn on it."""
    return torch.Stream(device)


@torch.library.impl(_LIBRARY, "lift", "CompositeExplicitAutograd")
def _lift(shard: Tensor) -> Tensor:
    out = torch.empty_like(shard, memory_format=torch.contiguous_format)
    if not shard.is_cuda or not shard.numel():
        return out.copy_(shard)
    stream = _copies(shard.device)
    # The memory may have been let go by work that is not done, and the step may be writing the shard.
    stream.wait_event(torch.accelerator.current_stream(shard.device).record_event())
    with stream:
        out.copy_(shard, non_blocking=True)
        setattr(out, _ARRIVED, stream.record_event())
    return out


@torch.library.register_fake("muon_zero::lift", lib=_LIBRARY)
def _(shard: Tensor) -> Tensor:
    return torch.empty_like(shard, memory_format=torch.contiguous_format)


def land(lifted: Tensor) -> Tensor:
    """The same tensor, for work that is queued from now on: behind the copy, if :data:`LIFT` made it."""
    arrived = getattr(lifted, _ARRIVED, None)
    if arrived is not None:
        torch.accelerator.current_stream(lifted.device).wait_event(arrived)
    return lifted


#: A copy of a shard on the device. It is under way when this returns, and only ``pack`` may read it.
LIFT = torch.ops.muon_zero.lift.default
