"""Sequence parallelism by functional collectives: positions exchanged for heads, joins and means.

Ranks along ``sequence`` have the same batch. In a stack of blocks each computes s = ceil(S / size) positions. Attention
needs all positions of a head: one all-to-all of queries, keys and values together,
``[B, H, s, D] -> [B, H / size, S, D]``, and one back for its output (DeepSpeed-Ulysses, arXiv 2309.14509). With more
ranks than heads, keys and values go round a ring (:mod:`.ring`).

Gradients are those of the sum of all ranks' losses; the gradient reduction divides by the number of ranks. Every
function runs eagerly, and is traced into graphs as it is.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RequestError
from ..exchange.transfers import AllToAll
from .place import Place
from .ring import ring_attention

_c10d = torch.ops._c10d_functional


def _exchange(x: Tensor, first: int, count: int, place: Place) -> Tensor:
    """All-to-all of equal parts of dim 0 among ranks ``first`` to ``first + count``; its own adjoint."""
    splits = [x.shape[0] // count if first <= rank < first + count else 0 for rank in range(place.size)]
    return AllToAll.apply(x, splits, splits, place.group)


class _Sum(torch.autograd.Function):
    """All-reduce (sum); every rank's loss reads the result, so its adjoint is an all-reduce as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Sum.apply(grad, ctx.group), None


def join(x: Tensor, place: Place, whole: int, dim: int = 1) -> Tensor:
    """Return all ``whole`` positions, gathered along ``dim`` from every rank; gradients are summed over the ranks."""
    # An exchange of copies sends as many bytes as an all-gather, and its adjoint is the reduce-scatter.
    parts = _exchange(x.unsqueeze(0).expand(place.size, *x.shape), 0, place.size, place)
    return place.in_order(torch.cat(parts.unbind(0), dim), dim).narrow(dim, 0, whole)


def to_heads(query: Tensor, key: Tensor, value: Tensor, place: Place, whole: int) -> list[Tensor]:
    """Turn ``[B, H, s, D]`` into ``[B, H / size, S, D]``, for all three by one exchange; H and D may differ among them.

    ``size`` ranks exchange heads, and S is ``whole``; in a ring it is the positions of these ranks, padding included.
    Heads of keys and values that ``size`` does not divide are duplicated, as few times as possible. Nothing is sent
    where one rank has all heads.
    """
    size = place.heads
    if size == 1:
        return [query, key, value]
    copies = size // math.gcd(key.shape[1], size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    parts, shapes = [], []
    for x in (query, key, value):
        batch, heads, local, width = x.shape
        rank_heads = heads // size
        x = x.reshape(batch, size, rank_heads, local, width).permute(1, 0, 3, 2, 4)
        parts.append(x.reshape(size, batch, local, rank_heads * width))
        shapes.append((rank_heads, width))
    received = _exchange(torch.cat(parts, -1), place.ring_index * size, size, place)
    rows = received.transpose(0, 1).flatten(1, 2)
    rows = rows[:, :whole] if place.ring == 1 else rows
    pieces = rows.split([heads * width for heads, width in shapes], -1)
    return [piece.unflatten(-1, shape).transpose(1, 2) for piece, shape in zip(pieces, shapes, strict=True)]


def from_heads(x: Tensor, place: Place, local: int) -> Tensor:
    """Turn ``[B, S, H / size, D]`` into ``[B, s, H, D]``, by one exchange of the ranks that exchange heads."""
    size = place.heads
    if size == 1:
        return x
    batch, whole, heads, width = x.shape
    if missing := size * local - whole:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    parts = x.reshape(batch, size, local, heads * width).transpose(0, 1)
    received = _exchange(parts, place.ring_index * size, size, place)
    return received.permute(1, 2, 0, 3).reshape(batch, local, size * heads, width)


def heads_of(x: Tensor | None, place: Place) -> Tensor | None:
    """Return this rank's heads of a mask or bias ``[B, 1 or H, S, S]``."""
    return x if x is None or x.ndim < 4 or x.shape[1] == 1 else place.own(x, 1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    place: Place,
    inner: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """``scaled_dot_product_attention`` of this rank's positions ``[B, H, s, D]`` over all; the mask is whole."""
    local = query.shape[2]
    whole = local * place.size
    q, k, v = to_heads(query, key, value, place, whole)
    mask = heads_of(attn_mask, place)
    if place.ring > 1:
        out = over_ring(q, k, v, mask, place, whole, dropout_p=dropout_p, causal=is_causal, scale=scale)
    else:
        grouped = enable_gqa and q.shape[1] != k.shape[1]
        out = inner(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    return from_heads(out.transpose(1, 2), place, local).transpose(1, 2)


def over_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    place: Place,
    whole: int,
    *,
    dropout_p: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention, by a ring, of this rank's heads and its group's positions over all ``whole`` positions of ``mask``."""
    if dropout_p:  # ATen's kernels do not tell, part by part, what they drop
        raise RequestError(
            f"dropout of attention = {dropout_p}: ring attention has none; set that of the model to 0, or use "
            'sequence_parallel.attention = "heads"'
        )
    total = place.local(whole) * place.size
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)].expand(-1, -1, whole, whole)
    if missing := total - whole:
        if mask is not None:
            mask = F.pad(mask, (0, missing, 0, missing), value=False if mask.dtype == torch.bool else -torch.inf)
        elif not causal:  # a causal mask hides the padding, which follows all positions
            mask = (torch.arange(total, device=query.device) < whole).expand(1, 1, total, total)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return ring_attention(query, key, value, mask, place, causal=causal, scale=scale)


def mean_over(total: Tensor, count: Tensor, place: Place) -> Tensor:
    """Return the ranks' sum of ``total`` divided by their sum of ``count``, the same on every rank."""
    sums = _Sum.apply(torch.stack((total, count.to(total.dtype))), place.group)
    return sums[0] / sums[1].detach()
