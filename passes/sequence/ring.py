"""Ring attention: keys and values go round among the ranks that share a sequence (arXiv 2310.01889).

Each rank has two pieces of the sequence, one from its front and one equally far from its end (:class:`~.place.Place`),
so that a causal mask leaves all ranks the same work: all queries see the first piece of keys from a lower rank, the
second piece of queries sees all keys from a higher rank. The next step's keys and values travel during the present one.
Backward sends keys and values round again, and their gradients with them: from the first rank that adds to them on to
the rank of the keys.

Elements sent per position, for widths k and v of a rank's keys and values: (k + v)(r - 1) in forward and twice that in
backward.
"""

from typing import Any

import torch
from torch import Tensor

from .partial_attention import attend, attend_backward, merge
from .place import Place

_c10d = torch.ops._c10d_functional


def _pass_on(x: Tensor, place: Place) -> Tensor:
    """Start to send ``x`` to the next rank of the ring; return the previous rank's, flat, before its wait."""
    flat = x.contiguous().view(-1)
    received, sent = ([flat.shape[0] if rank == peer else 0 for rank in range(place.size)] for peer in place.neighbors)
    return _c10d.all_to_all_single(flat, received, sent, place.group)


def _come(x: Tensor, like: Tensor) -> Tensor:
    return _c10d.wait_tensor(x).view(like.shape)


def _seen(step: int, place: Place, length: int, *, causal: bool) -> tuple[slice, slice]:
    """Return the rows of this rank's queries that see keys in ``step``, and the keys that they see."""
    half, everything = length // 2, slice(0, length)
    if not causal or step == 0:
        return everything, everything
    if step <= place.ring_index:  # keys of a lower rank
        return everything, slice(0, half)
    return slice(half, length), everything


def _columns(mask: Tensor | None, step: int, place: Place) -> Tensor | None:
    """Return the columns of a mask of this rank's queries, for the keys that are here in ``step``."""
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
        keys_values = torch.cat((key, value), -1)
        out = lse = None
        for step in range(place.ring):
            arriving = _pass_on(keys_values, place) if step + 1 < place.ring else None
            rows, columns = _seen(step, place, length, causal=causal)
            k, v = keys_values[:, :, columns].split(widths, -1)
            part = _columns(mask, step, place)
            partial = attend(query[:, :, rows], k, v, part, scale, causal=causal and step == 0)
            if out is None or lse is None:
                out, lse = partial
            elif rows.start == 0:
                out, lse = merge(out, lse, *partial)
            else:
                behind = merge(out[:, :, rows], lse[:, :, rows], *partial)
                out = torch.cat((out[:, :, : rows.start], behind[0]), 2)
                lse = torch.cat((lse[:, :, : rows.start], behind[1]), 2)
            keys_values = keys_values if arriving is None else _come(arriving, keys_values)
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
        # Values first, other than in forward: AOTAutograd would merge an equal cat and its sends with those of forward,
        # and so save the keys and values of all ranks.
        values_keys = torch.cat((value, key), -1)
        query_grad, own_grads, arriving_grads = torch.zeros_like(query, dtype=wide), None, None
        for step in range(place.ring):
            arriving = _pass_on(values_keys, place) if step + 1 < place.ring else None
            rows, columns = _seen(step, place, length, causal=causal)
            v, k = values_keys[:, :, columns].split(widths, -1)
            q, k_grad, v_grad = attend_backward(
                grad[:, :, rows], query[:, :, rows], k, v, _columns(mask, step, place), out[:, :, rows],
                lse[:, :, rows], scale, causal=causal and step == 0,
            )  # fmt: skip
            query_grad = query_grad + _in_rows(q.to(wide), rows, length)
            step_grads = _in_rows(torch.cat((v_grad, k_grad), -1), columns, length)
            if step == 0:
                own_grads = step_grads
            else:
                step_grads = step_grads if arriving_grads is None else _come(arriving_grads, step_grads) + step_grads
                arriving_grads = _pass_on(step_grads, place)
            values_keys = values_keys if arriving is None else _come(arriving, values_keys)
        assert own_grads is not None and arriving_grads is not None
        v_grad, k_grad = (own_grads + _come(arriving_grads, own_grads)).split(widths, -1)
        return (query_grad.to(query.dtype), k_grad, v_grad, *(None for _ in range(3 + len(at))))


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Cast ``x`` only if needed: Dynamo of torch 2.11 loses the gradient of a call that returns its argument."""
    return x if x.dtype == dtype else x.to(dtype)


def _in_rows(x: Tensor, rows: slice, length: int) -> Tensor:
    """Place ``x`` at these of ``length`` rows, zeros at the others."""
    if x.shape[2] == length:
        return x
    nothing = torch.zeros_like(x)
    return torch.cat((x, nothing) if rows.start == 0 else (nothing, x), 2)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, place: Place, *, causal: bool, scale: float
) -> Tensor:
    """Attention of this rank's positions, ``query`` ``[B, H, m, D]``, over the positions of all ranks of its ring.

    ``key`` and ``value`` are ``[B, H or a divisor, m, D or Dv]``. ``mask`` is ``[1 or B, 1 or H, S, S]`` over all
    positions, S = m r, boolean or added to logits; ``causal`` excludes a mask.
    """
    query_mask = None if mask is None else place.positions_of_group(place.ring_index).take(mask, -2)
    return _Ring.apply(query, key, value, query_mask, causal, scale, *place.fields)
