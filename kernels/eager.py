"""Whether a kernel may be launched here and now, rather than written into somebody's graph.

``muon_momentum`` and ``muon_apply`` are plain aten wherever they are traced, so that compilers fuse them with their
neighbours; only outside of all tracing is there anything to gain from a kernel of ours.
"""

import torch
from torch import Tensor

# torch 2.11 to 2.13; private: no public function tells whether a dispatch mode (fake tensors, make_fx) is active.
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .dispatch import triton_kernels

__all__ = ["may_launch", "not_traced"]


def may_launch(tensors: list[Tensor]) -> bool:
    """Whether nothing traces these tensors, and Triton's kernels cover the devices of all."""
    if not not_traced(tensors):  # first, so that tracing never looks for kernels
        return False
    gpu = triton_kernels()
    return gpu is not None and all(gpu.products_on(x.device) is not None for x in tensors)


def not_traced(tensors: list[Tensor]) -> bool:
    """Whether nothing observes what is done to these tensors: no torch.compile, no mode, no subclass."""
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    return plain and not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None
