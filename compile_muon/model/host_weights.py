"""Weights in pinned host memory that a GPU reads and writes directly (unified virtual addressing)."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from compile_muon.errors import OffloadError


class _Pages:
    """Pinned host memory behind CUDA's array interface, so that torch wraps it as a tensor of the GPU.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html. Pages are registered with the driver at their
    exact size: torch's pinned memory comes in powers of two, half of it unused at worst.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        begin = self._memory.data_ptr()
        if error := int(torch.cuda.cudart().cudaHostRegister(begin, nbytes, 0)):
            raise OffloadError(
                f"offload_param = 'cpu': the driver cannot pin {nbytes:,} more bytes of host memory "
                f"(cudaError {error}); use more ranks, or leave it out"
            )
        weakref.finalize(self, _unpin, begin)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (begin, False), "version": 3}


def _unpin(begin: int) -> None:
    """Unregister the pages once queued work no longer uses them."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(begin)


def on_host(values: Tensor) -> Tensor:
    """Return a copy of contiguous ``values`` in pinned host memory that still counts as a tensor of its GPU. CPU
    tensors, empty ones and fake ones (plans) come back as they are."""
    if not values.is_cuda or not values.numel() or isinstance(values, FakeTensor):
        return values
    # as_tensor keeps `_Pages` alive as long as the tensor; vLLM holds weights the same way ("UVA offloading").
    memory = torch.as_tensor(_Pages(values.nbytes), device=values.device)
    return memory.view(values.dtype).view(values.shape).copy_(values)
