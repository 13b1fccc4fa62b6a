"""Measurements that a rank takes of itself, without help from the framework under test.

Bytes come from the kernel's counters of this process's own TCP sockets, so every contender is counted by the same
instrument, whatever it calls. Memory on CPU is resident memory as the kernel sees it: PyTorch's profiler misses memory
that worker threads free (Gloo's reduce-scatter copies its input), and so reports memory that no longer exists.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

# struct tcp_info of linux/tcp.h: u64 tcpi_bytes_sent, in Linux 4.19 and later.
_TCP_INFO = 11
_BYTES_SENT_OFFSET = 200


def socket_bytes_sent() -> int | None:
    """Count the bytes that this process has sent over its open TCP sockets; None if the kernel does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as tcp:
                if tcp.type != socket.SOCK_STREAM or tcp.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = tcp.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
        except OSError:  # the descriptor was closed meanwhile, or is a listening socket
            continue
        if len(info) < _BYTES_SENT_OFFSET + 8:
            return None
        total += struct.unpack_from("Q", info, _BYTES_SENT_OFFSET)[0]
    return total


def disk_bytes() -> int | None:
    """Count the bytes that this process has read from disks and written to them; None if the kernel does not tell."""
    try:
        with open("/proc/self/io") as lines:
            counters = dict(line.split(": ") for line in lines)
        return int(counters["read_bytes"]) + int(counters["write_bytes"])
    except (OSError, KeyError):
        return None


# For the ranks' environment: the C library returns blocks of 64 KiB or more as soon as they are freed. If it kept them,
# the growth of a process would measure fragmentation, not need. Returning them costs time.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of one training step: tensors that live across steps, and all allocated on top.

    On CPU the process's environment needs `RETURN_MEMORY`.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    gc.collect()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # resets the peak to the memory that is resident now
    before, lasting = _peak_resident_bytes(), _live_tensor_bytes(device.type)
    step()
    # Tensors plus the growth of the process: neither the interpreter nor remains of compilation count.
    return lasting + _peak_resident_bytes() - before


def _live_tensor_bytes(device_type: str) -> int:
    """Count the bytes of all storages on the device that Python tensors reach, overlapping parts once."""
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):  # type(): isinstance would wake lazy proxies
            continue
        tensor = candidate._local_tensor if isinstance(candidate, DTensor) else candidate
        try:
            storage = tensor.untyped_storage()
            if storage.device.type == device_type:
                start = storage.data_ptr()
                storages[start] = max(storages.get(start, 0), storage.nbytes())
        except (NotImplementedError, RuntimeError):  # fake tensors and other storage-less wrappers
            continue
    storages.pop(0, None)
    total = counted_up_to = 0
    for start, nbytes in sorted(storages.items()):
        total += max(0, start + nbytes - max(start, counted_up_to))
        counted_up_to = max(counted_up_to, start + nbytes)
    return total


def _peak_resident_bytes() -> int:
    """Return the process's peak resident memory."""
    # VmHWM, because ru_maxrss survives exec: a rank would inherit the launcher's peak.
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
