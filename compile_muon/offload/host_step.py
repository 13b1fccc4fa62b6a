"""AdamW on the host: gradients and weights come to it by the bucket, weights go back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compile_muon.engine.commit import weight_of
from compile_muon.engine.hooks import GRADIENT, WEIGHT
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes.language.spec import decode_dtype

_Rows = dict[ShardedParam, dict[str, Tensor]]


class _Coming(NamedTuple):
    """The tensors of one bucket on their way to the host."""

    rows: _Rows  # by name: the gradient, and the weight unless the host has a master
    found_inf: Tensor | None = None  # [], not 0 if the step writes nothing; None if the host knows that it writes
    arrived: torch.Event | None = None  # once all of it is on the host; None if nothing is copied


class HostStep:
    """A step that the host computes, with gradients and weights copied on streams between ``device`` and pinned memory.

    Where ``device`` is the host itself nothing is copied. ``real`` is False for fake tensors, which have no streams,
    and whose steps are never skipped.
    """

    #: Rows of the next bucket, by parameter, while the copy of the one behind it is under way; ends in a skipped step.
    #: Each item waits for its copy; the first waits for the device, which is then done with the gradients.
    arrivals: Iterator[_Rows]

    def __init__(self, device: torch.device, *, real: bool) -> None:
        self._streams = device.type != "cpu" and real
        if self._streams:
            self._out, self._in = torch.Stream(device), torch.Stream(device)

    def begin(self, buckets: Sequence[Sequence[ShardedParam]], found_inf: Tensor | None) -> None:
        """Begin to copy the first bucket's gradients, which are final, and weights that have no master on the host.
        ``buckets``: of gradients to be copied together; ``found_inf``: 1.0 for a step that writes nothing."""
        self.follow()
        self.arrivals = self._arrivals(buckets, self._depart(buckets[0] if buckets else (), found_inf))

    def _arrivals(self, buckets: Sequence[Sequence[ShardedParam]], coming: _Coming) -> Iterator[_Rows]:
        for number in range(len(buckets)):
            here, coming = coming, self._depart(buckets[number + 1] if number + 1 < len(buckets) else ())
            if here.arrived is not None:
                here.arrived.synchronize()
                if here.found_inf is not None and here.found_inf != 0:
                    return
                for sharded, row in here.rows.items():
                    row[GRADIENT] = _rounded(row[GRADIENT], decode_dtype(sharded.spec.state_dtype))
            yield here.rows

    def follow(self) -> None:
        """Order all later copies behind the work that is on the device's current stream."""
        if self._streams:
            self._behind = torch.accelerator.current_stream().record_event()

    def back(self, sharded_params: Sequence[ShardedParam], rows: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy the weights that the host has computed into the parameters."""
        if not self._streams:
            for sharded, row in zip(sharded_params, rows, strict=True):
                local = sharded.local.detach()
                if not local.is_set_to(weight := weight_of(sharded, row)):  # on a CPU the step may write in place
                    local.copy_(weight)
            return
        self._in.wait_event(self._behind)
        with self._in:
            for sharded, row in zip(sharded_params, rows, strict=True):
                local = sharded.local.detach()
                local.copy_(_rounded(weight_of(sharded, row), local.dtype), non_blocking=True)
            there = self._in.record_event()
        torch.accelerator.current_stream().wait_event(there)

    def _depart(self, sharded_params: Sequence[ShardedParam], found_inf: Tensor | None = None) -> _Coming:
        tensors = {
            sharded: {GRADIENT: sharded.local_grad} | ({} if sharded.spec.master else {WEIGHT: sharded.local.detach()})
            for sharded in sharded_params
        }
        if not self._streams:
            return _Coming({a: {name: x.cpu().contiguous() for name, x in row.items()} for a, row in tensors.items()})
        self._out.wait_event(self._behind)
        with self._out:
            rows = {a: {name: _pinned(tensor) for name, tensor in row.items()} for a, row in tensors.items()}
            flag = None if found_inf is None else _pinned(found_inf)
            arrived = self._out.record_event()
        # Later work of this stream may reuse the gradients' memory once they are freed, so it waits for the copy.
        torch.accelerator.current_stream().wait_event(arrived)
        return _Coming(rows, flag, arrived)


def _pinned(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Begin a copy into pinned host memory. PyTorch's pinned allocator reuses a block, still mapped, only when no
    stream copies from it or to it any more."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu", pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else _pinned(tensor, dtype)
