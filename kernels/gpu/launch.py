"""A kernel launch as a value: made by the launchers of this package, then run, or compiled without a GPU.

Inside :func:`noting` launches are recorded and not run. With tensors on the device "meta" the record tells, without a
GPU, what a function would launch on one.

Kernels over lists of tensors take tuples of addresses and sizes: each program first finds its tensor
(:func:`tensor_of_program`), then its values (:func:`decoded_at`). Triton compiles a kernel anew for each length of a
tuple, and for each pattern in it of aligned tensors, or of integers that are 1, multiples of 16, or wider than 32 bits.
So tuples are :func:`encoded`: of one length, with addresses as integers, and with integers of one pattern.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: address in place of none, of an empty tensor or one on "meta": wider than 32 bits, as real addresses are
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


def encoded(values: Sequence[Any], count: int) -> tuple[Any, ...]:
    """Return ``count`` numbers: ``2 n + 3``, which is never 1 nor a multiple of 16, for an integer n or a tensor at
    address n; floats unchanged. Fewer ``values`` are filled up with copies of the first."""

    def code(x: Any) -> Any:
        if isinstance(x, Tensor):
            x = _ELSEWHERE if x.is_meta else x.data_ptr() or _ELSEWHERE
        return 2 * x + 3 if isinstance(x, int) else x

    codes = list(map(code, values))
    return (*codes, *codes[:1] * (count - len(codes)))


def first_programs(programs: Sequence[int], count: int) -> tuple[int, ...]:
    """Return each tensor's first program, :func:`encoded`, for tensors of ``programs``; behind them their sum."""
    starts = list(accumulate(programs, initial=0))
    return encoded(starts + starts[-1:] * count, count)[:count]


@triton.jit
def tensor_of_program(starts):
    """Return the index of this program's tensor, and its number among the tensor's programs; ``starts``: by
    :func:`first_programs`."""
    program = tl.program_id(0)
    index = program * 0
    first = program * 0
    for i in tl.static_range(1, len(starts)):
        start = (starts[i] >> 1) - 1
        index = tl.where(program >= start, i, index)
        first = tl.where(program >= start, start, first)
    return index, program - first


@triton.jit
def decoded_at(values, index):
    """Return entry ``index`` of an :func:`encoded` tuple decoded: a number, or an address as an integer."""
    value = values[0]
    for i in tl.static_range(1, len(values)):
        value = tl.where(index == i, values[i], value)
    # The caller casts to a pointer: a cast here would lose the caller's tl.multiple_of.
    if value.dtype == tl.float32:
        return value
    else:
        return (value >> 1) - 1


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
            # Triton's allocator is a context variable: in a copied context the user's stays as it is.
            copy_context().run(self._start) if self.scratch else self._start()

    def _start(self) -> None:
        if self.scratch:
            device = self.on.device
            triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=device))
        self.kernel[(self.programs,)](*self.arguments, **self.constants)
