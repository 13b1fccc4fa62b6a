"""Resident weights (stages 1 and 2) and slices of them: gathered anew after each step, or after an edit of a shard.

A refresh is started where every rank is, in ``step()``, and waited for where a weight is read: in the forward that
follows, weight by weight, while those behind it are under way. Who reads a weight alone, as rank 0 that evaluates,
waits for what all ranks have started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.agreement.compare import by_rank, compare
from compile_muon.engine.dtensors import edits_of, has_memory
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import LedgerError, listed
from compile_muon.passes import PassOptions
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.costs import Costs, gather_start
from compile_muon.passes.exchange.packing import pack, unpack_into
from compile_muon.passes.exchange.transfers import gather_slices, piece_widths, shard_widths
from compile_muon.passes.language.layout import Axis
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.language.work import Category
from compile_muon.passes.lowering.buckets import group_neighbours
from compile_muon.passes.torch_private import group_named

__all__ = [
    "Refresh",
    "buckets",
    "gathers",
    "keep_fresh",
    "start_refresh",
    "start_refresh_by_owner",
]

_BUCKET_BYTES = PassOptions.bucket_bytes

# From this on a weight is gathered by itself, straight to where it is resident, and no buffer is held until it is read.
# A mebibyte costs a host no more for being alone (as in ``passes.lowering.buckets``). To share costs a copy,
# so even what takes less long to send than to start is alone, but not if it takes less than this part of it.
_ALONE_BYTES = 2**20
_ALONE_STARTS = 0.25


def buckets(
    sharded_params: Sequence[ShardedParam], dtype_of: Callable[[ParamSpec], str]
) -> Iterator[list[ShardedParam]]:
    """Parameters that may share a buffer: one mesh, dtype and way to be sharded.

    Args:
        dtype_of: the dtype they would have in the buffer.
    """
    specs = [sharded.spec for sharded in sharded_params]
    for group in group_neighbours(
        specs, dtype_of, sharded_params[0].ledger.costs if sharded_params else Costs(), _BUCKET_BYTES
    ):
        yield [sharded_params[index] for index in group]


@dataclass(frozen=True, eq=False)
class Gather:
    """Parameters whose resident weights one collective refreshes.

    Args:
        alone: whether it goes straight to where the one weight is resident: ranks hold equal parts of it, in order.
        axis: of ranks that it is over, the latter one where there are two.
        widths: what each of these ranks sends of each.
        sent: what this one sends.
    """

    sharded_params: tuple[ShardedParam, ...]
    specs: tuple[ParamSpec, ...]
    alone: bool
    axis: Axis
    widths: tuple[int, ...]
    sent: Traffic

    @classmethod
    def of(cls, sharded_params: Sequence[ShardedParam]) -> Gather:
        specs = tuple(sharded.spec for sharded in sharded_params)
        axis, widths = _last_gather(specs)
        return cls(
            tuple(sharded_params), specs, _gathered_alone(sharded_params[0]), axis, tuple(widths), _traffic(specs)
        )


def gathers(sharded_params: Sequence[ShardedParam]) -> list[Gather]:
    """What refreshes ``sharded_params``, in the order in which it starts.

    By what all ranks know alike: they meet in this order.
    """
    place = {sharded: number for number, sharded in enumerate(sharded_params) if sharded.resident is not None}
    alone = {sharded for sharded in place if _gathered_alone(sharded)}
    shared = buckets([sharded for sharded in place if sharded not in alone], lambda spec: spec.compute_dtype)
    found = sorted([*([sharded] for sharded in alone), *shared], key=lambda bucket: place[bucket[0]])
    return [Gather.of(bucket) for bucket in found]


def _latest_gathers(sharded_params: Sequence[ShardedParam]) -> list[Gather]:
    """:func:`gathers` of one optimizer's, which are the same in most steps."""
    if not sharded_params:
        return []
    ledger = sharded_params[0].ledger
    of = [(sharded, sharded.spec) for sharded in sharded_params]
    found: list[Gather] = ledger.latest_gathers(of, lambda: gathers(sharded_params))
    return found


