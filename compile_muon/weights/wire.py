"""Rows of tensors between rank 0 and the others, point to point and in pieces.

torch gathers by all-gather (``DTensor.full_tensor``, ``get_model_state_dict``), which leaves the whole tensor on every
rank and, over Gloo, two copies of it. Rows that are sent to the one rank that wants them arrive in the order in which
they stand in a file, and need no more memory there than a piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.agreement.status import RankStatus
from compile_muon.agreement.together import Ranks
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes.language.layout import Layout

_PIECE = 32 << 20  # bytes

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Entry:
    """One tensor of a model or an optimizer."""

    tensor: Tensor  # the parameter (its shard's DTensor), buffer or state itself
    sharded: ShardedParam | None  # None for a buffer, of which every rank has its own and rank 0's counts
    # The only rank that has it, elsewhere ``tensor`` is on the meta device; None for one as above.
    holder: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # of the whole tensor
        return tuple(self.tensor.shape)

    @property
    def local(self) -> Tensor:
        return local_tensor(self.tensor).detach()

    @property
    def layout(self) -> Layout | None:
        """The layout of the sharded tensor; None where every rank holds all of it."""
        if self.sharded is None:
            return None
        layout = self.sharded.spec.layout
        # a state with one number a row: ranks with other columns have the same
        if self.shape != layout.unsharded_shape:
            columns = layout.tensor_dim is not None and self.shape[layout.tensor_dim] == 1
            layout = replace(layout, unsharded_shape=self.shape, tensor_dim=None if columns else layout.tensor_dim)
        return layout if layout.sharded or layout.model_parallel else None


def _bytes(tensor: Tensor) -> Tensor:
    """View the elements of a tensor as bytes, of a copy where the tensor is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Wire(Ranks):
    """The connection of a group's first rank with the others, on ``device``; a group of None is one process."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, status: RankStatus) -> None:
        super().__init__(group, device, status, apart=False)
        self._device = device
        self._buffer: Tensor | None = None

    def _prepared(self, entries: Mapping[K, Entry], prepare: Callable[[K], V]) -> Iterator[tuple[Entry, V | None]]:
        """Yield each entry with what ``prepare`` makes of its key on rank 0; every rank stops where that raises."""
        for key, entry in entries.items():
            error, value = None, None
            try:
                value = prepare(key) if self.rank == 0 else None
            except Exception as failed:
                error = failed
            if self.group is not None:
                flag = torch.tensor([error is None], dtype=torch.uint8, device=self._device)
                dist.broadcast(flag, group=self.group, group_src=0)
                if self.rank != 0 and not flag.item():
                    return
            if error is not None:
                raise error
            yield entry, value

    def stream(self, entries: Mapping[K, Entry], begin: Callable[[K], Callable[[Tensor], object]]) -> None:
        """Give the bytes of whole tensors to rank 0, tensor by tensor and piece by piece; collective.

        On rank 0 ``begin`` is called for each key, and returns a function that takes one piece after the other: 1-D
        uint8 on the CPU, whose memory is used again for the next one. An error of either is raised on rank 0 alone,
        once the others have left the loop, too.
        """
        failed: list[Exception] = []

        def prepare(key: K) -> Callable[[Tensor], object]:
            if failed:
                raise failed[0]
            return begin(key)

        for entry, take in self._prepared(entries, prepare):
            for piece in self._pieces(entry):
                try:
                    if take is not None and not failed:
                        take(piece)
                except Exception as error:
                    failed.append(error)  # the rest of this tensor is on its way
        if failed:
            raise failed[0]

    def collect_all(self, entries: Mapping[K, Entry]) -> dict[K, Tensor]:
        """Gather whole tensors on rank 0, on the CPU in memory of their own; an empty dictionary elsewhere. Where rank
        0 has no room, a RuntimeError is raised there alone."""
        gathered: dict[K, Tensor] = {}

        def begin(key: K) -> Callable[[Tensor], object]:
            entry = entries[key]
            rest = [torch.empty(entry.tensor.nbytes, dtype=torch.uint8, device="cpu")]
            gathered[key] = rest[0].view(entry.tensor.dtype).view(entry.shape)

            def take(piece: Tensor) -> None:
                rest[0][: piece.numel()] = piece
                rest[0] = rest[0][piece.numel() :]

            return take

        self.stream(entries, begin)
        return gathered

    @torch.no_grad()
    def _pieces(self, entry: Entry) -> Iterator[Tensor]:
        """Yield the bytes of a whole tensor on rank 0; every rank must exhaust this."""
        if (layout := entry.layout) is None:
            yield from self._from(entry.holder or 0, entry, entry.tensor.nbytes)
            return
        unsharded = None  # where pieces are no rows of it
        if not layout.cut_in_rows and self.rank == 0:
            unsharded = torch.empty(entry.shape, dtype=entry.tensor.dtype, device="cpu")
        for source in layout.holders:
            region = layout.region(source)
            size = math.prod(part.stop - part.start for part in region) * entry.tensor.element_size()
            if unsharded is None:
                yield from self._from(source, entry, size)
            elif pieces := [piece.clone() for piece in self._from(source, entry, size)]:
                unsharded[region] = torch.cat(pieces).view(unsharded.dtype).view(unsharded[region].shape)
        if unsharded is not None:
            yield from _bytes(unsharded).split(_PIECE)

    def _from(self, source: int, entry: Entry, size: int) -> Iterator[Tensor]:
        """Yield the bytes of a rank's piece on rank 0, to which that rank sends them."""
        if self.rank == source:
            for piece in _bytes(entry.local).split(_PIECE):
                if source == 0:
                    yield piece.cpu()
                elif piece.numel():
                    dist.send(piece, group=self.group, group_dst=0)
        elif self.rank == 0:
            if self._buffer is None:
                self._buffer = torch.empty(_PIECE, dtype=torch.uint8, device=self._device)
            for start in range(0, size, _PIECE):
                piece = self._buffer[: size - start]
                dist.recv(piece, group=self.group, group_src=source)
                yield piece.cpu()

    def spread(self, entries: Mapping[K, Entry], value_of: Callable[[K], Tensor]) -> None:
        """Write whole tensors, which ``value_of`` makes on rank 0, into what each rank holds of them; collective. What
        ``value_of`` raises is raised on rank 0 alone, once the others have left the loop, too."""
        for entry, unsharded in self._prepared(entries, value_of):
            self.deal(entry, unsharded)

    @torch.no_grad()
    def deal(self, entry: Entry, unsharded: Tensor | None) -> None:
        """Write a whole tensor, which only rank 0 has, into what each rank holds of it, in that dtype; collective."""
        if unsharded is not None:
            unsharded = unsharded.detach().to(entry.tensor.dtype)
        if (layout := entry.layout) is None:
            self._hand(entry, entry.holder, unsharded)
            return
        for target in range(self.world):
            self._hand(entry, target, None if unsharded is None else unsharded[layout.region(target)])

    def _hand(self, entry: Entry, target: int | None, part: Tensor | None) -> None:
        """Write a part, which only rank 0 has, to what ``target`` holds; None for every rank."""
        mine, local = target in (None, self.rank), entry.local
        if not mine and part is None:
            return
        data = torch.empty(local.nbytes, dtype=torch.uint8, device=self._device) if part is None else _bytes(part)
        for piece in data.split(_PIECE) if self.group is not None and target != 0 and data.numel() else ():
            piece = piece.to(self._device)
            if target is None:
                dist.broadcast(piece, group=self.group, group_src=0)
            elif part is None:
                dist.recv(piece, group=self.group, group_src=0)
            else:
                dist.send(piece, group=self.group, group_dst=target)
        if mine:
            # Through copy_, which counts as an edit: momenta and resident copies go by that.
            local.copy_(data.view(local.dtype).view(local.shape))
