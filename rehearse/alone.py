"""A single rank without the others of its world: answers that they would give, and numbers that no kernel computes.

No kernel runs, so the numbers that the host reads are made up (:mod:`scripted`). Functions of torch and of the package
are patched in this process alone, which does nothing else.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from device import Device, Touches
from scripted import script
from torch import Tensor

__all__ = ["Alone", "group_of"]


class Alone:
    """The patches of one process. With ``alone`` False the other ranks exist, and only numbers are made up."""

    def __init__(self, device: Device, *, alone: bool = True) -> None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is NVIDIA's, and finds no device
        self._device = device
        self._touches: Touches | None = None
        self._checks()
        self._graphs()
        self._decompositions()
        if alone:
            self._objects()
            self._splits()

    @contextlib.contextmanager
    def touches_noted(self) -> Iterator[None]:
        """Log the memory that operators touch inside this block, those of compiled graphs too."""
        self._touches = Touches(self._device)
        try:
            yield
        finally:
            self._touches = None

    def noting(self) -> contextlib.AbstractContextManager[Any]:
        """Return the dispatch mode for eager code inside `touches_noted`, else a null context."""
        return self._touches or contextlib.nullcontext()

    def _checks(self) -> None:
        from compile_muon.engine.step_checks import StepChecks

        script(StepChecks)

    def _decompositions(self) -> None:
        """Replace kernels of cuSOLVER, which is NVIDIA's too, by some that compute nothing and wait as they do."""

        def made(matrix: Tensor) -> Tensor:  # column-major, as cuSOLVER returns matrices
            torch.cuda.current_stream().synchronize()
            return matrix.new_empty(matrix.mT.shape).mT

        self._kernels = torch.library.Library("aten", "IMPL")  # kernels are unregistered when it is freed
        for name, kernel in {
            "_linalg_eigh": lambda a, uplo="L", compute_v=True: (a.new_empty(a.shape[:-1]), made(a)),
            "linalg_qr": lambda a, mode="reduced": (made(a), made(a)),  # of square matrices
        }.items():
            self._kernels.impl(name, kernel, "CUDA", allow_override=True)

    def _objects(self) -> None:
        def objects(value: Any, group: Any) -> list[Any]:
            return [value] * (1 if group is None else group.size())

        for name, module in list(sys.modules.items()):
            if name.startswith("compile_muon") and hasattr(module, "gather_objects"):
                module.gather_objects = objects  # type: ignore[attr-defined]

    def _graphs(self) -> None:
        """Enter the dispatch mode inside each compiled graph; a mode around a compiled call turns torch.compile off."""
        from compile_muon import backend
        from compile_muon.engine import frame, step_graph

        lower_and_compile = frame.lower_and_compile

        def noted(*args: Any, **kwargs: Any) -> Any:
            run, traffic = lower_and_compile(*args, **kwargs)

            def call(given: list[Any]) -> Any:
                with self.noting():
                    return run(given)

            call._boxed_call = True  # type: ignore[attr-defined]
            return call, traffic

        for module in (frame, backend, step_graph):
            module.lower_and_compile = noted  # type: ignore[attr-defined]

    def _splits(self) -> None:
        """Tell the library each communicator's size and rank before a split, which ranks would exchange there."""
        import torch.distributed.device_mesh as device_mesh
        import torch.distributed.distributed_c10d as c10d

        new_group_helper, original_split = c10d._new_process_group_helper, c10d.split_group

        def helper(size: int, rank: int | None, *args: Any, **kwargs: Any) -> Any:
            self._device.next_split(size, -1 if rank is None else rank)
            return new_group_helper(size, rank, *args, **kwargs)

        def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            members = next((several for several in split_ranks if dist.get_rank() in several), [])
            self._device.next_split(len(members), members.index(dist.get_rank()) if members else -1)
            return original_split(parent_pg, split_ranks, *args, **kwargs)

        c10d._new_process_group_helper = helper
        for module in (c10d, dist, device_mesh):
            if hasattr(module, "split_group"):
                module.split_group = split_group  # type: ignore[attr-defined]


class _Store(dist.Store):
    """A store that has what other ranks would have left: ids of communicators, which rank 0 makes."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._held[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._held.get(key, bytes(128))

    def add(self, key: str, value: int) -> int:
        total = int(self._held.get(key, b"0")) + value
        self._held[key] = str(total).encode()
        return total

    def check(self, keys: Any) -> bool:
        return True

    def wait(self, keys: Any, timeout: Any = None) -> None:
        return None

    def set_timeout(self, timeout: Any) -> None:
        return None

    def clone(self) -> dist.Store:
        return self


_STORES: list[dist.Store] = []  # torch holds only the C++ half of one that is written in Python


@contextlib.contextmanager
def group_of(world: int, rank: int, *, of_one: bool = False) -> Iterator[None]:
    """Make this process ``rank`` of ``world`` over NCCL inside the block. One rank has no process group, unless
    ``of_one`` asks for it."""
    if world == 1 and not of_one:
        yield
        return
    _STORES.append(dist.HashStore() if rank == 0 else _Store())
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=_STORES[-1], rank=rank, world_size=world, device_id=device)
    try:
        yield
    finally:
        torch.cuda.synchronize()  # else the group waits until collectives have been slow enough
        dist.destroy_process_group()