def _gathered_alone(sharded: ShardedParam) -> bool:
    spec, layout = sharded.spec, sharded.spec.layout
    parts = layout.shard.size * (layout.replicate.size if layout.cut_twice else 1)
    nbytes = layout.numel * decode_dtype(spec.compute_dtype).itemsize
    start = gather_start(layout, sharded.ledger.costs)
    even = layout.shape[0] % parts == 0 and nbytes >= max(_ALONE_BYTES, _ALONE_STARTS * start)
    return even and not layout.pairwise and not (layout.cut_twice and layout.replicated_weight)


def _last_gather(specs: Sequence[ParamSpec]) -> tuple[Axis, list[int]]:
    """The axis that the gather which ends in the resident weights goes over, and what each rank sends of each."""
    layout = specs[0].layout
    if layout.replicated_weight:
        return layout.shard.serving(Category.REFRESH), shard_widths(specs)
    return layout.replicate.serving(Category.REFRESH), piece_widths(specs)


def _packed(gather: Gather, pieces: Sequence[Tensor]) -> Tensor:
    """What this rank sends in a gather that ends in resident weights.

    Where that is the second of two gathers, the first is done here, and waited for; collective then.

    Args:
        pieces: what this rank holds of each.
    """
    layout, dtype = gather.specs[0].layout, decode_dtype(gather.specs[0].compute_dtype)
    if layout.cut_twice and layout.replicated_weight:
        pieces = gather_slices(pieces, gather.specs, dtype, Category.REFRESH)
    copies = gather.axis.size if layout.pairwise else 1
    return pack([*pieces] * copies, gather.widths * copies, dtype=dtype)


@dataclass(eq=False)
class Refresh:
    """One gather into what is resident of some weights, under way.

    Args:
        name: of its range.
        work: to be waited for.
        sending: kept until then.
        received: every rank's bucket, one behind the other, or the resident weight itself.
    """

    gather: Gather
    name: str
    work: dist.Work
    sending: Tensor
    received: Tensor

    @classmethod
    def start(cls, gather: Gather, name: str) -> Refresh:
        """Start it; collective."""
        sharded_params = gather.sharded_params
        pieces = [sharded.local.detach() for sharded in sharded_params]
        if gather.alone:
            resident = sharded_params[0].resident
            assert resident is not None
            sending, received = pieces[0].to(resident.dtype), resident.detach()
        else:
            sending = _packed(gather, pieces)
            received = sending.new_empty(gather.axis.size * sum(gather.widths))
        send = dist.all_to_all_single if gather.specs[0].layout.pairwise else dist.all_gather_into_tensor
        work = send(received, sending, group=group_named(gather.axis.group), async_op=True)
        found = cls(gather, name, work, sending, received)
        for sharded in sharded_params:
            sharded.begin_refresh(found)
        return found

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and write what came to the resident weights."""
        ledger = self.gather.sharded_params[0].ledger
        with ledger.range(f"{self.name} wait", Category.REFRESH.value, self.gather.sent.bytes_sent):
            self.work.wait()
            if not self.gather.alone:
                self._unpack()
            for sharded in self.gather.sharded_params:
                sharded.end_refresh()

    def _unpack(self) -> None:
        world = self.gather.axis.size
        rows, through = [], []
        for sharded, width in zip(self.gather.sharded_params, self.gather.widths, strict=True):
            resident = sharded.resident
            assert resident is not None
            own = _own_rows(sharded, resident)
            if own.stop or resident.numel() != world * width or not resident.is_contiguous():
                rows.append(self.received.new_empty(world, width))
                through.append((resident, rows[-1].view(-1)[: resident.numel()].view(resident.shape), own))
            else:  # none of it is the shard's own memory, and no rank's part is padded
                rows.append(resident.detach().view(world, width))
        unpack_into(self.received, rows)
        for resident, weight, own in through:
            resident[: own.start].copy_(weight[: own.start])
            resident[own.stop :].copy_(weight[own.stop :])


def _own_rows(sharded: ShardedParam, resident: Tensor) -> slice:
    """The rows of ``resident`` that are the shard's own memory, and may have been edited since it was sent."""
    local, layout = sharded.local, sharded.spec.layout
    if not local.numel() or local.dtype is not resident.dtype:
        return slice(0, 0)
    if not has_memory(local):  # in plans: where it would be
        first = 0 if layout.replicated_weight else layout.shard_rows(layout.shard.index)[0]
        return slice(layout.local_rows.start - first, layout.local_rows.stop - first)
    row = layout.row_numel * resident.element_size()
    first, rest = divmod(local.data_ptr() - resident.data_ptr(), row)
    inside = not rest and 0 <= first < len(resident)
    return slice(first, first + len(local)) if inside else slice(0, 0)


