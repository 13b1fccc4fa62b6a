"""What a step writes to states that are offloaded: on every rank all of it is kept, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.agreement.compare import ranks_named
from compile_muon.errors import OffloadError
from compile_muon.offload.store import Bucket

__all__ = ["Transaction"]


class Transaction:
    """The step under way.

    Args:
        group: all ranks; None without others.
        device: that computes.
        forget: puts back what stores and buffers had.

    Attributes:
        written: buckets that the step has closed.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, forget: Callable[[], None]) -> None:
        self._group, self._device, self._forget = group, device, forget
        self.written: list[Bucket] = []
        self._undone: list[tuple[Tensor, Tensor]] = []
        self._told: OffloadError | None = None  # what all ranks have heard of

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Copy to the host what the step is about to write in place."""
        for tensor in tensors:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._undone.append((tensor, copy.copy_(tensor, non_blocking=True)))

    @contextmanager
    def agreeing(self, what: str, *, meets: bool = True) -> Iterator[None]:
        """Raise on all ranks what a disk of one failed in the block, once all is as it was.

        Args:
            what: a rank says of another.
            meets: False where there is no disk, and nothing to hear of.
        """
        failure: OffloadError | None = None
        try:
            yield
        except OffloadError as error:
            if error is self._told:
                raise
            failure = error
        except BaseException:
            self._undo()
            raise
        failed = [failure is not None]
        if self._group is not None and meets:
            flags = torch.zeros(self._group.size(), device=self._device)
            flags[self._group.rank()] = float(failure is not None)
            dist.all_reduce(flags, group=self._group)
            failed = [flag != 0 for flag in flags.tolist()]
        if not any(failed):
            return
        self._undo()
        ranks = ranks_named([rank for rank, flag in enumerate(failed) if flag])
        self._told = failure or OffloadError(f"{ranks} {what}; the error there says why")
        raise self._told

    def end(self) -> None:
        """All is kept: there is nothing to go back to."""
        self.written = []
        self._undone.clear()

    def _undo(self) -> None:
        """All is as it was ahead of the step."""
        self._forget()
        for tensor, before in reversed(self._undone):
            tensor.copy_(before)
        self.end()
