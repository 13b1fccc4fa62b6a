"""Ranks that do something together: what fails on one of them fails on all, in the same place, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.agreement.compare import differing, gather_objects
from compile_muon.agreement.status import RankStatus
from compile_muon.errors import CheckpointError, DamagedError, MuonZeroError
from compile_muon.passes.torch_private import timeout_of

__all__ = ["Ranks", "host_mesh"]

T = TypeVar("T")


class Ranks:
    """The ranks of an optimizer, with a Gloo group of their own: a writer's collectives never meet training's.

    Args:
        group: the optimizer's process group, None for one process. Collective over it. Its time-out is ours.
        device: that ``group`` works on.
        status: of the optimizer; says where the others are when one does not come.
        apart: False to meet in ``group`` itself, for who writes nothing beside training; who stays alone is then told
            by ``status``.
    Attributes:
        busy: what uses the group behind training; see :meth:`settle`.
    Raises:
        CheckpointError: another rank is gone.
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
        self.busy: Future[None] | None = None
        self.rank, self.world = 0, 1
        self.group: dist.ProcessGroup | None = None
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        if group is None:
            return
        self.rank, self.world = group.rank(), group.size()
        if not apart:
            self.group = group
            return
        members = dist.get_process_group_ranks(group)
        everyone = len(members) == dist.get_world_size()
        # new_group's own default is half an hour, however short the group's; ranks meet in it at once.
        timeout = timeout_of(group, device)
        try:
            self.group = dist.new_group(members, timeout, "gloo", use_local_synchronization=not everyone)
        except RuntimeError as error:
            raise self._alone("a rank did not come to save or load a checkpoint", error) from error

    def mesh_like(self, trained_on: DeviceMesh) -> DeviceMesh:
        """The same ranks on the CPU. It says where shards belong; nothing is sent over it."""
        return host_mesh(trained_on, self._meshes, self.group)

    def settle(self) -> None:
        """Wait for what is under way behind training: two threads must not meet the other ranks in one group.

        What went wrong in it is told to who began it.
        """
        if self.busy is not None:
            wait([self.busy])
            self.busy = None

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, on every rank; small things between our own processes, nothing of a file."""
        with self._answering():
            return gather_objects(value, self.group)

    def compare(self, mine: Mapping[str, Any]) -> dict[str, list[Any]]:
        """See :func:`~compile_muon.agreement.compare.compare`."""
        return differing(self.gather(mine))

    def first(self, value: T) -> T:
        """``value`` of rank 0, on every rank; of any size, for it is nowhere twice."""
        found = [value]
        if self.group is not None:
            with self._answering():
                dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

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
        """Raise on all ranks if there is an ``error`` on any.

        Raises:
            CheckpointError: starting with ``doing``, with what each rank says. DamagedError if all is about damage.
        """
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
        """``with ranks.together("..."):`` raises on all ranks where the block raises on any; see :meth:`agree`."""
        found: Exception | None = None
        try:
            yield
        except Exception as error:
            found = error
        try:
            self.agree(doing, found)
        finally:
            found = None  # its traceback holds this frame, and the caller's objects with it


def host_mesh(
    trained_on: DeviceMesh, known: dict[DeviceMesh, DeviceMesh], group: dist.ProcessGroup | None = None
) -> DeviceMesh:
    """The same ranks on the CPU. It says where shards belong; nothing is sent over it.

    Args:
        known: what was made before, and is not made again.
        group: of these ranks, for a mesh of one dimension; None for the mesh's own.
    """
    if trained_on not in known:
        groups = trained_on.get_all_groups() if group is None or trained_on.ndim > 1 else [group]
        names = trained_on.mesh_dim_names
        known[trained_on] = DeviceMesh.from_group(groups, "cpu", trained_on.mesh, mesh_dim_names=names)
    return known[trained_on]


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, MuonZeroError) else f"{type(error).__name__}: {error}"
