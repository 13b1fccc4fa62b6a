"""Compilation of kernels ahead of their launch, by processes that need no GPU, into Triton's cache.

A :class:`Job` is a launch without its tensors: of those Triton's compiler knows the dtype, and whether they begin at a
multiple of 16 bytes. Each job has a file beside Triton's cache. Whoever compiles it holds a lock on the file and writes
into it when done, so ranks that share a file system compile each kernel once, and a run whose predecessor did has
nothing left to do. The lock goes with the process that holds it, and where a file system has none each compiles for
itself: nobody waits for anybody who does not work.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Launch

__all__ = ["Job", "NoDevice", "Pointer", "compile_job", "jobs_of"]


@dataclass(frozen=True)
class Pointer:
    """What Triton's compiler asks of a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Job:
    """A kernel to compile.

    Args:
        target: architecture.
        cache: Triton's folder.
        module, name: of the kernel.
        arguments, constants: of a launch, pointers in the place of tensors.
        key: of all that decides what is compiled.
    """

    target: GPUTarget
    cache: Path
    module: str
    name: str
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    key: str

    @property
    def file(self) -> Path:
        return self.cache / "compile_muon" / f"{self.name}-{self.key}"

    @property
    def done(self) -> bool:
        """Whether somebody has compiled it."""
        with contextlib.suppress(OSError):
            return self.file.stat().st_size > 0
        return False


def jobs_of(launches: Sequence[Launch], target: GPUTarget, cache: Path) -> list[Job]:
    """One for each kernel that these launches need and nobody has compiled yet.

    Args:
        launches: with tensors on any device, "meta" among them.
        target: that they are for.
        cache: the folder where Triton looks when they are launched.
    """
    jobs: dict[str, Job] = {}
    for launch in launches:
        kernel, arguments = launch.kernel, _without_tensors(launch.arguments)
        decides = (triton.__version__, kernel.cache_key, target, _known(arguments), sorted(launch.constants.items()))
        key = hashlib.sha256(repr(decides).encode()).hexdigest()[:24]
        if key not in jobs:
            name = kernel.fn.__name__
            jobs[key] = Job(target, cache, kernel.fn.__module__, name, arguments, launch.constants, key)
    return [job for job in jobs.values() if not job.done]


def compile_job(job: Job) -> None:
    """In a process of its own kind: what it has compiled is in the cache, by it or by another one."""
    kernel = getattr(import_module(job.module), job.name)
    driver: Any = triton.runtime.driver
    before = driver._active  # without a property: asking for it would look for a GPU
    with _locked(job.file) as file, triton.knobs.cache.scope():
        if file.tell():
            return
        triton.knobs.cache.dir = str(job.cache)
        driver.set_active(NoDevice(job.target))
        try:
            kernel.warmup(*job.arguments, grid=(1,), **job.constants)
        finally:
            driver.set_active(before)
        file.write("compiled\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Any]:
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0, 2)
        yield file


def _without_tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_tensors, value))
    if isinstance(value, Tensor):
        return Pointer(value.dtype, value.data_ptr() % 16)
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_without_tensors(value.base))
    return value


def _known(value: Any) -> Any:
    """What Triton compiles for, of an argument."""
    if isinstance(value, tuple):
        return tuple(map(_known, value))
    if isinstance(value, Pointer):
        return value.dtype, value.address == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape), len(value.shape)
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value)


class NoDevice(DriverBase):
    """Tells Triton what to compile for, and can launch nothing."""

    def __init__(self, target: GPUTarget):
        super().__init__()
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is launched")
