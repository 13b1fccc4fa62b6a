"""The way to a step that the host computes: gradients and weights come to it by the bucket, weights go back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compile_muon.runtime.account import Account
from compile_muon.runtime.commit import weight_of
from compile_muon.runtime.lender import GRADIENT, WEIGHT

__all__ = ["Ferry"]


class _Coming(NamedTuple):
    """What is on its way to the host for one bucket.

    Args:
        rows: of each parameter, by name.
        withheld: whether the step writes nothing (0-dim, not 0 if so), once the host can read it; None if it knows.
        arrived: once all of it is there; None where nothing travels.
    """

    rows: list[dict[str, Tensor]]
    withheld: Tensor | None = None
    arrived: torch.Event | None = None


class Ferry:
    """Gradients and weights of one optimizer between its device and pinned host memory, on streams of their own.

    Args:
        device: that has them. Where it is the host itself, nothing travels.
    """

    def __init__(self, device: torch.device) -> None:
        self._travels = device.type != "cpu"
        self._withheld: bool | None = None  # as the host knows it of this step
        if self._travels:
            self._out, self._in = torch.Stream(device), torch.Stream(device)

    def begin(self) -> None:
        """Gradients are final: what is on the device's stream from now on is not waited for."""
        self._withheld = None
        self.follow()

    def follow(self) -> None:
        """What is on the device's stream now must be done before weights are written."""
        if self._travels:
            self._behind = torch.accelerator.current_stream().record_event()

    def across(self, buckets: Sequence[Sequence[Account]], withheld: Tensor | None) -> Iterator[list[dict[str, Tensor]]]:
        """Gradients of each bucket's parameters, and weights whose master is not on the host, the next on their way.

        The host waits for each bucket to arrive, and with the first for the device to be done with the gradients.

        Args:
            withheld: 1.0 on the device for a step that writes nothing: then nothing is given.
        """
        coming = self._depart(buckets[0], withheld if self._withheld is None else None)
        for following in (*buckets[1:], None):
            here, coming = coming, self._depart(following) if following is not None else _Coming([])
            if here.arrived is not None:
                here.arrived.synchronize()
            if here.withheld is not None:
                self._withheld = bool(here.withheld)
            if self._withheld:
                return
            yield here.rows

    def back(self, accounts: Sequence[Account], rows: Sequence[Mapping[str, Tensor]]) -> None:
        """Parameters become what the host has made of them."""
        if not self._travels:
            for account, row in zip(accounts, rows, strict=True):
                local = account.local.detach()
                if not local.is_set_to(weight := weight_of(account, row)):
                    local.copy_(weight)
            return
        self._in.wait_event(self._behind)
        with self._in:
            for account, row in zip(accounts, rows, strict=True):
                local, weight = account.local.detach(), weight_of(account, row)
                if account.spec.master:
                    weight = torch.empty(weight.shape, dtype=local.dtype, pin_memory=True).copy_(weight)
                local.copy_(weight, non_blocking=True)
            there = self._in.record_event()
        torch.accelerator.current_stream().wait_event(there)

    def _depart(self, accounts: Sequence[Account], withheld: Tensor | None = None) -> _Coming:
        tensors = [
            {GRADIENT: account.local_grad} | ({} if account.spec.master else {WEIGHT: account.local.detach()})
            for account in accounts
        ]
        if not self._travels:
            return _Coming([{name: tensor.contiguous() for name, tensor in row.items()} for row in tensors])
        self._out.wait_event(self._behind)
        with self._out:
            rows = [{name: _pinned(tensor) for name, tensor in row.items()} for row in tensors]
            flag = None if withheld is None else _pinned(withheld)
            arrived = self._out.record_event()
        # Whoever takes their memory next comes behind.
        torch.accelerator.current_stream().wait_event(arrived)
        return _Coming(rows, flag, arrived)


def _pinned(tensor: Tensor) -> Tensor:
    """On its way into host memory; PyTorch keeps that until no stream copies from it or to it any more."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
