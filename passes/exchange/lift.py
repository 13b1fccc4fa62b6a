"""Shards in host memory, on their way to the device.

Weights that ``offload_param`` keeps in host memory are tensors of the device all the same: their memory is pinned, and
a GPU reads and writes it over its link (unified addressing). So optimizers, checkpoints and averages see what they
always see. What is read for every use, by the gathers of forward and backward, is copied ahead by a copy engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ["LIFT", "land"]

_ARRIVED = "_muon_zero_arrived"

_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")
_LIBRARY.define("lift(Tensor[] shards) -> Tensor[]", tags=(torch.Tag.cudagraph_unsafe,))


@cache
def _copies(device: torch.device) -> torch.Stream:
    """Of the device, beside the one that computes. A copy of every shard takes its turn on it."""
    return torch.Stream(device)


@torch.library.impl(_LIBRARY, "lift", "CompositeExplicitAutograd")
def _lift(shards: Sequence[Tensor]) -> list[Tensor]:
    found = [torch.empty_like(shard, memory_format=torch.contiguous_format) for shard in shards]
    if not shards[0].is_cuda:
        return [out.copy_(shard) for out, shard in zip(found, shards, strict=True)]
    stream = _copies(shards[0].device)
    # The memory may have been let go by work that is not done, and the step may be writing the shards.
    stream.wait_event(torch.accelerator.current_stream(shards[0].device).record_event())
    with stream:
        for out, shard in zip(found, shards, strict=True):
            out.copy_(shard, non_blocking=True)
        arrived = stream.record_event()
    for out in found:
        setattr(out, _ARRIVED, arrived)
    return found


@torch.library.register_fake("muon_zero::lift", lib=_LIBRARY)
def _(shards: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(shard, memory_format=torch.contiguous_format) for shard in shards]


def land(tensors: Sequence[Tensor]) -> None:
    """Work that is queued from now on comes behind the copies of those that :data:`LIFT` made."""
    for arrived in {event for x in tensors if (event := getattr(x, _ARRIVED, None)) is not None}:
        torch.accelerator.current_stream(tensors[0].device).wait_event(arrived)


#: Copies of shards on the device. They are under way when this returns, and only ``pack`` may read them.
LIFT = torch.ops.muon_zero.lift.default
