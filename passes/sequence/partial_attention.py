"""Attention over a part of the keys, by ATen's fused kernels; merged parts equal attention over all keys.

Each part returns its output and the log-sum-exp of its logits, by which :func:`merge` weighs parts (Milakov and
Gimelshein, arXiv 1805.02867). Backward takes output and log-sum-exp over all keys, and returns the gradients of one
part.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
#: head sizes are padded to a multiple of this, as flash attention on CUDA requires
_WIDTH = 8
#: alignment of log-sum-exp rows and of bias columns in memory-efficient attention on CUDA
_ROWS, _COLUMNS = 32, 16


def _wide(x: Tensor, width: int, value: float = 0.0) -> Tensor:
    """Pad the last dim of ``x`` to ``width``; return ``x`` itself where it is as wide."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing), value=value) if missing else x


def _up(size: int, multiple: int) -> int:
    return size + -size % multiple


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat heads of keys and values to those of queries, and pad all three to one head size."""
    groups = query.shape[1] // key.shape[1]
    width = _up(max(query.shape[-1], value.shape[-1]), _WIDTH)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return _wide(query, width), _wide(key, width), _wide(value, width)


def _bias(mask: Tensor | None, query: Tensor, columns: int) -> Tensor | None:
    """Return ``mask`` as an additive bias; on CUDA aligned, expanded to all heads, and zeros for None."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    if not query.is_cuda:
        return mask
    if mask is None:
        mask = query.new_zeros(1, 1, query.shape[2], columns)
    aligned = _wide(mask.to(query.dtype), _up(columns, _COLUMNS))[..., :columns]
    return aligned.expand(*query.shape[:3], columns)


def _flash(query: Tensor, mask: Tensor | None) -> bool:
    return query.is_cuda and mask is None and query.dtype in (torch.float16, torch.bfloat16)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, H, m, Dv]``, float32 or better, and log-sum-exp ``[B, H, m]``, -inf where no key is seen.

    ``query`` is ``[B, H, m, D]``, ``key`` and ``value`` ``[B, H or a divisor, n, D or Dv]``, ``mask``
    ``[1 or B, 1 or H, m, n]``, boolean or added to logits. ``causal`` needs m = n and no mask.
    """
    width, rows = value.shape[-1], query.shape[2]
    query, key, value = _alike(query, key, value)
    if _flash(query, mask):
        out, lse = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    elif query.is_cuda:
        bias = _bias(mask, query, key.shape[2])
        out, lse = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal, scale=scale
        )[:2]
        lse = lse[..., :rows]
    else:
        bias = _bias(mask, query, key.shape[2])
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
    out = out[..., :width].to(torch.promote_types(out.dtype, torch.float32))
    if mask is not None:  # the kernels return 0 or NaN for rows that see no key
        visible = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(-1)
        out, lse = torch.where(visible[..., None], out, 0.0), torch.where(visible, lse, -torch.inf)
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, of_more: Tensor) -> tuple[Tensor, Tensor]:
    """Merge output and log-sum-exp of two parts."""
    both = torch.logaddexp(lse, of_more)
    base = torch.where(both == -torch.inf, 0.0, both)  # rows that see no key yet: -inf - -inf would be NaN
    return out * (lse - base).exp()[..., None] + more * (of_more - base).exp()[..., None], both


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a part's queries, keys and values, in their shapes. ``grad``, ``out`` (in the query's
    dtype) and ``lse`` are those over all keys; the rest is as in :func:`attend`."""
    widths, heads = (query.shape[-1], key.shape[-1], value.shape[-1]), key.shape[1]
    query, key, value = _alike(query, key, value)
    out, grad = _wide(out, value.shape[-1]), _wide(grad, value.shape[-1])
    lse = torch.where(lse == -torch.inf, 0.0, lse)  # rows that see no key: exp(-inf - 0) is 0, exp(-inf + inf) NaN
    if _flash(query, mask):
        rows, columns = query.shape[2], key.shape[2]
        state = torch.empty(2, dtype=torch.int64, device=query.device)  # of dropout, which is off
        padded_grads = _aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, None, None, rows, columns, 0.0, causal, state, state, scale=scale
        )
    elif query.is_cuda:
        bias, state = _bias(mask, query, key.shape[2]), torch.empty((), dtype=torch.int64, device=query.device)
        padded_grads = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, bias, out, _wide(lse, _up(lse.shape[-1], _ROWS), torch.inf), state, state, 0.0,
            [True, True, True, False], causal, scale=scale,
        )[:3]  # fmt: skip
    else:
        padded_grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, attn_mask=_bias(mask, query, key.shape[2]), scale=scale
        )
    gradients = [x[..., :width] for x, width in zip(padded_grads, widths, strict=True)]
    if (groups := query.shape[1] // heads) > 1:
        gradients[1:] = [x.unflatten(1, (heads, groups)).sum(2) for x in gradients[1:]]
    return gradients[0], gradients[1], gradients[2]
