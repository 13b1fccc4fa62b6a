"""Rows of tensors between rank 0 and the others, point to point and in pieces.

torch gathers by all-gather (``DTensor.full_tensor``, ``get_model_state_dict``), which leaves the whole tensor on every
rank and, over Gloo, two copies of it. Rows that are sent to the one rank that wants them arrive in the order in which
they stand in a file, and need no more memory there than a piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.weights.named_tensors import Entry

__all__ = ["Wire"]

_PIECE = 32 << 20  # bytes

K = TypeVar("K")


def _bytes(tensor: Tensor) -> Tensor:
    """View the elements of a tensor as bytes, of a copy where the tensor is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Wire:
    """The connection of a group's first rank with the others, on ``device``; a group of None is one process."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._buffer: Tensor | None = None
        self.rank, self.world = (0, 1) if group is None else (group.rank(), group.size())

    def goes_on(self, error: Exception | None) -> bool:
        """Tell every rank whether rank 0 has no ``error``; collective."""
        if self._group is None:
            return error is None
        flag = torch.tensor([error is None], dtype=torch.uint8, device=self._device)
        dist.broadcast(flag, group=self._group, group_src=0)
        return bool(flag.item())

    # ------------------------------------------------------------------------------------------ to rank 0

    def stream(self, entries: Mapping[K, Entry], begin: Callable[[K], Callable[[int, Tensor], object]]) -> None:
        """Give the bytes of whole tensors to rank 0, tensor by tensor and piece by piece; collective.

        Args:
            begin: called on rank 0 for each key; what it returns takes the place of a piece in the tensor, in bytes,
                and the piece, 1-D uint8 on the CPU, whose memory is used again for the next one.
        Raises:
            Exception: what ``begin`` or a taker raised, on rank 0 alone. The others have left the loop then, too.
        """
        error: Exception | None = None
        for key, entry in entries.items():
            try:
                take = begin(key) if self.rank == 0 else None
            except Exception as failed:
                error, take = failed, None
            if not self.goes_on(error):
                break
            start = 0
            for piece in self._pieces(entry):
                try:
                    if take is not None and error is None:
                        take(start, piece)
                except Exception as failed:
                    error = failed  # the rest of this tensor is on its way
                start += piece.numel()
        if error is not None:
            raise error

    def whole(self, entries: Mapping[K, Entry]) -> dict[K, Tensor]:
        """Gather whole tensors on rank 0, on the CPU in memory of their own; an empty dictionary elsewhere.

        Raises:
            RuntimeError: rank 0 has no room; there alone.
        """
        gathered: dict[K, Tensor] = {}

        def begin(key: K) -> Callable[[int, Tensor], object]:
            entry = entries[key]
            flat = torch.empty(entry.tensor.nbytes, dtype=torch.uint8, device="cpu")
            gathered[key] = flat.view(entry.tensor.dtype).view(entry.shape)
            return lambda start, piece: flat[start : start + piece.numel()].copy_(piece)

        self.stream(entries, begin)
        return gathered

    @torch.no_grad()
    def _pieces(self, entry: Entry) -> Iterator[Tensor]:
        """Yield the bytes of a whole tensor on rank 0; every rank must exhaust this."""
        layout = None if entry.spec is None else entry.spec.layout
        if layout is None:
            yield from self._from(entry.holder or 0, entry, entry.tensor.nbytes)
            return
        whole = None  # where pieces are no rows of it
        if not layout.cut_in_rows and self.rank == 0:
            whole = torch.empty(entry.shape, dtype=entry.tensor.dtype, device="cpu")
        for source in layout.holders:
            region = layout.region(source)
            size = math.prod(part.stop - part.start for part in region) * entry.tensor.element_size()
            if whole is None:
                yield from self._from(source, entry, size)
            elif pieces := [piece.clone() for piece in self._from(source, entry, size)]:
                whole[region] = torch.cat(pieces).view(whole.dtype).view(whole[region].shape)
        if whole is not None:
            yield from _bytes(whole).split(_PIECE)

    def _from(self, source: int, entry: Entry, size: int) -> Iterator[Tensor]:
        """Yield the bytes of a rank's piece on rank 0, to which that rank sends them."""
        if self.rank == source:
            for piece in _bytes(entry.local).split(_PIECE):
                if source == 0:
                    yield piece.cpu()
                elif piece.numel():
                    dist.send(piece, group=self._group, group_dst=0)
        elif self.rank == 0:
            if self._buffer is None:
                self._buffer = torch.empty(_PIECE, dtype=torch.uint8, device=self._device)
            for start in range(0, size, _PIECE):
                piece = self._buffer[: size - start]
                dist.recv(piece, group=self._group, group_src=source)
                yield piece.cpu()

    # ------------------------------------------------------------------------------------------ from rank 0

    @torch.no_grad()
    def deal(self, entry: Entry, whole: Tensor | None) -> None:
        """Write a whole tensor, which only rank 0 has, into what each rank holds of it, in that dtype; collective."""
        if whole is not None:
            whole = whole.detach().to(entry.tensor.dtype)
        if entry.spec is None:
            self._hand(entry, entry.holder, whole)
            return
        for target in range(self.world):
            self._hand(entry, target, None if whole is None else whole[entry.spec.layout.region(target)])

    def _hand(self, entry: Entry, target: int | None, part: Tensor | None) -> None:
        """Write a part, which only rank 0 has, to what ``target`` holds; None for every rank."""
        mine, local = target in (None, self.rank), entry.local
        if not mine and part is None:
            return
        data = torch.empty(local.nbytes, dtype=torch.uint8, device=self._device) if part is None else _bytes(part)
        for piece in data.split(_PIECE) if self._group is not None and target != 0 and data.numel() else ():
            piece = piece.to(self._device)
            if target is None:
                dist.broadcast(piece, group=self._group, group_src=0)
            elif part is None:
                dist.recv(piece, group=self._group, group_src=0)
            else:
                dist.send(piece, group=self._group, group_dst=target)
        if mine:
            # Through copy_, which counts as an edit: momenta and resident copies go by that.
            local.copy_(data.view(local.dtype).view(local.shape))
