"""Joint actions of ranks: an error on one rank raises on all, at the same place, with the rank's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.agreement.compare import differing, gather_objects
from compile_muon.agreement.status import RankStatus
from compile_muon.errors import CheckpointError, DamagedError, MuonZeroError
from compile_muon.passes.torch_private import timeout_of

T = TypeVar("T")


class Ranks:
    """The ranks of an optimizer, with a Gloo group of their own, so that a writer's collectives never meet training's.

    ``group`` is the optimizer's, None for one process; making the Gloo group is collective over it and takes its
    time-out. ``device``: of ``group``. ``status``: tells where other ranks are when one does not come. ``apart=False``
    meets in ``group`` itself, for callers that write nothing beside training. CheckpointError if another rank is gone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        status: RankStatus,
        *,
        apart: bool = True,
    ) -> None:
        self._status = status
        self._apart = apart
        self.busy: Future[None] | None = None  # work behind training that uses the group
        self.rank, self.world = 0, 1
        self.group: dist.ProcessGroup | None = None
        self.meshes: dict[DeviceMesh, DeviceMesh] = {}  # see :func:`host_mesh`
        if group is None:
            return
        self.rank, self.world = group.rank(), group.size()
        if not apart:
            self.group = group
            return
        members = dist.get_process_group_ranks(group)
        everyone = len(members) == dist.get_world_size()
        # new_group defaults to half an hour, whatever the parent's time-out; its ranks meet at once.
        timeout = timeout_of(group, device)
        try:
            self.group = dist.new_group(members, timeout, "gloo", use_local_synchronization=not everyone)
        except RuntimeError as error:
            raise self._alone("a rank did not come to save or load a checkpoint", error) from error

    def settle(self) -> None:
        """Wait for work behind training: two threads must not use one group. Its errors are raised where it began."""
        if self.busy is not None:
            wait([self.busy])
            self.busy = None

    def gather(self, value: T) -> list[T]:
        """Return ``value`` of every rank, on every rank; small objects of our own processes, no file contents."""
        with self._answering():
            return gather_objects(value, self.group)

    def compare(self, mine: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the entries that differ, see :func:`~compile_muon.agreement.compare.compare`."""
        return differing(self.gather(mine))

    def by_first(self, doing: str, make: Callable[[], T]) -> T:
        """Return what ``make`` returns on rank 0, on every rank; it may be large, as no rank holds copies of all. What
        it raises there is raised on all ranks, see :meth:`agree`."""
        values: list[Any] = [None]
        with self.together(doing):
            if self.rank == 0:
                values = [make()]
        if self.group is not None:
            with self._answering():
                dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not self._apart:
                raise
            raise self._alone("a rank did not answer while a checkpoint was made or loaded", error) from error

    def _alone(self, what: str, error: RuntimeError) -> CheckpointError:
        return CheckpointError(f"{what}: {error}\n{self._status.everyone()}".rstrip())

    def agree(self, doing: str, error: Exception | None) -> None:
        """Raise CheckpointError on all ranks if any has an ``error``: ``doing``, then each rank's message. DamagedError
        if all errors are."""
        said = None if error is None else (_text(error), isinstance(error, DamagedError))
        answers = {rank: answer for rank, answer in enumerate(self.gather(said)) if answer is not None}
        if not answers:
            return
        texts = {rank: text for rank, (text, _) in answers.items()}
        if len(texts) == self.world and len(set(texts.values())) == 1:
            message = texts[0]
        else:
            message = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        kind = DamagedError if all(damaged for _, damaged in answers.values()) else CheckpointError
        raise kind(f"{doing}: {message}") from error

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block that raises on all ranks where it raises on any; see :meth:`agree`."""
        caught: Exception | None = None
        try:
            yield
        except Exception as error:
            # Its traceback begins with this frame, which from Python 3.12 on leads to its caller, and so to the error.
            caught = error.with_traceback(cast("TracebackType", error.__traceback__).tb_next)
        try:
            self.agree(doing, caught)
        finally:
            caught = None  # its traceback would keep this frame and the caller's objects alive


def host_mesh(
    trained_on: DeviceMesh, cache: dict[DeviceMesh, DeviceMesh], group: dist.ProcessGroup | None = None
) -> DeviceMesh:
    """Return a mesh of the same ranks on the CPU: it describes placements, and nothing is sent over it. ``cache``:
    meshes so far. ``group``: of a one-dimensional mesh; None for the mesh's own."""
    if trained_on not in cache:
        groups = trained_on.get_all_groups() if group is None or trained_on.ndim > 1 else [group]
        names = trained_on.mesh_dim_names
        cache[trained_on] = DeviceMesh.from_group(groups, "cpu", trained_on.mesh, mesh_dim_names=names)
    return cache[trained_on]


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, MuonZeroError) else f"{type(error).__name__}: {error}"
