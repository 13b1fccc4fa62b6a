"""Weights in host memory that a GPU reads and writes by itself."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from compile_muon.errors import OffloadError

__all__ = ["on_host"]


class _Pages:
    """Memory of the process, as a GPU finds it: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.

    Registered with the driver as it is. torch's pinned memory comes in powers of two, half of it unused at worst.
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
    """Once work that is queued has no use for it."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(begin)


def on_host(values: Tensor) -> Tensor:
    """A copy in host memory, of the same device: with unified addressing a pinned address is one of the GPU's, too.

    Args:
        values: contiguous; what a GPU does not hold, or a plan, is in host memory already.
    Raises:
        OffloadError: as much memory cannot be pinned.
    """
    if not values.is_cuda or not values.numel() or isinstance(values, FakeTensor):
        return values
    # The tensor holds the pages; vLLM keeps weights so ("UVA offloading").
    memory = torch.as_tensor(_Pages(values.nbytes), device=values.device)
    return memory.view(values.dtype).view(values.shape).copy_(values)
