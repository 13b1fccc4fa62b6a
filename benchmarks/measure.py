"""What a rank can measure about itself, without help from the framework under test.

Bytes come from the kernel's counters of this process's own TCP sockets, so every contender is counted
by the same instrument, whatever it calls. Memory is measured twice: resident memory as the kernel sees
it (includes the interpreter, compiled code and the allocator's slack), and tensor memory, exact but
blind to what C++ worker threads allocate.
"""

from __future__ import annotations

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
_BOUNDARY = "benchmark::boundary"


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


def reset_peak_resident() -> bool:
    """Start a new resident peak; False where the platform cannot (then the peak is the process's lifetime)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """Largest resident memory of this process.

    VmHWM, not ru_maxrss: the latter survives exec, so a rank would inherit the launcher's peak.
    """
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def live_tensor_bytes(device_type: str) -> int:
    """Bytes of all storages reachable from Python tensors on the device, each storage once."""
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):  # type(): isinstance would wake lazy proxies
            continue
        tensor = candidate._local_tensor if isinstance(candidate, DTensor) else candidate
        try:
            storage = tensor.untyped_storage()
            if storage.device.type == device_type:
                storages[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # fake tensors and other storage-less wrappers
            continue
    storages.pop(0, None)
    return sum(storages.values())


def peak_tensor_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Largest tensor memory during one training step, measured over a second, identical one.

    On CPU the allocator reports only blocks it saw allocated while profiling. So one step runs first,
    for the blocks that live across steps to be seen, then a marker, then the step that counts.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
        gc.collect()
        at_boundary = live_tensor_bytes(device.type)
        with torch.profiler.record_function(_BOUNDARY):
            pass
        step()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == _BOUNDARY)
    current = peak = at_boundary
    for event in events:
        if event.name() == "[memory]" and event.start_ns() >= start:
            current += event.nbytes()
            peak = max(peak, current)
    return peak
