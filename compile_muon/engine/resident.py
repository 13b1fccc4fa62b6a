"""Refreshes of resident weights (stages 1 and 2) and slices, after each step and after an edit of a shard.

A refresh starts in ``step()``, where every rank is, and is waited for at the read of a weight: in the next forward,
weight by weight, while later ones are arriving. A rank that reads a weight alone (rank 0 evaluates, say) waits for a
refresh that all ranks have started.

A refresh sends each rank's rows in the compute dtype by all-gathers, or all-to-alls where ``Layout.pairwise``: pieces
over ``replicate`` into slices, where replicas cut the master weights (HFSDP); then, at stages 1 and 2, slices over
``shard`` into whole weights. Small weights share a bucket; a large one goes straight into its resident memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.agreement.compare import by_rank, compare
from compile_muon.engine.dtensors import edits_of, has_memory, local_tensor
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

_BUCKET_BYTES = PassOptions.bucket_bytes

# A weight is gathered alone, straight to its resident memory, with no buffer held until its read and no copy, if it has
# at least a mebibyte (from which on another collective costs the host nothing more, see ``passes.lowering.buckets``),
# and if sending it takes at least this part of the time to start a gather.
_ALONE_BYTES = 2**20
_ALONE_STARTS = 0.25


def buckets(
    sharded_params: Sequence[ShardedParam], dtype_of: Callable[[ParamSpec], str]
) -> Iterator[list[ShardedParam]]:
    """Yield the parameters that may share a buffer: one mesh, one dtype in it (``dtype_of``), one way to be sharded."""
    specs = [sharded.spec for sharded in sharded_params]
    for group in group_neighbours(
        specs, dtype_of, sharded_params[0].ledger.costs if sharded_params else Costs(), _BUCKET_BYTES
    ):
        yield [sharded_params[index] for index in group]


@dataclass(frozen=True, eq=False)
class Gather:
    """Parameters whose resident weights one collective refreshes."""

    sharded_params: tuple[ShardedParam, ...]
    specs: tuple[ParamSpec, ...]
    alone: bool  # one weight, straight to its resident memory: all ranks have equal parts, in order
    axis: Axis  # over which it gathers; over which the second does, where there are two
    widths: tuple[int, ...]  # elements of each parameter that a rank sends
    sent: Traffic  # by this rank, in both if there are two

    @classmethod
    def of(cls, sharded_params: Sequence[ShardedParam]) -> Gather:
        specs = tuple(sharded.spec for sharded in sharded_params)
        layout, itemsize = specs[0].layout, decode_dtype(specs[0].compute_dtype).itemsize
        collective = "all_to_all" if layout.pairwise else "all_gather"
        # The gather that ends in the resident weights comes first, though it runs last.
        over = [(layout.shard, shard_widths(specs))] if layout.replicated_weight else []
        over += [(layout.replicate, piece_widths(specs))] if layout.cut_twice else []
        traffic = Traffic()
        for axis, widths in over:
            nbytes = sum(widths) * itemsize * (axis.size - 1)
            traffic = traffic + Traffic(nbytes, ((collective, 1),), by_axis=((axis.name, nbytes),))
        axis, widths = over[0]
        alone = _gathered_alone(sharded_params[0])
        return cls(tuple(sharded_params), specs, alone, axis.serving(Category.REFRESH), tuple(widths), traffic)


def gathers(sharded_params: Sequence[ShardedParam]) -> list[Gather]:
    """Return the gathers that refresh ``sharded_params``, in order."""
    # From facts that are equal on all ranks: the order of collectives must be.
    position = {sharded: number for number, sharded in enumerate(sharded_params) if sharded.resident is not None}
    alone = {sharded for sharded in position if _gathered_alone(sharded)}
    shared = buckets([sharded for sharded in position if sharded not in alone], lambda spec: spec.compute_dtype)
    ordered_buckets = sorted([*([sharded] for sharded in alone), *shared], key=lambda bucket: position[bucket[0]])
    return [Gather.of(bucket) for bucket in ordered_buckets]


def _latest_gathers(sharded_params: Sequence[ShardedParam]) -> list[Gather]:
    """Return :func:`gathers`, cached in the ledger: the same in most steps."""
    if not sharded_params:
        return []
    ledger = sharded_params[0].ledger
    key = [(sharded, sharded.spec) for sharded in sharded_params]
    if ledger.gathers is None or ledger.gathers[0] != key:
        ledger.gathers = key, gathers(sharded_params)
    cached: list[Gather] = ledger.gathers[1]
    return cached


def _gathered_alone(sharded: ShardedParam) -> bool:
    spec, layout = sharded.spec, sharded.spec.layout
    parts = layout.shard.size * (layout.replicate.size if layout.cut_twice else 1)
    nbytes = layout.numel * decode_dtype(spec.compute_dtype).itemsize
    start = gather_start(layout, sharded.ledger.costs)
    even = layout.shape[0] % parts == 0 and nbytes >= max(_ALONE_BYTES, _ALONE_STARTS * start)
    return even and not layout.pairwise and not (layout.cut_twice and layout.replicated_weight)


@dataclass(eq=False)
class Refresh:
    """A running gather into resident weights."""

    gather: Gather
    name: str  # of its profiler range
    work: dist.Work
    sending: Tensor  # kept until the work is done
    received: Tensor  # buckets of all ranks, concatenated; the resident weight itself if alone

    @classmethod
    def start(cls, gather: Gather, name: str) -> Refresh:
        """Start the gather; of two, the first runs here and is waited for. Collective."""
        sharded_params, layout = gather.sharded_params, gather.specs[0].layout
        pieces: Sequence[Tensor] = [local_tensor(sharded.param).detach() for sharded in sharded_params]
        if gather.alone:
            resident = sharded_params[0].resident
            assert resident is not None
            sending, received = pieces[0].to(resident.dtype), resident.detach()
        else:
            dtype, copies = decode_dtype(gather.specs[0].compute_dtype), gather.axis.size if layout.pairwise else 1
            if layout.cut_twice and layout.replicated_weight:
                pieces = gather_slices(pieces, gather.specs, dtype, Category.REFRESH)
            sending = pack([*pieces] * copies, gather.widths * copies, dtype=dtype)
            received = sending.new_empty(gather.axis.size * sum(gather.widths))
        send = dist.all_to_all_single if layout.pairwise else dist.all_gather_into_tensor
        work = send(received, sending, group=group_named(gather.axis.group), async_op=True)
        refresh = cls(gather, name, work, sending, received)
        for sharded in sharded_params:
            assert sharded.resident is not None
            sharded.refresh, sharded.refreshed_at = refresh, edits_of(sharded.param)
            # Autograd must refuse a backward that saved the weight before this refresh.
            torch.autograd.graph.increment_version(sharded.resident)
        return refresh

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the gather, and write the received rows to the resident weights."""
        ledger = self.gather.sharded_params[0].ledger
        with ledger.range(f"{self.name} wait", Category.REFRESH.value, self.gather.sent.bytes_sent):
            self.work.wait()
            if not self.gather.alone:
                self._unpack()
            for sharded in self.gather.sharded_params:
                sharded.refresh = None

    def _unpack(self) -> None:
        world = self.gather.axis.size
        rows, copies = [], []
        for sharded, width in zip(self.gather.sharded_params, self.gather.widths, strict=True):
            resident = sharded.resident
            assert resident is not None
            shard_rows = _own_rows(sharded, resident)
            if shard_rows.stop or resident.numel() != world * width or not resident.is_contiguous():
                rows.append(self.received.new_empty(world, width))
                copies.append((resident, rows[-1].view(-1)[: resident.numel()].view(resident.shape), shard_rows))
            else:  # received straight: not the shard's memory, and no padding
                rows.append(resident.detach().view(world, width))
        unpack_into(self.received, rows)
        for resident, weight, shard_rows in copies:
            resident[: shard_rows.start].copy_(weight[: shard_rows.start])
            resident[shard_rows.stop :].copy_(weight[shard_rows.stop :])


