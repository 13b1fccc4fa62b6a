"""DTensors and their shards: conversions, counts of edits, and attributes that users set; numbers for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

#: attributes of DTensor and ``ShardedParameter`` objects that users did not set
_OF_DTENSORS = frozenset({"_local_tensor", "_spec", "uncounted_edits", "shown", "origin", "averaging", "copy_of"})


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))[: len(shape)] if shape else ()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the shard behind a DTensor; a plain tensor is its own shard."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has storage: it is neither on the meta device nor fake, as in plans."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Let a block inside ``torch.inference_mode()`` make ordinary tensors, which count edits and can train. Gradients
    stay off there; elsewhere nothing changes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def edits_of(tensor: Tensor) -> int:
    """Return a number that grows with every in-place edit; constant for inference tensors, which count none."""
    if tensor.is_inference():
        return 0
    if not isinstance(tensor, DTensor):
        return tensor._version
    # In-place operators of the DTensor count on it alone, writes to the shard on the shard alone. A ShardedParameter
    # counts the rest; read by name, since its module imports this one.
    return tensor._version + local_tensor(tensor)._version + getattr(tensor, "uncounted_edits", 0)


def like_parameter(param: Tensor, shard: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """Return ``shard`` as the kind of tensor that ``param.grad`` is. ``mesh``: the same ranks on the shard's device, by
    default the mesh of ``param``."""
    if not isinstance(param, DTensor):
        return shard
    return DTensor.from_local(
        shard, mesh or param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def user_attributes(param: Tensor) -> dict[str, Any]:
    """Return the attributes that users set on a parameter."""
    return {key: value for key, value in vars(param).items() if key not in _OF_DTENSORS}


def pinned_numbers(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers in host memory, pinned for CUDA so that copying them to ``device`` does not block the host."""
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
