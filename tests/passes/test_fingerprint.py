"""Fingerprints: equal for equal bits in any layout, different after any edit a training loop might make."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from compile_muon.passes.fingerprint import EXAMINE, FINGERPRINT, FINGERPRINT_OF_ROWS, by_aten, fingerprint, row_sums

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# one row, of few entries and of many; many rows, of even and of odd sizes
SHAPES = [(1, 2), (3, 5), (64, 64), (33, 17), (512, 512), (259, 1003)]


def sample(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def same(a, b):
    return torch.equal(fingerprint([a]), fingerprint([b]))


BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}


@settings(max_examples=150)
@given(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.data())
def test_every_bit_of_every_entry_counts(dtype, shape, data):
    x = sample(shape, dtype)
    entry = data.draw(st.integers(0, x.numel() - 1))
    bit = data.draw(st.integers(0, 8 * x.element_size() - 1))
    bits = x.flatten().view(BITS[dtype]).clone()
    mask = torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(BITS[dtype])
    bits[entry] ^= mask
    assert not same(x, bits.view(dtype).view(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 5), (), (7,), (3, 4, 5)])
def test_only_content_counts(dtype, shape):
    x = sample(shape, dtype)
    layouts = [x.clone()]
    if x.ndim >= 2:
        layouts.append(x.transpose(0, -1).contiguous().transpose(0, -1))
        layouts.append(torch.cat([x, x], dim=-1)[..., : x.shape[-1]])
    # starting in the middle of a word
    layouts.append(torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape))
    for other in layouts:
        assert torch.equal(x, other) and same(x, other), other.stride()


def test_neighbours_make_no_difference():
    xs = [sample(shape, dtype) for shape, dtype in zip(SHAPES, DTYPES * 2, strict=False)]
    xs.insert(2, torch.empty(0, 3))
    together = fingerprint(xs)
    assert together.dtype is torch.int64 and together.shape == (len(xs),)
    for x, row in zip(xs, together, strict=True):
        assert torch.equal(fingerprint([x])[0], row)
    assert len(set(together.tolist())) == len(xs)


@pytest.mark.parametrize(
    "shape, columns, of_eight_bytes",
    [
        ((7, 300), 300, 600),
        ((5, 4, 3, 3), 180, 72),
        ((64, 8, 3, 3), 72, 144),
        ((3, 64), 64, 128),
        ((2057,), 1024, 1024),
        ((3,), 3, 6),
        ((), 1, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_the_formula(shape, columns, of_eight_bytes, dtype):
    """Written out with Python's integers, a large tensor's in parts as well."""
    golden, factor, mask = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 2**64 - 1
    x = (100 * sample(shape)).abs().to(dtype)
    width = min(x.element_size(), 4)
    data = x.view(-1).view(torch.uint8).numpy().tobytes()
    bits = [int.from_bytes(data[i : i + width], "little", signed=True) for i in range(0, len(data), width)]
    if x.element_size() == 8:
        columns = of_eight_bytes

    def weight(j):
        v = (j ^ golden) * factor & mask
        v ^= ((v - (v >> 63 << 64)) >> 32) & mask
        return v * factor & mask | 1

    def mix(z):
        z = (z ^ (z >> 30)) * factor & mask
        return z ^ (z >> 27)

    rows = [bits[i : i + columns] for i in range(0, len(bits), columns)]
    sums = [sum(b * weight(j) for j, b in enumerate(row)) for row in rows]
    expected = sum(mix((s + (k + 1) * golden) & mask) for k, s in enumerate(sums)) & mask
    assert fingerprint([x]).item() & mask == expected
    assert [s & mask for s in row_sums(x).tolist()] == [s & mask for s in sums]
    assert torch.equal(FINGERPRINT_OF_ROWS([row_sums(x)] * 2), fingerprint([x, x]))


def test_a_large_tensor_is_read_in_parts():
    for shape in [(1030, 2049), (2**21 + 5,), (3, 2**20 + 1)]:
        x = sample(shape)
        assert torch.equal(by_aten([x]), FINGERPRINT_OF_ROWS([row_sums(x)])), shape


def test_fake_tensors_and_refusals():
    with FakeTensorMode():
        found = fingerprint([torch.empty(3, 4), torch.empty(0)])
        assert found.shape == (2,) and found.dtype is torch.int64
    torch.library.opcheck(FINGERPRINT, ([sample((5, 3)), sample((2,), torch.bfloat16)],))
    with pytest.raises(ValueError, match="no tensors"):
        fingerprint([])


def test_what_is_examined_has_its_fingerprint_and_its_squares():
    grads = list(torch.randn(4, 5, 3).unbind())
    before, squares = EXAMINE(grads)
    torch.testing.assert_close(squares, torch.stack([grad.double().square().sum() for grad in grads]).float())
    assert torch.equal(before, fingerprint(grads))
    grads[1][0, 0] = -grads[1][0, 0]
    grads[2] = grads[2].mT.contiguous().mT  # the same numbers in another layout
    assert (EXAMINE(grads)[0] != before).tolist() == [False, True, False, False]