@torch.no_grad()
def start_refresh(sharded_params: Sequence[ShardedParam]) -> Traffic:
    """Start to gather what is resident of the weights of ``sharded_params``; collective over their group.

    Returns:
        What this rank sends.
    """
    total = Traffic()
    for sharded in sharded_params:
        sharded.await_refresh()
    for number, gather in enumerate(_latest_gathers(sharded_params)):
        name = f"refresh {number}"
        with gather.sharded_params[0].ledger.range(f"{name} launch", Category.REFRESH.value, gather.sent.bytes_sent):
            Refresh.start(gather, name)
        total = total + gather.sent
    return total


def _traffic(specs: Sequence[ParamSpec]) -> Traffic:
    """Of parameters that share a collective."""
    layout, dtype = specs[0].layout, decode_dtype(specs[0].compute_dtype)
    total = Traffic()
    if layout.replicated_weight:
        total = total + _sent(shard_widths(specs), dtype, layout.shard, layout.pairwise)
    if layout.cut_twice:
        total = total + _sent(piece_widths(specs), dtype, layout.replicate, layout.pairwise)
    return total


def _sent(widths: Sequence[int], dtype: torch.dtype, axis: Axis, pairwise: bool) -> Traffic:
    """Of one gather over ``axis``."""
    sent = sum(widths) * dtype.itemsize * (axis.size - 1)
    return Traffic(sent, (("all_to_all" if pairwise else "all_gather", 1),), by_axis=((axis.name, sent),))


def start_refresh_by_owner(sharded_params: Sequence[ShardedParam]) -> None:
    """:func:`start_refresh` for parameters of one optimizer or several, each of which counts its traffic."""
    for ledger in {id(sharded.ledger): sharded.ledger for sharded in sharded_params}.values():
        ledger.count(start_refresh([sharded for sharded in sharded_params if sharded.ledger is ledger]))


def keep_fresh(sharded: ShardedParam, among: Sequence[ShardedParam] | None = None) -> None:
    """Gather resident weights anew if this shard was edited since they were gathered (a loaded checkpoint, say).

    Args:
        among: the parameters to gather then; default: all of the optimizer.
    Raises:
        LedgerError: ranks come with different edits: one reads weights that others have edited again since.
    """
    if sharded.resident is not None and edits_of(sharded.param) != sharded.refreshed_at:
        among = sharded.ledger.sharded_params if among is None else among
        _compare_edits(among, sharded.group)
        sharded.ledger.count(start_refresh(among))


def _compare_edits(sharded_params: Sequence[ShardedParam], group: dist.ProcessGroup | None) -> None:
    """Who reads alone waits for the others' next read, and must not get their rows of another edit."""
    edits = {a.name: edits_of(a.param) - a.refreshed_at for a in sharded_params if a.resident is not None}
    if found := compare(edits, group):
        first, counts = next(iter(found.items()))
        raise LedgerError(
            f"{listed([*found])}: ranks read the weight after different numbers of edits ({by_rank(counts)} of "
            f"{first}); edit on every rank alike, and read, evaluate or train on all of them before the next edit"
        )