def _own_rows(sharded: ShardedParam, resident: Tensor) -> slice:
    """Return the rows of ``resident`` that are the shard's memory, which may have been edited since it was sent."""
    local, layout = sharded.local, sharded.spec.layout
    if not local.numel() or local.dtype is not resident.dtype:
        return slice(0, 0)
    if not has_memory(local):  # in plans: the rows where the shard would be
        first = 0 if layout.replicated_weight else layout.shard_rows(layout.shard.index)[0]
        return slice(layout.local_rows.start - first, layout.local_rows.stop - first)
    row = layout.row_numel * resident.element_size()
    first, remainder = divmod(local.data_ptr() - resident.data_ptr(), row)
    inside = not remainder and 0 <= first < len(resident)
    return slice(first, first + len(local)) if inside else slice(0, 0)


@torch.no_grad()
def start_refresh(sharded_params: Sequence[ShardedParam]) -> Traffic:
    """Start to refresh the resident weights of ``sharded_params``; return the traffic of this rank. Collective."""
    total = Traffic()
    for sharded in sharded_params:
        if sharded.refresh is not None:
            sharded.refresh.finish()
    for number, gather in enumerate(_latest_gathers(sharded_params)):
        name = f"refresh {number}"
        with gather.sharded_params[0].ledger.range(f"{name} launch", Category.REFRESH.value, gather.sent.bytes_sent):
            Refresh.start(gather, name)
        total = total + gather.sent
    return total


def start_refresh_by_owner(sharded_params: Sequence[ShardedParam]) -> None:
    """Call :func:`start_refresh` for each optimizer that has some of the parameters, and count its traffic."""
    for ledger in {id(sharded.ledger): sharded.ledger for sharded in sharded_params}.values():
        ledger.count(start_refresh([sharded for sharded in sharded_params if sharded.ledger is ledger]))


def keep_fresh(sharded: ShardedParam, among: Sequence[ShardedParam] | None = None) -> None:
    """Refresh resident weights, ``among`` (default: all), if this shard was edited since, by a loaded checkpoint, say.
    LedgerError if ranks have edited the weights a different number of times."""
    if sharded.resident is not None and edits_of(sharded.param) != sharded.refreshed_at:
        among = sharded.ledger.sharded_params if among is None else among
        _compare_edits(among, sharded.group)
        sharded.ledger.count(start_refresh(among))


def _compare_edits(sharded_params: Sequence[ShardedParam], group: dist.ProcessGroup | None) -> None:
    """Raise if ranks have edited weights a different number of times: a rank that reads alone would get the rows of a
    later edit."""
    edits = {a.name: edits_of(a.param) - a.refreshed_at for a in sharded_params if a.resident is not None}
    if differing := compare(edits, group):
        first, counts = next(iter(differing.items()))
        raise LedgerError(
            f"{listed([*differing])}: ranks read the weight after different numbers of edits ({by_rank(counts)} of "
            f"{first}); edit on every rank alike, and read, evaluate or train on all of them before the next edit"
        )
