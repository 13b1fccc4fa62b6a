"""The log of the device that computes nothing: its operations, and the places where the host waited for it."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from library import LIBRARY
from order import Access, Op
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["KINDS", "Device", "Touches"]

KINDS = (
    "kernel", "triton", "gemm", "nccl", "copy", "memset", "record", "wait", "sync", "malloc", "free", "host_alloc",
    "graph", "module",
)  # fmt: skip

#: operators that touch no memory, whatever their schemas say, or whose collectives and copies the library notes itself
_TOUCH_NOTHING = (
    "c10d",
    "detach",
    "empty",
    "_record_function_enter",
    "await_refresh",
    "muon_zero.lift",
    "muon_zero.bring_back",
    "muon_zero.move_out",
    "await_move",
)

_ROOT = Path(__file__).resolve().parents[1]
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_longlong)


class _Op(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int), ("stream", ctypes.c_int), ("name", ctypes.c_char_p), ("a", ctypes.c_longlong),
        ("b", ctypes.c_longlong), ("touches", ctypes.c_int), ("capturing", ctypes.c_int),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("start", ctypes.c_ulonglong), ("nbytes", ctypes.c_ulonglong), ("write", ctypes.c_int)]


@cache
def _in_project(file: str) -> str | None:
    """Return the path of a file of the package in the project; None of other code."""
    path = Path(file).resolve()
    if _ROOT not in path.parents or "rehearse" in file or "site-packages" in file:
        return None
    return str(path.relative_to(_ROOT))


#: the signature of a Triton kernel in Inductor's cache
_KERNEL = re.compile(r"^def (triton_\w+)\((.*?)\):", re.MULTILINE)


@cache
def _only_read() -> dict[str, list[bool]]:
    """Return which pointers each of Inductor's kernels only reads, by its name; [] where two kernels share a name."""
    read_only: dict[str, list[bool]] = {}
    for file in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.py"):
        for name, parameters in _KERNEL.findall(file.read_text()):
            pointers = [parameter.strip() for parameter in parameters.split(",") if "_ptr" in parameter]
            reads = [parameter.startswith("in_ptr") for parameter in pointers]
            if read_only.setdefault(name, reads) != reads:
                read_only[name] = []
    return read_only


class Device:
    """The log of the library in place of CUDA's since :meth:`clear`."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(str(LIBRARY))
        self.waits: Counter[str] = Counter()  # of the host for the device, by place in the source
        self._listener = _LISTENER(self._waited)  # the library keeps its address
        self.lib.fg_callback(self._listener)

    def _waited(self, kind: int, name: bytes, stream: int, nbytes: int) -> None:
        if name == b"cudaStreamSynchronize" and self._copies():
            return  # the second half of a copy to the host, which was counted
        # Cheap, since it runs inside of steps that are timed.
        frame: FrameType | None = sys._getframe()
        while frame is not None and (ours := _in_project(frame.f_code.co_filename)) is None:
            frame = frame.f_back
        place = "?" if frame is None else f"{ours}:{frame.f_lineno}"
        self.waits[f"{name.decode()} at {place}"] += 1
        self._last = name

    _last = b""

    def _copies(self) -> bool:
        was, self._last = self._last, b""
        return was.startswith(b"copy D2H")

    def clear(self) -> None:
        """Empty the log."""
        self.lib.fg_clear()
        self.waits.clear()

    def ops(self) -> list[Op]:
        """Return the logged operations in the order in which the host asked for them."""
        ops, op, access = [], _Op(), _Access()
        clock = (ctypes.c_uint * 4096)()
        for i in range(self.lib.fg_count()):
            self.lib.fg_get(i, ctypes.byref(op))
            touches = []
            for k in range(op.touches):
                self.lib.fg_touch(i, k, ctypes.byref(access))
                touches.append(Access(access.start, access.nbytes, access.write != 0))
            length = self.lib.fg_clock(i, clock, len(clock))
            name = (op.name or b"?").decode()
            kind = KINDS[op.kind]
            reads = _only_read().get(name, []) if kind == "triton" else []
            if len(reads) == len(touches):
                touches = [replace(each, writes=not read) for each, read in zip(touches, reads, strict=True)]
            ranks = op.b if kind == "nccl" else 0
            ops.append(Op(kind, op.stream, name, op.a, ranks, tuple(clock[:length]), tuple(touches)))
        return ops

    def next_split(self, size: int, rank: int) -> None:
        """Set the size and this rank's index of the next communicator to be split off, which ranks would agree on."""
        self.lib.fg_split(size, rank)

    @contextmanager
    def without_waits(self, stream: int) -> Iterator[None]:
        """Ignore the waits of a stream inside this block: a mistake that must be found."""
        self.lib.fg_no_wait(stream)
        try:
            yield
        finally:
            self.lib.fg_no_wait(-1)


class Touches(TorchDispatchMode):
    """Logs the memory that each torch operator touches, since a kernel's arguments do not tell it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if func.is_view or any(part in name for part in _TOUCH_NOTHING):
            return out
        arguments = zip(func._schema.arguments, args, strict=False)
        written_ids = {
            id(leaf)
            for argument, value in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
        }
        touched = [(leaf, id(leaf) in written_ids) for leaf in tree_leaves((args, kwargs))]
        touched += [(leaf, True) for leaf in tree_leaves(out)]
        accesses = [
            _Access(x.data_ptr(), x.numel() * x.element_size(), int(writes))
            for x, writes in touched
            if isinstance(x, torch.Tensor) and x.is_cuda and x.numel()
        ]
        if accesses:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self._device.lib.fg_note_touch(
                f"op {name}".encode(), stream, len(accesses), (_Access * len(accesses))(*accesses)
            )
        return out
