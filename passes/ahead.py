"""Newton-Schulz's kernels are compiled in Inductor's worker processes, while Inductor compiles the graph around them.

Which kernels those are the operator itself says: run on the device "meta" it notes its launches. Without workers, or
for a kernel that they did not make, the first launch compiles, as ever.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import torch
from torch.fx import GraphModule

from compile_muon.kernels.ops import plan_of
from compile_muon.passes.torch_private import in_compile_workers, triton_cache, without_modes

__all__ = ["kernels_ahead", "kernels_of"]

#: seconds, after which the first launch is left to compile what is missing
_PATIENCE = 300.0


@contextlib.contextmanager
def kernels_ahead(gm: GraphModule) -> Iterator[None]:
    """Around the compilation of ``gm``: ends when the kernels of its Newton-Schulz calls are compiled, too."""
    jobs = kernels_of(gm)
    compile_job = importlib.import_module("compile_muon.kernels.gpu.jobs").compile_job if jobs else None
    futures = in_compile_workers(compile_job, jobs)
    yield
    wait(futures, timeout=_PATIENCE)  # what failed fails again where it is launched, and is told there


def kernels_of(gm: GraphModule) -> list[Any]:
    """``kernels.gpu.jobs.Job`` of each kernel that a lowered graph's Newton-Schulz launches and nobody has compiled."""
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.muon_zero.newton_schulz.default)
    jobs: dict[str, Any] = {}
    for call in calls:
        values = [node.meta["val"] for node in call.args[0]]
        sizes = [size for value in values for size in (*value.shape, *value.stride())]
        if values and values[0].device.type == "cuda" and all(isinstance(size, int) for size in sizes):
            jobs |= {job.key: job for job in _jobs(values, call.args[1:])}
    return list(jobs.values())


def _jobs(values: list[torch.Tensor], arguments: tuple[Any, ...]) -> list[Any]:
    from compile_muon.kernels.dispatch import orthogonalize, triton_kernels

    if triton_kernels() is None:
        return []
    import triton

    from compile_muon.kernels.gpu.jobs import jobs_of
    from compile_muon.kernels.gpu.launch import noting

    device = values[0].device
    with noting(device) as launches, without_modes():
        orthogonalize(
            [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in values],
            plan_of(*arguments),
        )
    return jobs_of(launches, triton.runtime.driver.active.get_current_target(), triton_cache(device))
