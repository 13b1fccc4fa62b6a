"""Rows of tensors between rank 0 and the others, point to point and in pieces.

torch gathers by all-gather (``DTensor.full_tensor``, ``get_model_state_dict``), which leaves the whole tensor on every
rank and, over Gloo, two copies of it; rows that are sent to the one rank that wants them arrive in the order in which
they stand in a file, and need no more memory there than a piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.passes.language.layout import Layout
from compile_muon.weights.named_tensors import Entry

__all__ = ["Wire"]

_PIECE = 32 << 20  # bytes

K = TypeVar("K")


def _bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor as bytes, a copy where it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _bytes_of(rank: int, entry: Entry, layout: Layout) -> int:
    return math.prod(part.stop - part.start for part in layout.region(rank)) * entry.tensor.element_size()


class Wire:
    """The connection of a group's first rank with the others.

    Args:
        group: None for one process.
        device: that the group works on.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._buffer: Tensor | None = None
        self.rank, self.world = (0, 1) if group is None else (group.rank(), group.size())

    def goes_on(self, error: Exception | None) -> bool:
        """Whether rank 0 has no ``error``; on every rank, collective."""
        if self._group is None:
            return error is None
        flag = torch.tensor([error is None], dtype=torch.uint8, device=self._device)
        dist.broadcast(flag, group=self._group, group_src=0)
        return bool(flag.item())

    @torch.no_grad()
    def collect(self, entry: Entry) -> Iterator[Tensor]:
        """The bytes of a whole tensor on rank 0, piece by piece; it must take all of them. Nothing elsewhere.

        Yields:
            1-D uint8 on the CPU; its memory is used again for the next one.
        """
        if entry.spec is not None and not entry.spec.layout.cut_in_rows:
            whole = self._assembled(entry, entry.spec.layout)
            if whole is not None:
                yield from _bytes(whole).split(_PIECE)
            return
        if entry.holder:
            yield from self._from(entry.holder, entry, entry.tensor.nbytes)
            return
        if self.rank == 0:  # the first rows are always there
            for piece in _bytes(entry.local).split(_PIECE):
                yield piece.cpu()
        if entry.spec is None:
            return
        for source in entry.spec.layout.holders[1:]:
            yield from self._from(source, entry, _bytes_of(source, entry, entry.spec.layout))

    def _from(self, source: int, entry: Entry, size: int) -> Iterator[Tensor]:
        """The bytes of another rank's piece on rank 0, which it sends; nothing elsewhere."""
        if self.rank == source:
            for piece in _bytes(entry.local).split(_PIECE):
                if piece.numel():
                    dist.send(piece, group=self._group, group_dst=0)
        elif self.rank == 0:
            if self._buffer is None:
                self._buffer = torch.empty(_PIECE, dtype=torch.uint8, device=self._device)
            for start in range(0, size, _PIECE):
                piece = self._buffer[: size - start]
                dist.recv(piece, group=self._group, group_src=source)
                yield piece.cpu()

    def _assembled(self, entry: Entry, layout: Layout) -> Tensor | None:
        """The whole tensor on rank 0, of pieces that are no rows of it."""
        whole = torch.empty(entry.shape, dtype=entry.tensor.dtype, device="cpu") if self.rank == 0 else None
        if whole is not None:
            whole[layout.region(0)] = entry.local.cpu()
        for source in layout.holders[1:]:
            pieces = [piece.clone() for piece in self._from(source, entry, _bytes_of(source, entry, layout))]
            if whole is not None and pieces:
                region = whole[layout.region(source)]
                region.copy_(torch.cat(pieces).view(whole.dtype).view(region.shape))
        return whole

    def whole(self, entries: Mapping[K, Entry]) -> tuple[dict[K, Tensor], Exception | None]:
        """Whole tensors on rank 0, on the CPU in memory of their own; nothing elsewhere.

        Returns:
            What there was room for, and on rank 0 why it is not all.
        """
        found: dict[K, Tensor] = {}
        error: Exception | None = None
        for key, entry in entries.items():
            flat = None
            if self.rank == 0:
                try:
                    flat = torch.empty(entry.tensor.nbytes, dtype=torch.uint8, device="cpu")
                except RuntimeError as failed:  # no memory
                    error = failed
            if not self.goes_on(error):
                break
            position = 0
            for piece in self.collect(entry):
                assert flat is not None
                flat[position : position + piece.numel()] = piece
                position += piece.numel()
            if flat is not None:
                found[key] = flat.view(entry.tensor.dtype).view(entry.shape)
        return found, error

    @torch.no_grad()
    def deal(self, entry: Entry, whole: Tensor | None) -> None:
        """Write a whole tensor, which only rank 0 has, into what each rank holds of it.

        Args:
            whole: ``entry.shape``; cast to the dtype it has in the model.
        """
        if whole is not None:
            whole = whole.detach().to(entry.tensor.dtype)
        if entry.holder is not None:
            self._hand(entry, entry.holder, None if whole is None else _bytes(whole))
            return
        if entry.spec is None:
            self._write(entry, self._broadcast(entry.tensor.nbytes, None if whole is None else _bytes(whole)))
            return
        layout = entry.spec.layout
        for target in range(self.world):
            self._hand(entry, target, None if whole is None else _bytes(whole[layout.region(target)]))

    def _hand(self, entry: Entry, target: int, part: Tensor | None) -> None:
        """Write bytes, which only rank 0 has, to what ``target`` holds."""
        if self.rank == target:
            self._write(entry, self._receive(entry.local.nbytes) if part is None else part)
        elif part is not None:
            for piece in part.split(_PIECE):
                if piece.numel():
                    dist.send(piece.to(self._device), group=self._group, group_dst=target)

    def _write(self, entry: Entry, data: Tensor) -> None:
        local = entry.local
        # Through copy_, which counts as an edit: momenta and resident copies go by that.
        local.copy_(data.view(local.dtype).view(local.shape))

    def _receive(self, size: int) -> Tensor:
        found = torch.empty(size, dtype=torch.uint8, device=self._device)
        for piece in found.split(_PIECE):
            if piece.numel():
                dist.recv(piece, group=self._group, group_src=0)
        return found

    def _broadcast(self, size: int, data: Tensor | None) -> Tensor:
        if data is None:
            data = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._group is None:
            return data
        data = data.to(self._device)
        for piece in data.split(_PIECE):
            if piece.numel():
                dist.broadcast(piece, group=self._group, group_src=0)
        return data
