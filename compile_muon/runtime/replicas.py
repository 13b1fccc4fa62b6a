"""Resident weights (stages 1 and 2): one bucketed all-gather of the shards per step, or after an edit of a shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from compile_muon.passes.collectives import Traffic
from compile_muon.passes.exchange.transfers import gather_finish, gather_start
from compile_muon.passes.spec import decode_dtype
from compile_muon.runtime.account import Account
from compile_muon.runtime.shards import edits_of

__all__ = ["keep_fresh", "refresh_replicas"]

_BUCKET_BYTES = 25 * 2**20


def _buckets(accounts: Sequence[Account]) -> Iterator[list[Account]]:
    by_dtype: dict[str, list[Account]] = {}
    for account in accounts:
        by_dtype.setdefault(account.spec.compute_dtype, []).append(account)
    for members in by_dtype.values():
        bucket: list[Account] = []
        size = 0
        for account in members:
            nbytes = account.spec.numel * decode_dtype(account.spec.compute_dtype).itemsize
            if bucket and size + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(account)
            size += nbytes
        yield bucket


@torch.no_grad()
def refresh_replicas(accounts: Sequence[Account]) -> Traffic:
    """Gather every shard of ``accounts`` into its replica; collective over their group."""
    total = Traffic()
    for bucket in _buckets([account for account in accounts if account.replica is not None]):
        specs = [account.spec for account in bucket]
        handle = gather_start([account.local.detach() for account in bucket], specs)
        for account, full in zip(bucket, gather_finish(handle, specs), strict=True):
            assert account.replica is not None
            account.replica.copy_(full)
            account.refreshed_at = edits_of(account.param)
        sent = handle.numel() * handle.element_size() * (specs[0].world - 1) // specs[0].world
        total = total + Traffic(sent, ((specs[0].gather, 1),))
    return total


def keep_fresh(account: Account) -> None:
    """Gather resident weights anew if this shard was edited since they were gathered (a loaded checkpoint, say)."""
    if account.replica is not None and edits_of(account.param) != account.refreshed_at:
        account.ledger.count(refresh_replicas(account.ledger.accounts))
