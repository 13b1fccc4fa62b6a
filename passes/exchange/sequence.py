"""Sequences over ranks: positions for heads and back, slices, joins and means, out of functional collectives.

Ranks along ``sequence`` have the same batch. Of what a stack of blocks computes each has the positions
``[r s, (r + 1) s)``, s = ceil(S / size). Attention needs all positions of a head, so heads travel: one all-to-all of
queries, keys and values together, ``[B, H, s, D] -> [B, H / size, S, D]``, and one back of what attention makes of them
(DeepSpeed-Ulysses, arXiv 2309.14509).

Gradients are those of the sum of all ranks' losses, which the reduction divides by the number of ranks. Every function
runs eagerly, and is traced into graphs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Place", "attention", "cut", "from_heads", "heads_of", "join", "mean_over", "to_heads"]

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Place:
    """This rank's place among those that share a sequence.

    Args:
        size: ranks along ``sequence``.
        index: this one's place.
        group: name of their process group.
    """

    size: int
    index: int
    group: str

    def local(self, whole: int) -> int:
        """Positions of a rank, with what pads those of the last ones."""
        return -(-whole // self.size)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a dim that the ranks divide."""
        count = x.shape[dim] // self.size
        return x.narrow(dim, self.index * count, count)


class _Exchange(torch.autograd.Function):
    """Equal parts of dim 0 to the ranks, and theirs back; gradients travel the other way, which is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.way = size, group
        even = [x.shape[0] // size] * size
        return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), even, even, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grad, *ctx.way), None, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, of which each makes a loss of its own; what they all ask of it is added up as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Sum.apply(grad, ctx.group), None


def cut(x: Tensor, place: Place, dim: int = 1) -> Tensor:
    """This rank's positions of ``x``, which is whole; zeros past its end."""
    dim %= x.ndim
    whole, local = x.shape[dim], place.local(x.shape[dim])
    if missing := local * place.size - whole:
        x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing))
    return x.narrow(dim, place.index * local, local)


def join(x: Tensor, place: Place, whole: int, dim: int = 1) -> Tensor:
    """All positions, out of each rank's; gradients of what the ranks do with them are added up."""
    # As an exchange of copies, whose adjoint is the reduce-scatter: the bytes are those of a gather.
    parts = _Exchange.apply(x.unsqueeze(0).expand(place.size, *x.shape), place.size, place.group)
    return torch.cat(parts.unbind(0), dim).narrow(dim, 0, whole)


def to_heads(query: Tensor, key: Tensor, value: Tensor, place: Place, whole: int) -> list[Tensor]:
    """``[B, H, s, D]`` each to ``[B, H / size, whole, D]`` each, by one exchange; H and D may differ among them.

    Heads of keys and values that ``size`` does not divide are there several times, as few as serve.
    """
    size = place.size
    copies = size // math.gcd(key.shape[1], size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    parts, shapes = [], []
    for x in (query, key, value):
        batch, heads, local, width = x.shape
        own = heads // size
        x = x.reshape(batch, size, own, local, width).permute(1, 0, 3, 2, 4)
        parts.append(x.reshape(size, batch, local, own * width))
        shapes.append((own, width))
    received = _Exchange.apply(torch.cat(parts, -1), size, place.group)
    rows = received.transpose(0, 1).flatten(1, 2)[:, :whole]
    pieces = rows.split([heads * width for heads, width in shapes], -1)
    return [piece.unflatten(-1, shape).transpose(1, 2) for piece, shape in zip(pieces, shapes, strict=True)]


def from_heads(x: Tensor, place: Place, local: int) -> Tensor:
    """``[B, S, H / size, D]`` to ``[B, s, H, D]``, by one exchange."""
    size = place.size
    batch, whole, heads, width = x.shape
    if missing := size * local - whole:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    parts = x.reshape(batch, size, local, heads * width).transpose(0, 1)
    received = _Exchange.apply(parts, size, place.group)
    return received.permute(1, 2, 0, 3).reshape(batch, local, size * heads, width)


def heads_of(x: Tensor | None, place: Place) -> Tensor | None:
    """This rank's heads of a mask or bias ``[B, 1 or H, S, S]``."""
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
    """``scaled_dot_product_attention`` of this rank's positions ``[B, H, s, D]`` over all of them.

    Args:
        attn_mask: whole, as the model makes it.
        place: of this rank.
    """
    local = query.shape[2]
    q, k, v = to_heads(query, key, value, place, local * place.size)
    grouped = enable_gqa and q.shape[1] != k.shape[1]
    out = inner(q, k, v, heads_of(attn_mask, place), dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    return from_heads(out.transpose(1, 2), place, local).transpose(1, 2)


def mean_over(total: Tensor, count: Tensor, place: Place) -> Tensor:
    """The ranks' ``total`` in all by their ``count`` in all: the same number on each."""
    sums = _Sum.apply(torch.stack((total, count.to(total.dtype))), place.group)
    return sums[0] / sums[1].detach()
