"""MuonClip: rows of queries and keys scaled down where the logits of their head grew too large.

    S_h = largest logit of head h in what the gradients are of, over micro-batches and ranks
    g_h = min(1, threshold / S_h), of the query heads that share a key head the least
    W_q,h <- g_h^alpha W_q,h,   W_k,h <- g_h^(1 - alpha) W_k,h,   and so their biases

Of multi-head latent attention, where all heads share the part of the keys with positions: the rows of queries that meet
it by g_h, the others and the head's own rows of keys as above. Source: Kimi K2, arXiv 2507.20534, and for shared key
heads Megatron's ``qk_clip``. The momentum is not scaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        dim: that heads lie along, 0 of a bias.
        numbers: of every row, or column, that this rank has: its head, or ``count`` for none.
        count: heads.
    """

    dim: int
    numbers: Tensor
    count: int


@dataclass(frozen=True)
class _Projection:
    """A weight that projects queries or keys along ``dim``, and the bias that is added to them."""

    weight: Account
    bias: Account | None
    dim: int

    @property
    def rows(self) -> int:
        """Along ``dim``, of the whole weight."""
        return self.weight.spec.layout.whole[self.dim]

    def _order(self) -> Tensor:
        """Rows or columns of the whole parameter, part by part where a view says what its parts are."""
        muon = self.weight.spec.muon
        order = torch.arange(self.rows)
        if muon is None or muon.view is None or muon.view.dim != self.dim:
            return order
        shape = (-1, 1) if self.dim == 0 else (1, -1)
        return torch.cat([part.flatten() for part in muon.view.cut(order.view(shape))])

    def heads(self, first: int, count: int, size: int, of: slice = _ALL) -> Iterator[tuple[Account, _Heads]]:
        """Of weight and bias, the heads in ``count * size`` rows behind the ``first`` ones, in the order of the parts.

        Args:
            of: which rows of each head.
        """
        numbers = torch.full((self.rows,), count)
        rows = self._order()[first : first + count * size].view(count, size)[:, of]
        numbers[rows] = torch.arange(count)[:, None].expand_as(rows)
        for account, dim in ((self.weight, self.dim), (self.bias, 0)):
            if account is None:
                continue
            layout = account.spec.layout  # a bias is cut otherwise than its weight
            own = numbers[layout.part[dim]]
            if dim == 0 and layout.sharded:
                own = own[layout.local_rows]
            yield account, _Heads(dim, own.to(account.local.device), count)


def _scaled(account: Account, noted: Attention, alpha: float) -> list[tuple[Account, _Heads, float]]:
    """Which heads are scaled, of an attention whose queries ``account`` projects: of which parameter, by which power.

    Raises:
        UnsupportedModelError: it is not known which rows are whose, or a parameter that is to be scaled is frozen.
    """
    query, key = (_Projection(*given) for given in zip((account, noted.key), noted.biases, noted.dims, strict=True))
    heads, size, own = len(noted.largest), noted.size, noted.own
    rows, key_rows = query.rows, key.rows
    fused, latent = noted.key is account, own < size
    keys = heads if latent else (rows // size - heads) // 2 if fused else key_rows // size
    muon = account.spec.muon
    fits = rows == (heads + 2 * keys if fused else heads) * size and (fused or key_rows == keys * size)
    if latent:  # values lie behind a head's own part of a key
        fits = not fused and rows == heads * size and key_rows % heads == 0 and key_rows // heads >= own
    added = [
        (bias.name, bias.spec.layout.whole[0], projection.rows)
        for projection in (query, key)
        if (bias := projection.bias) is not None
    ]
    frozen = next((each.name for each in (noted.key, *noted.biases) if each and not each.param.requires_grad), None)
    unfit = next(
        (f"{name} has {length} entries, not {number}" for name, length, number in added if length != number), None
    )
    if fused and account.spec.layout.joined:
        remedy = "leave qk_clip out: heads of fused projections on tensor-parallel ranks are not scaled"
    elif not fits or keys < 1 or heads % keys:
        remedy = f"leave qk_clip out: its {heads} heads of {size} are not all of its rows"
    elif unfit is not None:
        remedy = f"leave qk_clip out: {unfit}, and is no bias of its heads"
    elif frozen is not None:
        remedy = f"train {frozen}, too, or leave qk_clip out: it is frozen, and would be scaled with its heads"
    elif fused and (muon is None or muon.view is None):
        remedy = "set split_fused, or say in muon_views which rows are queries, keys and values"
    elif latent:
        return [
            *((*each, alpha) for each in query.heads(0, heads, size, slice(0, own))),
            *((*each, 1.0) for each in query.heads(0, heads, size, slice(own, size))),
            *((*each, 1 - alpha) for each in key.heads(0, heads, key_rows // heads, slice(0, own))),
        ]
    else:
        return [
            *((*each, alpha) for each in query.heads(0, heads, size)),
            *((*each, 1 - alpha) for each in key.heads(heads * size if fused else 0, keys, size)),
        ]
    raise UnsupportedModelError(f"qk_clip of {account.name}, {list(account.spec.layout.whole)}: {remedy}")


def check_heads(accounts: Sequence[Account], alpha: float) -> None:
    """See to it that heads can be scaled, and note which rows are whose.

    Args:
        accounts: of all matrices.
        alpha: ``qk_clip_alpha``.
    Raises:
        UnsupportedModelError: heads are not all rows of a weight, or of a fused one on tensor-parallel ranks, or of a
            frozen one; or no attention was noted.
    """
    if not any(account.attention for account in accounts):
        raise UnsupportedModelError(
            "qk_clip: no compiled graph has noted a logit in backward; compile the model with backend='muon_zero', and "
            "let its attention call scaled_dot_product_attention or flex_attention"
        )
    for account in accounts:
        noted = account.attention
        if noted is None:
            continue
        specs = tuple(each.spec for each in (account, noted.key, *noted.biases) if each is not None)
        if noted.made_for != specs:
            noted.scaled, noted.made_for = _scaled(account, noted, alpha), specs


@torch.no_grad()
def clip_heads(
    accounts: Sequence[Account], threshold: float, everyone: dist.ProcessGroup | None, found_inf: Tensor | None
) -> Tensor | None:
    """Scale the rows of queries and keys; one collective for all heads, which the host does not wait for.

    Args:
        accounts: of all matrices, in the same order on every rank; :func:`check_heads` has seen them.
        threshold: ``qk_clip``.
        found_inf: as for :func:`~compile_muon.kernels.muon_apply`.
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
        _, keys, _ = attention.scaled[-1]
        # Also where nothing, or something that is not a number, was noted.
        factor = torch.where(own > threshold, threshold / own, torch.ones_like(own))
        if found_inf is not None:
            factor = torch.where(found_inf == 1, torch.ones_like(factor), factor)
        shared = factor.view(keys.count, -1).amin(1)
        for weight, rows, power in attention.scaled:
            _scale(weight, rows, shared.repeat_interleave(rows.count // keys.count) ** power)
    return largest.max()


def _scale(account: Account, heads: _Heads, factors: Tensor) -> None:
    local = account.local.detach()
    of_rows = torch.cat([factors, factors.new_ones(1)])[heads.numbers].to(local.dtype)
    local.mul_(of_rows[:, None] if local.ndim > heads.dim + 1 else of_rows)
