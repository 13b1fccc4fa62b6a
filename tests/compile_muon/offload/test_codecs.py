"""Momenta in fewer bits: how far each entry, and the mean, is from what was kept."""

import pytest
import torch
from torch import Tensor

from compile_muon.offload.codecs import BLOCK, CODECS, MOMENTUM, SCALE, dynamic_map


def kept(dtype: str, momentum: Tensor, step: int = 1) -> Tensor:
    """`momentum`, encoded and decoded."""
    codec = CODECS[dtype](momentum.device)
    parts = {MOMENTUM: torch.empty(momentum.shape, dtype=codec.dtype)}
    if codec.block:
        parts[SCALE] = torch.empty(len(momentum), -(-momentum.shape[1] // codec.block))
    codec.encode(momentum, parts, "weight", step)
    return codec.decode(parts, torch.float32)


@pytest.mark.parametrize("columns", [7, BLOCK, 2 * BLOCK + 40])
def test_eight_bits_are_within_half_a_code_of_each_entry(columns: int) -> None:
    """Of either sign, in rows and blocks of other sizes."""
    generator = torch.Generator().manual_seed(0)
    momentum = torch.randn(12, columns, generator=generator).abs() * torch.logspace(-6, 6, 12)[:, None]
    momentum[::2] *= -1
    largest = torch.cat([x.abs().amax(1, keepdim=True).expand_as(x) for x in momentum.split(BLOCK, dim=1)], 1)
    half = dynamic_map().diff().max() / 2
    assert 0.005 < half < 0.01
    assert ((kept("8bit", momentum) - momentum).abs() <= half * 1.001 * largest).all()


def test_bfloat16_rounds_either_way_and_its_mean_is_right() -> None:
    """Cut off, or rounded to nearest, all would be 1."""
    momentum = torch.full((64, 64), 1.0012)
    found = [kept("bfloat16", momentum, step) for step in (1, 2)]
    assert set(found[0].unique().tolist()) == {1.0, 1.0078125}
    assert not torch.equal(*found)
    for one in found:
        assert abs(one.mean() - 1.0012).item() < 4e-4
