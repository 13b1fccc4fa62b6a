"""The transaction of a step over offloaded states: every rank keeps all of its writes, or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.agreement.compare import ranks_named
from compile_muon.errors import OffloadError
from compile_muon.offload.store import Bucket


class Transaction:
    """The step under way; ``group``: all ranks, None without others; ``forget`` rolls stores and buffers back."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, forget: Callable[[], None]) -> None:
        self._group, self._device, self._forget = group, device, forget
        self.written: list[Bucket] = []  # buckets that the step has closed
        self._undone: list[tuple[Tensor, Tensor]] = []
        self._told: OffloadError | None = None  # raised on all ranks already

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors that the step is about to write in place to the host, to restore them from."""
        for tensor in tensors:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._undone.append((tensor, copy.copy_(tensor, non_blocking=True)))

    @contextmanager
    def agreeing(self, what: str, *, meets: bool = True) -> Iterator[None]:
        """Raise on all ranks if a disk of one failed inside the block, after rolling back; collective at its end,
        except without ``meets``, where no disk can fail. ``what`` follows the ranks' names on the others."""
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
        """Forget the copies: all writes are kept."""
        self.written = []
        self._undone.clear()

    def _undo(self) -> None:
        """Restore everything to its state before the step."""
        self._forget()
        for tensor, before in reversed(self._undone):
            tensor.copy_(before)
        self.end()
