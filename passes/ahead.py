"""Compilation of Triton kernels in Inductor's worker processes, while Inductor compiles the graph that launches them.

The operators of Newton-Schulz, fingerprints and momentum name their kernels: run on device "meta", they note their
launches. Without workers, or for a kernel that they failed to compile, the first launch compiles.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from compile_muon.kernels.dispatch import orthogonalize, triton_kernels
from compile_muon.kernels.ops import plan_of
from compile_muon.passes.fingerprint import FINGERPRINT_OF_ROWS, finish_by_kernel
from compile_muon.passes.momentum import MOMENTUM_UPDATES, make_updates
from compile_muon.passes.torch_private import in_compile_workers, triton_cache, without_modes

#: seconds to wait for workers; kernels that are missing then are compiled by their first launch
_PATIENCE = 300.0


@contextlib.contextmanager
def kernels_ahead(gm: GraphModule) -> Iterator[None]:
    """Compile the kernels of ``gm`` while the block compiles ``gm``, and wait for them at its end."""
    futures = _compile(kernels_of(gm))
    yield
    wait(futures, timeout=_PATIENCE)  # a kernel that failed fails again at its launch, which raises


def kernels_of(gm: GraphModule) -> list[Any]:
    """Return the ``kernels.gpu.jobs.Job`` of each kernel that a lowered graph launches and that is not compiled yet."""
    jobs: dict[str, Any] = {}
    for operator, runs in _OPERATORS.items():
        for call in gm.graph.find_nodes(op="call_function", target=operator):
            arguments = tree_map_only(Node, lambda node: node.meta["val"], call.args)
            values = [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]
            sizes = [size for value in values for size in (*value.shape, *value.stride())]
            # Launches depend on sizes, so symbolic ones have to wait for the first launch.
            if values and values[0].device.type == "cuda" and all(isinstance(size, int) for size in sizes):
                device = values[0].device
                jobs |= {job.key: job for job in _jobs(device, partial(_noted, device, arguments, runs))}
    return list(jobs.values())


def compile_launches(device: torch.device, launches_of: Callable[[], Sequence[Any]]) -> None:
    """Start to compile the kernels of these ``kernels.gpu.launch.Launch``; without Triton nothing is called."""
    _compile(_jobs(device, launches_of))


def _compile(jobs: Sequence[Any]) -> list[Future[Any]]:
    compile_job = importlib.import_module("compile_muon.kernels.gpu.jobs").compile_job if jobs else None
    return in_compile_workers(compile_job, jobs)


def _jobs(device: torch.device, launches_of: Callable[[], Sequence[Any]]) -> list[Any]:
    if triton_kernels() is None:
        return []
    import triton

    from compile_muon.kernels.gpu.jobs import jobs_of

    with without_modes():
        launches = launches_of()
    return jobs_of(launches, triton.runtime.driver.active.get_current_target(), triton_cache(device))


def _noted(device: torch.device, arguments: tuple[Any, ...], runs: Callable[..., object]) -> Sequence[Any]:
    """Return the launches of ``runs`` with these arguments."""
    from compile_muon.kernels.gpu.launch import noting

    def on_meta(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    with noting(device) as launches:
        runs(*tree_map_only(Tensor, on_meta, arguments))
    return launches


#: operator -> function that launches its kernels for tensors on "meta"
_OPERATORS: Mapping[Any, Callable[..., object]] = {
    torch.ops.muon_zero.newton_schulz.default: lambda xs, *arguments: orthogonalize(
        xs, plan_of(arguments), arguments[-1]
    ),
    FINGERPRINT_OF_ROWS: finish_by_kernel,
    MOMENTUM_UPDATES: partial(make_updates, by_kernel=True),
}
