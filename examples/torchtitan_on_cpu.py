"""Import this before anything of torchtitan to run it without a GPU: it knows accelerators only.

torchtitan 0.3 asks ``torchtitan.tools.utils`` for its device when its modules are imported; here that is the CPU, which
has no memory statistics. And its trainer calls ``torch.distributed.set_timeout``, which torch 2.13 does not have yet.
"""

import types
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as device


class Cpu(types.SimpleNamespace):
    """``torch.cpu``, and what torchtitan asks of an accelerator beside it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


if not torch.accelerator.is_available():
    nothing = dict.fromkeys(("reset_peak_memory_stats", "empty_cache"), lambda: None)
    memory = types.SimpleNamespace(total_memory=1)
    device.device_type = "cpu"
    device.device_module = Cpu(
        get_device_name=lambda *_: "CPU",
        get_device_properties=lambda *_: memory,
        memory_stats=lambda *_: {},
        current_device=lambda: 0,
        **nothing,
    )
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
