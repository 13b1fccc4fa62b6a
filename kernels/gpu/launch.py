"""A kernel launch as a value: made by the launchers of this package, then run, or compiled without a GPU.

Inside :func:`noting` launches are recorded and not run. With tensors on the device "meta" the record tells, without a
GPU, what a function would launch on one.

Kernels over lists of tensors take tuples of addresses and sizes, and each program first finds its tensor. Triton
compiles a kernel for each length of a tuple, and for each pattern in it of aligned tensors, or of integers that are 1,
multiples of 16, or wider than 32 bits. So addresses are integers, integers are :func:`coded`, and tuples
:func:`filled`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Launch", "addresses", "coded", "decoded", "element_type", "filled", "noting", "where_it_runs"]

T = TypeVar("T")

#: the address of a tensor without memory, empty or on "meta": wider than 32 bits, as real addresses are
_ELSEWHERE = 1 << 40

_noted: ContextVar[tuple[torch.device, list["Launch"]] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting(device: torch.device) -> Iterator[list["Launch"]]:
    """Record the launches of a ``with`` block in place of running them; "meta" tensors stand for ones of ``device``."""
    launches: list[Launch] = []
    token = _noted.set((device, launches))
    try:
        yield launches
    finally:
        _noted.reset(token)


def where_it_runs(device: torch.device) -> torch.device:
    """Return ``device``, or for "meta" inside :func:`noting` the device that it stands for."""
    noted = _noted.get()
    return noted[0] if noted is not None and device.type == "meta" else device


def filled(values: Sequence[T], count: int) -> tuple[T, ...]:
    """Fill ``values`` up to ``count``: integers, which are sizes, with :func:`coded` zeros, others with the first."""
    padding: Any = coded(0) if isinstance(values[0], int) else values[0]
    return (*values, *[padding] * (count - len(values)))


def coded(number: int) -> int:
    """Return ``2 number + 3``, which is never 1 nor a multiple of 16."""
    return 2 * number + 3


def addresses(tensors: Sequence[Tensor], count: int) -> tuple[int, ...]:
    """Return the :func:`coded` addresses of tensors, filled up to ``count`` with the first one."""
    coded_addresses = [coded(x.data_ptr() or _ELSEWHERE) for x in tensors]
    return (*coded_addresses, *coded_addresses[:1] * (count - len(coded_addresses)))


@triton.jit
def decoded(address):
    """Return the address that :func:`addresses` coded, as an integer."""
    # The caller casts to a pointer: a cast here would lose the caller's tl.multiple_of.
    return (address >> 1) - 1


def element_type(x: Tensor) -> tl.dtype:
    """Return Triton's dtype of a tensor's elements, for the pointer type of its address."""
    return getattr(tl, str(x.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Launch:
    """The call ``kernel[(programs,)](*arguments, **constants)`` on the device of ``on``."""

    kernel: Any  # a Triton kernel
    programs: int
    on: Tensor
    arguments: tuple[Any, ...]  # at run time
    constants: dict[str, Any] = field(default_factory=dict)  # constexprs, and Triton's num_warps and num_stages
    scratch: bool = False  # the kernel makes tensor descriptors, for which Triton asks for memory at every launch

    def run(self) -> None:
        if not self.programs:
            return
        if (noted := _noted.get()) is not None:
            noted[1].append(self)
            return
        with torch.cuda.device_of(self.on):  # Triton launches on the current device, whatever its arguments are on
            if self.scratch:
                # Triton's allocator is a context variable: in a copied context the user's stays as it is.
                copy_context().run(self._start_with_scratch)
            else:
                self._start()

    def _start(self) -> None:
        self.kernel[(self.programs,)](*self.arguments, **self.constants)

    def _start_with_scratch(self) -> None:
        device = self.on.device
        triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=device))
        self._start()

    def compile(self) -> Any:
        """Compile the kernel that ``run`` would start, for the target of Triton's active driver."""
        return self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.constants)
