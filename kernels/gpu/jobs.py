"""Compilation of kernels ahead of their launch, by processes that need no GPU, into Triton's cache.

A :class:`Job` is a launch without its tensors: Triton's compiler needs only their dtype, and whether their addresses
are multiples of 16 bytes. Each job has a file beside Triton's cache. The compiling process holds a lock on the file and
writes to it when done, so ranks that share a file system compile each kernel once, and a later run compiles nothing.
The lock of a dead process is released by the system. Without file locks each process compiles by itself.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Launch


@dataclass(frozen=True)
class Pointer:
    """A stand-in for a tensor, with the attributes that Triton's compiler reads."""

    dtype: torch.dtype
    address: int  # modulo 16

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Job:
    """A kernel to compile."""

    target: GPUTarget  # architecture
    cache: Path  # Triton's cache folder
    module: str  # where the kernel is defined
    name: str  # of the kernel
    arguments: tuple[Any, ...]  # of a launch, with a Pointer in the place of each tensor
    constants: dict[str, Any]  # of a launch
    key: str  # digest of all that the compiled code depends on

    @property
    def file(self) -> Path:
        return self.cache / "compile_muon" / f"{self.name}-{self.key}"

    @property
    def done(self) -> bool:
        """True once a process has compiled the kernel."""
        with contextlib.suppress(OSError):
            return self.file.stat().st_size > 0
        return False


def jobs_of(launches: Sequence[Launch], target: GPUTarget, cache: Path) -> list[Job]:
    """Return a job for each kernel that these launches need and ``cache``, Triton's folder, does not have yet."""
    jobs: dict[str, Job] = {}
    for launch in launches:
        kernel, arguments = launch.kernel, _without_tensors(launch.arguments)
        inputs = (triton.__version__, kernel.cache_key, target, _known(arguments), sorted(launch.constants.items()))
        key = hashlib.sha256(repr(inputs).encode()).hexdigest()[:24]
        if key not in jobs:
            name = kernel.fn.__name__
            jobs[key] = Job(target, cache, kernel.fn.__module__, name, arguments, launch.constants, key)
    return [job for job in jobs.values() if not job.done]


def compile_job(job: Job) -> None:
    """Compile a job's kernel into Triton's cache, unless another process has done so; for worker processes only."""
    import fcntl

    kernel = getattr(import_module(job.module), job.name)
    driver: Any = triton.runtime.driver
    active_driver = driver._active  # private, because the public property ``active`` would look for a GPU
    job.file.parent.mkdir(parents=True, exist_ok=True)
    with job.file.open("a") as file, triton.knobs.cache.scope():
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, 2):  # another process compiled the kernel while this one waited for the lock
            return
        triton.knobs.cache.dir = str(job.cache)
        driver.set_active(NoDevice(job.target))  # nothing can be launched until the old driver is back
        try:
            kernel.warmup(*job.arguments, grid=(1,), **job.constants)
        finally:
            driver.set_active(active_driver)
        file.write("compiled\n")


def _without_tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_tensors, value))
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_without_tensors(value.base))
    return Pointer(value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else value


def _known(value: Any) -> Any:
    """Reduce an argument to the properties by which Triton specializes a kernel."""
    if isinstance(value, tuple):
        return tuple(map(_known, value))
    if isinstance(value, Pointer):
        return value.dtype, value.address == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape), len(value.shape)
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value)


class NoDevice:
    """The part of a Triton driver that compilation asks: the target to compile for. It launches nothing."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # Triton caches compiled kernels by device number

    def get_current_stream(self, device: int) -> int:
        return 0
