"""Attention in parts beside attention over all keys, in float64: rows without a key, large logits, grouped heads."""

import pytest
import torch
from torch import Tensor

from compile_muon.passes.exchange.partial_attention import attend, attend_backward, merge

ROWS, KEYS, SCALE = 6, 10, 0.3


def whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """From the definition; rows that see no key are zero."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(-1, -2) * SCALE
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    most = logits.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (logits - most).exp()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ value


def masks() -> dict[str, Tensor | None]:
    seen = torch.rand(2, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(0)) > 0.4
    seen[0, 0, 2] = False  # no key at all
    seen[1, 0, 3, :7] = False  # none of the first part
    added = torch.zeros(1, 4, ROWS, KEYS, dtype=torch.float64)
    added[..., 8:] = -torch.inf
    return {"all": None, "boolean": seen, "added": added}


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(("heads", "width"), [(4, 8), (2, 5)])
def test_parts_make_the_whole(kind: str, size: float, heads: int, width: int) -> None:
    dice, mask = torch.Generator().manual_seed(1), masks()[kind]
    shapes = ((2, 4, ROWS, 8), (2, heads, KEYS, 8), (2, heads, KEYS, width))
    query, key, value = (
        (size * torch.randn(shape, dtype=torch.float64, generator=dice)).requires_grad_() for shape in shapes
    )
    expected = whole(query, key, value, mask)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=dice)
    gradients = torch.autograd.grad(expected, (query, key, value), grad)

    parts = [slice(0, 7), slice(7, KEYS)]
    cut = [None if mask is None else mask[..., part] for part in parts]
    own = [(key[:, :, part].detach(), value[:, :, part].detach()) for part in parts]
    query = query.detach()
    found = [attend(query, k, v, m, SCALE, causal=False) for (k, v), m in zip(own, cut, strict=True)]
    out, lse = merge(*found[0], *found[1])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12 * size)
    back = [
        attend_backward(grad, query, k, v, m, out, lse, SCALE, causal=False) for (k, v), m in zip(own, cut, strict=True)
    ]
    of_query = back[0][0] + back[1][0]
    of_key, of_value = (torch.cat((back[0][n], back[1][n]), 2) for n in (1, 2))
    for mine, theirs in zip((of_query, of_key, of_value), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12 * size**2)


def test_a_part_may_be_causal() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out, _ = attend(query, key, value, None, SCALE, causal=True)
    torch.testing.assert_close(out, whole(query, key, value, torch.ones(5, 5, dtype=torch.bool).tril()[None, None]))
