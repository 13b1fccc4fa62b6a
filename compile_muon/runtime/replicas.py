"""Resident weights (stages 1 and 2) and slices of them: a bucketed all-gather per step, or after an edit of a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from compile_muon.passes.collectives import Traffic
from compile_muon.passes.exchange.transfers import gather_pieces, gather_slices, piece_widths, shard_widths
from compile_muon.passes.layout import Axis
from compile_muon.passes.spec import ParamSpec, decode_dtype
from compile_muon.passes.work import Category
from compile_muon.runtime.account import Account
from compile_muon.runtime.shards import edits_of

__all__ = ["buckets", "keep_fresh", "refresh_by_owner", "refresh_replicas"]

_BUCKET_BYTES = 25 * 2**20


def buckets(accounts: Sequence[Account], dtype_of: Callable[[ParamSpec], str]) -> Iterator[list[Account]]:
    """Parameters that may share a buffer: one mesh, dtype and way to be sharded, up to 25 MiB of whole tensors.

    Args:
        dtype_of: the dtype they would have in the buffer.
    """
    kinds: dict[tuple[object, ...], list[Account]] = {}
    for account in accounts:
        spec = account.spec
        kinds.setdefault((spec.layout.company, dtype_of(spec)), []).append(account)
    for members in kinds.values():
        bucket: list[Account] = []
        size = 0
        for account in members:
            nbytes = account.spec.layout.numel * decode_dtype(dtype_of(account.spec)).itemsize
            if bucket and size + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(account)
            size += nbytes
        yield bucket


@torch.no_grad()
def refresh_replicas(accounts: Sequence[Account]) -> Traffic:
    """Gather the pieces of ``accounts`` into what is resident of their weights; collective over their group."""
    total = Traffic()
    resident = [account for account in accounts if account.replica is not None]
    for number, bucket in enumerate(buckets(resident, lambda spec: spec.compute_dtype)):
        sent = _traffic([account.spec for account in bucket])
        with bucket[0].ledger.range(f"refresh {number}", Category.REFRESH.value, sent.bytes_sent):
            _refresh(bucket)
        total = total + sent
    return total


def _refresh(bucket: Sequence[Account]) -> None:
    """Gather parameters that share a buffer."""
    specs = [account.spec for account in bucket]
    pieces = [account.local.detach() for account in bucket]
    gather = gather_pieces if specs[0].layout.replicated_weight else gather_slices
    found = gather(pieces, specs, decode_dtype(specs[0].compute_dtype))
    for account, weight in zip(bucket, found, strict=True):
        assert account.replica is not None
        account.replica.copy_(weight)
        account.refreshed_at = edits_of(account.param)


def _traffic(specs: Sequence[ParamSpec]) -> Traffic:
    """Of parameters that share a buffer."""
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


def refresh_by_owner(accounts: Sequence[Account]) -> None:
    """:func:`refresh_replicas` for parameters of one optimizer or several, each of which counts its traffic."""
    for ledger in {id(account.ledger): account.ledger for account in accounts}.values():
        ledger.count(refresh_replicas([account for account in accounts if account.ledger is ledger]))


def keep_fresh(account: Account, among: Sequence[Account] | None = None) -> None:
    """Gather resident weights anew if this shard was edited since they were gathered (a loaded checkpoint, say).

    Args:
        among: the parameters to gather then; default: all of the optimizer.
    """
    if account.replica is not None and edits_of(account.param) != account.refreshed_at:
        account.ledger.count(refresh_replicas(account.ledger.accounts if among is None else among))
