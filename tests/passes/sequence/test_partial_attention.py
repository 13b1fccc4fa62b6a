"""Attention in parts beside attention over all keys, in float64: rows without a key, large logits, grouped heads."""

import pytest
import torch
from torch import Tensor

from compile_muon.passes.sequence.partial_attention import attend, attend_backward, merge

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


def compare(kind: str, size: float, heads: int, width: int, rtol: float, device: str, dtype: torch.dtype) -> None:
    """Two parts on a device beside the whole in float64, forward and backward."""
    dice, mask = torch.Generator().manual_seed(1), masks()[kind]
    shapes = ((2, 4, ROWS, 8), (2, heads, KEYS, 8), (2, heads, KEYS, width))
    drawn = [(size * torch.randn(shape, dtype=torch.float64, generator=dice)).to(dtype) for shape in shapes]
    query, key, value = (x.double().requires_grad_() for x in drawn)
    expected = whole(query, key, value, mask)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=dice).to(dtype)
    gradients = torch.autograd.grad(expected, (query, key, value), grad.double())

    query, key, value = (x.to(device) for x in drawn)
    grad = grad.to(device)
    parts = []
    for part in (slice(0, 7), slice(7, KEYS)):
        cut = None if mask is None else mask[..., part].to(device)
        parts.append((key[:, :, part], value[:, :, part], cut if kind == "boolean" or cut is None else cut.to(dtype)))
    found = [attend(query, *part, SCALE, causal=False) for part in parts]
    out, lse = merge(*found[0], *found[1])
    back = [attend_backward(grad, query, *part, out.to(dtype), lse, SCALE, causal=False) for part in parts]
    of_key, of_value = (torch.cat((back[0][n], back[1][n]), 2) for n in (1, 2))
    for mine, theirs in zip((out, back[0][0] + back[1][0], of_key, of_value), (expected, *gradients), strict=True):
        # Where one key has all the weight, gradients are differences of numbers as large as this.
        error = (mine.double().cpu() - theirs).norm() / max(theirs.norm(), size**2 * grad.double().norm().cpu())
        assert error <= rtol, f"{error:.1e}"


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(("heads", "width"), [(4, 8), (2, 5)])
def test_parts_make_the_whole(kind: str, size: float, heads: int, width: int) -> None:
    compare(kind, size, heads, width, 2e-14, "cpu", torch.float64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "width"), [(4, 8), (2, 5)])
def test_parts_on_a_gpu_make_the_whole(kind: str, dtype: torch.dtype, rtol: float, heads: int, width: int) -> None:
    compare(kind, 1.0, heads, width, rtol, "cuda", dtype)


def test_a_part_may_be_causal() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out, _ = attend(query, key, value, None, SCALE, causal=True)
    torch.testing.assert_close(out, whole(query, key, value, torch.ones(5, 5, dtype=torch.bool).tril()[None, None]))
