"""What a rank can measure about itself, without help from the framework under test.

Bytes come from the kernel's counters of this process's own TCP sockets, so every contender is counted by the same
instrument, whatever it calls. Memory on CPU is resident memory as the kernel sees it: PyTorch's profiler does not see
what worker threads free (Gloo's reduce-scatter copies its input), and reported memory that no longer existed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable

import torch

# struct tcp_info of linux/tcp.h: u64 tcpi_bytes_sent, in Linux 4.19 and later.
_TCP_INFO = 11
_BYTES_SENT_OFFSET = 200
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc


def socket_bytes_sent() -> int | None:
    """Bytes this process has sent over TCP sockets that are still open; None where the kernel does not tell."""
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


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Largest memory during one training step: allocated tensors on CUDA, the whole process on CPU.

    On CPU the C library keeps what is freed, so a peak would be that of the process's whole life, fragmentation and
    compilation included. From here on (this is the last thing measured) it returns every block of 64 KiB or more.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
        gc.collect()
        step()  # blocks that live across steps move to the new kind of allocation
        libc.malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # a new peak starts here
    step()
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    """VmHWM, not ru_maxrss: the latter survives exec, so a rank would inherit the launcher's peak."""
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
