"""A kernel launch as a value: made by the launchers of this package, then run, or compiled without a GPU.

Inside :func:`noting` launches are noted and not run. With tensors on the device "meta" that tells what a function would
launch on a GPU, without memory or time of it.
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

#: the address of a tensor without memory, empty or on "meta": Triton compiles other kernels for numbers of 32 bits
_ELSEWHERE = 1 << 40

_noted: ContextVar[tuple[torch.device, list["Launch"]] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting(device: torch.device) -> Iterator[list["Launch"]]:
    """Launches of this block, which do not run; tensors on "meta" are taken for those of ``device``."""
    launches: list[Launch] = []
    token = _noted.set((device, launches))
    try:
        yield launches
    finally:
        _noted.reset(token)


def where_it_runs(device: torch.device) -> torch.device:
    """``device``; inside :func:`noting` the one that "meta" is taken for."""
    noted = _noted.get()
    return noted[0] if noted is not None and device.type == "meta" else device


def filled(values: Sequence[T], count: int) -> tuple[T, ...]:
    """``values``, and the first one again up to ``count``; of numbers what :func:`coded` makes of 0.

    Triton compiles a kernel for each number of values in a tuple: so one serves all.
    """
    rest: Any = coded(0) if isinstance(values[0], int) else values[0]
    return (*values, *[rest] * (count - len(values)))


def coded(number: int) -> int:
    """``2 number + 3``, odd and not 1: Triton compiles for each pattern of ones and of multiples of 16 in a tuple."""
    return 2 * number + 3


def addresses(tensors: Sequence[Tensor], count: int) -> tuple[int, ...]:
    """:func:`coded` addresses of tensors, the first one again up to ``count``, for :func:`decoded`.

    Of tensors in a tuple Triton compiles for each pattern of those that begin at a multiple of 16 bytes.
    """
    own = [coded(x.data_ptr() or _ELSEWHERE) for x in tensors]
    return (*own, *own[:1] * (count - len(own)))


@triton.jit
def decoded(address):
    """What :func:`addresses` has coded. The cast to a pointer stands where it is read: here Triton would forget of how
    many bytes the pointer is said to be a multiple."""
    return (address >> 1) - 1


def element_type(x: Tensor) -> tl.dtype:
    """Of a tensor, for the pointer that its address is cast to."""
    return getattr(tl, str(x.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Launch:
    """``kernel[(programs,)](*arguments, **constants)`` on the device of ``on``.

    Args:
        kernel: a Triton kernel.
        programs: how many.
        on: a tensor of the device.
        arguments: of the kernel, at run time.
        constants: its constexprs and Triton's num_warps and num_stages.
        scratch: the kernel makes tensor descriptors, for which Triton asks for memory at every launch.
    """

    kernel: Any
    programs: int
    on: Tensor
    arguments: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    scratch: bool = False

    def run(self) -> None:
        if not self.programs:
            return
        if (noted := _noted.get()) is not None:
            noted[1].append(self)
            return
        with torch.cuda.device_of(self.on):  # Triton launches on the current device, whatever its arguments are on
            if self.scratch:
                copy_context().run(self._start_with_scratch)  # Triton's allocator is a context variable: ours ends here
            else:
                self._start()

    def _start(self) -> None:
        self.kernel[(self.programs,)](*self.arguments, **self.constants)

    def _start_with_scratch(self) -> None:
        device = self.on.device
        triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=device))
        self._start()

    def compile(self) -> Any:
        """The compiled kernel that ``run`` would start, for the target of Triton's active driver."""
        return self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.constants)
