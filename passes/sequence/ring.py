"""Attention over positions on several ranks where keys and values go around (ring attention, arXiv 2310.01889).

Each rank of a ring has queries, keys and values of two pieces of the sequence, one from its front and one as far from
its end (:class:`~.place.Place`), so that under a causal mask each has the same to do: of keys that come from a rank
ahead all queries see the first piece, of those from a rank behind the second piece of queries sees all. A step is sent
on while the one before is computed. Backward sends keys and values around once more, and their gradients with them,
from the first rank that adds to them home to the one they belong to.

Sent for each position, of widths k and v of a rank's keys and values: (k + v)(r - 1) forward and twice that backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .partial_attention import attend, attend_backward, merge
from .place import Place

__all__ = ["ring_attention"]

_c10d = torch.ops._c10d_functional


def _pass_on(x: Tensor, place: Place) -> Tensor:
    """Begin to send ``x`` to the next rank of the ring; what comes from the one before, still to be waited for."""
    flat = x.contiguous().view(-1)
    received, sent = ([flat.shape[0] if rank == peer else 0 for rank in range(place.size)] for peer in place.neighbors)
    return _c10d.all_to_all_single(flat, received, sent, place.group)


def _come(x: Tensor, like: Tensor) -> Tensor:
    return _c10d.wait_tensor(x).view(like.shape)


def _seen(step: int, place: Place, length: int, *, causal: bool) -> tuple[slice, slice]:
    """Which rows of this rank's queries see which of the keys that are here in ``step``."""
    half, everything = length // 2, slice(0, length)
    if not causal or step == 0:
        return everything, everything
    if step <= place.ring_index:  # from a rank ahead
        return everything, slice(0, half)
    return slice(half, length), everything


def _columns(mask: Tensor | None, step: int, place: Place) -> Tensor | None:
    """Of a mask of this rank's queries the columns of the keys that are here in ``step``."""
    if mask is None:
        return None
    return place.positions_of_group((place.ring_index - step) % place.ring).take(mask, -1)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, *at: Any
    ) -> Tensor:
        place = Place(*at)
        length, widths = query.shape[2], (key.shape[-1], value.shape[-1])
        held = torch.cat((key, value), -1)
        out = lse = None
        for step in range(place.ring):
            coming = _pass_on(held, place) if step + 1 < place.ring else None
            rows, columns = _seen(step, place, length, causal=causal)
            k, v = held[:, :, columns].split(widths, -1)
            part = _columns(mask, step, place)
            own = attend(query[:, :, rows], k, v, part, scale, causal=causal and step == 0)
            if out is None or lse is None:
                out, lse = own
            elif rows.start == 0:
                out, lse = merge(out, lse, *own)
            else:
                behind = merge(out[:, :, rows], lse[:, :, rows], *own)
                out = torch.cat((out[:, :, : rows.start], behind[0]), 2)
                lse = torch.cat((lse[:, :, : rows.start], behind[1]), 2)
            held = held if coming is None else _come(coming, held)
        assert out is not None and lse is not None
        out = _in(query.dtype, out)
        ctx.save_for_backward(query, key, value, out, lse, *(() if mask is None else (mask,)))
        ctx.given = causal, scale, at
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *masks = ctx.saved_tensors
        causal, scale, at = ctx.given
        place, mask = Place(*at), masks[0] if masks else None
        length, widths = query.shape[2], (value.shape[-1], key.shape[-1])
        wide = torch.promote_types(query.dtype, torch.float32)
        # The other way round than in forward: as the same, AOTAutograd would keep what has come then, of all ranks.
        held = torch.cat((value, key), -1)
        of_query, own, coming_back = torch.zeros_like(query, dtype=wide), None, None
        for step in range(place.ring):
            coming = _pass_on(held, place) if step + 1 < place.ring else None
            rows, columns = _seen(step, place, length, causal=causal)
            v, k = held[:, :, columns].split(widths, -1)
            q, k_grad, v_grad = attend_backward(
                grad[:, :, rows], query[:, :, rows], k, v, _columns(mask, step, place), out[:, :, rows],
                lse[:, :, rows], scale, causal=causal and step == 0,
            )  # fmt: skip
            of_query = of_query + _in_rows(q.to(wide), rows, length)
            found = _in_rows(torch.cat((v_grad, k_grad), -1), columns, length)
            if step == 0:
                own = found
            else:
                found = found if coming_back is None else _come(coming_back, found) + found
                coming_back = _pass_on(found, place)
            held = held if coming is None else _come(coming, held)
        assert own is not None and coming_back is not None
        v_grad, k_grad = (own + _come(coming_back, own)).split(widths, -1)
        return (of_query.to(query.dtype), k_grad, v_grad, *(None for _ in range(3 + len(at))))


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """``x`` in a dtype. Dynamo of torch 2.11 loses the gradient of what a call gives back as it is."""
    return x if x.dtype == dtype else x.to(dtype)


def _in_rows(x: Tensor, rows: slice, length: int) -> Tensor:
    """``x`` at these of ``length`` rows, and zeros at the others."""
    if x.shape[2] == length:
        return x
    nothing = torch.zeros_like(x)
    return torch.cat((x, nothing) if rows.start == 0 else (nothing, x), 2)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, place: Place, *, causal: bool, scale: float
) -> Tensor:
    """Of this rank's positions ``[B, H, m, D]`` over those of all ranks of its ring.

    Args:
        key, value: ``[B, H or a part of it, m, D or Dv]``.
        mask: ``[1 or B, 1 or H, S, S]`` of all positions, S = m r, boolean or added to logits.
        place: of this rank.
        causal: whether a position sees none behind it; without a mask.
        scale: of the logits.
    """
    own = None if mask is None else place.positions_of_group(place.ring_index).take(mask, -2)
    return _Ring.apply(query, key, value, own, causal, scale, *place.fields)
