"""Refresh of the resident weights (stages 1 and 2): one bucketed all-gather of the shards per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from compile_muon.passes.collectives import Traffic
from compile_muon.passes.exchange.transfers import gather_finish, gather_start
from compile_muon.passes.spec import decode_dtype
from compile_muon.runtime.ledger import ParamState, edits_of

__all__ = ["refresh_replicas"]

_BUCKET_BYTES = 25 * 2**20


def _buckets(states: Sequence[ParamState]) -> Iterator[list[ParamState]]:
    by_dtype: dict[str, list[ParamState]] = {}
    for state in states:
        by_dtype.setdefault(state.spec.compute_dtype, []).append(state)
    for members in by_dtype.values():
        bucket: list[ParamState] = []
        size = 0
        for state in members:
            nbytes = state.spec.numel * decode_dtype(state.spec.compute_dtype).itemsize
            if bucket and size + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(state)
            size += nbytes
        yield bucket


@torch.no_grad()
def refresh_replicas(states: Sequence[ParamState]) -> Traffic:
    """Gather every shard of ``states`` into its replica; collective over their group."""
    total = Traffic()
    for bucket in _buckets([state for state in states if state.replica is not None]):
        specs = [state.spec for state in bucket]
        handle = gather_start([state.local.detach() for state in bucket], specs)
        for state, full in zip(bucket, gather_finish(handle, specs), strict=True):
            assert state.replica is not None
            state.replica.copy_(full)
            state.refreshed_at = edits_of(state.param)
        sent = handle.numel() * handle.element_size() * (specs[0].world - 1) // specs[0].world
        total = total + Traffic(sent, ((specs[0].gather, 1),))
    return total
