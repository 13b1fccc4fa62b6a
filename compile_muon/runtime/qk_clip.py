"""MuonClip: rows of queries and keys scaled down where the logits of their head grew too large.

    S_h = largest logit of head h since the last step, over micro-batches and ranks
    g_h = min(1, threshold / S_h), of the query heads that share a key head the least
    W_q,h <- g_h^alpha W_q,h,   W_k,h <- g_h^(1 - alpha) W_k,h

Of multi-head latent attention, where all heads share the part of the keys with positions: the rows of queries that meet
it by g_h, the others and the head's own rows of keys as above. Source: Kimi K2, arXiv 2507.20534, and for shared key
heads Megatron's ``qk_clip``. The momentum is not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.errors import UnsupportedModelError
from compile_muon.runtime.account import Account, Attention

__all__ = ["check_heads", "clip_heads"]

_ALL = slice(None)


@dataclass(frozen=True)
class _Heads:
    """What of a parameter is of which head.

    Args:
        dim: that heads lie along.
        numbers: of every row, or column, that this rank has: its head, or ``count`` for none.
        count: heads.
    """

    dim: int
    numbers: Tensor
    count: int


def _order(account: Account, dim: int) -> Tensor:
    """Rows or columns of the whole parameter, part by part where a view says what its parts are."""
    muon = account.spec.muon
    order = torch.arange(account.spec.layout.whole[dim])
    if muon is None or muon.view is None or muon.view.dim != dim:
        return order
    shape = (-1, 1) if dim == 0 else (1, -1)
    return torch.cat([part.flatten() for part in muon.view.cut(order.view(shape))])


def _heads(account: Account, dim: int, first: int, count: int, size: int, of: slice = _ALL) -> _Heads:
    """Of the heads in ``count * size`` rows behind the ``first`` ones, in the order of the parts.

    Args:
        of: which rows of each head.
    """
    layout = account.spec.layout
    order = _order(account, dim)
    numbers = torch.full((layout.whole[dim],), count)
    rows = order[first : first + count * size].view(count, size)[:, of]
    numbers[rows] = torch.arange(count)[:, None].expand_as(rows)
    numbers = numbers[layout.part[dim]]
    if dim == 0 and layout.sharded:
        numbers = numbers[layout.local_rows]
    return _Heads(dim, numbers.to(account.local.device), count)


def _scaled(account: Account, noted: Attention, alpha: float) -> list[tuple[Account, _Heads, float]]:
    """Which heads are scaled, of an attention whose queries ``account`` projects: of which weight, by which power.

    Raises:
        UnsupportedModelError: it is not known which rows are whose.
    """
    key, (query_dim, key_dim) = noted.key, noted.dims
    heads, size, own = len(noted.largest), noted.size, noted.own
    rows, key_rows = account.spec.layout.whole[query_dim], key.spec.layout.whole[key_dim]
    fused, latent = key is account, own < size
    keys = heads if latent else (rows // size - heads) // 2 if fused else key_rows // size
    muon = account.spec.muon
    fits = rows == (heads + 2 * keys if fused else heads) * size and (fused or key_rows == keys * size)
    if latent:  # values lie behind a head's own part of a key
        fits = not fused and rows == heads * size and key_rows % heads == 0 and key_rows // heads >= own
    if fused and account.spec.layout.joined:
        remedy = "leave qk_clip out: heads of fused projections on tensor-parallel ranks are not scaled"
    elif not fits or keys < 1 or heads % keys:
        remedy = f"leave qk_clip out: its {heads} heads of {size} are not all of its rows"
    elif fused and (muon is None or muon.view is None):
        remedy = "set split_fused, or say in muon_views which rows are queries, keys and values"
    elif latent:
        return [
            (account, _heads(account, query_dim, 0, heads, size, slice(0, own)), alpha),
            (account, _heads(account, query_dim, 0, heads, size, slice(own, size)), 1.0),
            (key, _heads(key, key_dim, 0, heads, key_rows // heads, slice(0, own)), 1 - alpha),
        ]
    else:
        return [
            (account, _heads(account, query_dim, 0, heads, size), alpha),
            (key, _heads(key, key_dim, heads * size if fused else 0, keys, size), 1 - alpha),
        ]
    raise UnsupportedModelError(f"qk_clip of {account.name}, {list(account.spec.layout.whole)}: {remedy}")


def check_heads(accounts: Sequence[Account], alpha: float) -> None:
    """See to it that heads can be scaled, and note which rows are whose.

    Args:
        accounts: of all matrices.
        alpha: ``qk_clip_alpha``.
    Raises:
        UnsupportedModelError: heads are not all rows of a weight, or of a fused one on tensor-parallel ranks; or no
            attention was noted.
    """
    if not any(account.attention for account in accounts):
        raise UnsupportedModelError(
            "qk_clip: no compiled graph has noted a logit; compile the model with backend='muon_zero', and let its "
            "attention call scaled_dot_product_attention or flex_attention"
        )
    for account in accounts:
        noted = account.attention
        if noted is not None and noted.made_for != (specs := (account.spec, noted.key.spec)):
            noted.scaled, noted.made_for = _scaled(account, noted, alpha), specs


@torch.no_grad()
def clip_heads(
    accounts: Sequence[Account], threshold: float, everyone: dist.ProcessGroup | None, withheld: Tensor | None
) -> Tensor | None:
    """Scale the rows of queries and keys; one collective for all heads, which the host does not wait for.

    Args:
        accounts: of all matrices, in the same order on every rank; :func:`check_heads` has seen them.
        threshold: ``qk_clip``.
        withheld: as for :func:`~compile_muon.kernels.muon_apply`.
    Returns:
        The largest logit of all heads, over all ranks; None where no attention was noted.
    """
    noted = [account.attention for account in accounts if account.attention is not None]
    if not noted:
        return None
    largest = torch.cat([attention.largest for attention in noted])
    if everyone is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=everyone)
    sizes = [len(attention.largest) for attention in noted]
    for attention, own in zip(noted, largest.split(sizes), strict=True):
        attention.largest.fill_(-math.inf)
        _, keys, _ = attention.scaled[-1]
        # Also where nothing, or something that is not a number, was noted.
        factor = torch.where(own > threshold, threshold / own, torch.ones_like(own))
        if withheld is not None:
            factor = torch.where(withheld == 1, torch.ones_like(factor), factor)
        shared = factor.view(keys.count, -1).amin(1)
        for weight, rows, power in attention.scaled:
            _scale(weight, rows, shared.repeat_interleave(rows.count // keys.count) ** power)
    return largest.max()


def _scale(account: Account, heads: _Heads, factors: Tensor) -> None:
    local = account.local.detach()
    of_rows = torch.cat([factors, factors.new_ones(1)])[heads.numbers].to(local.dtype)
    local.mul_(of_rows[:, None] if heads.dim == 0 else of_rows)
