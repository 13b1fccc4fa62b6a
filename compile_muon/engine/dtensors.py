"""DTensors and their shards, one as the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = [
    "contiguous_stride",
    "edits_of",
    "has_memory",
    "like_parameter",
    "local_tensor",
    "ordinary_tensors",
    "user_attributes",
]

#: What a DTensor keeps among the attributes of its own, and what a ``ShardedParameter`` does.
_OF_DTENSORS = frozenset({"_local_tensor", "_spec", "uncounted_edits", "shown", "origin", "averaging", "copy_of"})


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))[: len(shape)] if shape else ()


def local_tensor(tensor: Tensor) -> Tensor:
    """The shard behind a DTensor; a plain tensor is its own shard."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_memory(tensor: Tensor) -> bool:
    """Whether there is anything behind it: not on the meta device, and not fake, as in plans."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Inside ``torch.inference_mode()``, have this block make tensors that outlive it: they count edits, and train.

    Gradients stay off there, and as they are elsewhere.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def edits_of(tensor: Tensor) -> int:
    """Grows with every edit in place: what a DTensor does to itself PyTorch does not count on its shard.

    Of what was made inside ``torch.inference_mode()`` nobody counts edits.
    """
    if tensor.is_inference():
        return 0
    if not isinstance(tensor, DTensor):
        return tensor._version
    # A ShardedParameter counts the rest; by name, because that module needs this one.
    return tensor._version + tensor._local_tensor._version + getattr(tensor, "uncounted_edits", 0)


def like_parameter(param: Tensor, shard: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """``shard`` as the kind of tensor that ``param.grad`` is.

    Args:
        mesh: of the same ranks, on the shard's device; default: that of ``param``.
    """
    if not isinstance(param, DTensor):
        return shard
    return DTensor.from_local(
        shard, mesh or param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def user_attributes(param: Tensor) -> dict[str, Any]:
    """What was put on a parameter from outside."""
    return {key: value for key, value in vars(param).items() if key not in _OF_DTENSORS}
