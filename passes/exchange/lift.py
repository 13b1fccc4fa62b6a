"""Copies of offloaded shards from host to device.

With ``offload_param``, shards are CUDA tensors whose memory is pinned host memory (unified addressing), which a GPU
reads and writes over its link: optimizers, checkpoints and weight averages need no special case. A gather, which reads
its shards at every use of the weights, reads copies that the copy engine makes ahead.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..operators import operator

_ARRIVED = "_muon_zero_arrived"


@cache
def _copies(device: torch.device) -> torch.Stream:
    """Return the one stream of the device on which all copies of shards queue up."""
    return torch.Stream(device)


def _lift(shards: Sequence[Tensor]) -> list[Tensor]:
    copies = _like(shards)
    if not shards[0].is_cuda:
        return [out.copy_(shard) for out, shard in zip(copies, shards, strict=True)]
    stream = _copies(shards[0].device)
    # The allocator may reuse memory that queued kernels still read, and the step may still be writing the shards.
    stream.wait_event(torch.accelerator.current_stream(shards[0].device).record_event())
    with stream:
        for out, shard in zip(copies, shards, strict=True):
            out.copy_(shard, non_blocking=True)
        arrived = stream.record_event()
    for out in copies:
        setattr(out, _ARRIVED, arrived)
    return copies


def _like(shards: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(shard, memory_format=torch.contiguous_format) for shard in shards]


def land(tensors: Sequence[Tensor]) -> None:
    """Make the current stream wait for the copies among ``tensors`` that :data:`LIFT` started."""
    for arrived in {event for x in tensors if (event := getattr(x, _ARRIVED, None)) is not None}:
        torch.accelerator.current_stream(tensors[0].device).wait_event(arrived)


#: ``lift(shards)``: copies on the device, still under way at return. Only ``pack`` may read them, as it calls ``land``.
LIFT = operator("lift(Tensor[] shards) -> Tensor[]", _lift, _like, calls_python=True)
