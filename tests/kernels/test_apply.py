"""muon_apply against the two statements of torch.optim.Muon, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_muon.kernels import Averages, muon_apply

SHAPES = [(33, 65), (4, 4), (1, 7), (0, 5), (3, 8, 2)]
SCALES = [1.0, 1.7320508, 1.0, 2.0, 1.7320508]


def tensors(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def statements_of_torch(params, updates, lr, weight_decay, scales):
    expected = [p.clone() for p in params]
    for p, u, scale in zip(expected, updates, scales, strict=True):
        p.mul_(1 - lr * weight_decay)
        p.add_(u, alpha=-(lr * scale))
    return expected


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("update_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["number", "tensor", "one element"])
def test_bitwise_torch(param_dtype, update_dtype, weight_decay, kind):
    lr = {"number": 0.02, "tensor": torch.tensor(0.02), "one element": torch.tensor([0.02])}[kind]
    params, updates = tensors(param_dtype, 0), tensors(update_dtype, 1)
    expected = statements_of_torch(
        params, updates, lr.squeeze() if isinstance(lr, torch.Tensor) else lr, weight_decay, SCALES
    )
    muon_apply(params, updates, lr=lr, weight_decay=weight_decay, scale=SCALES)
    exact = kind == "number" or param_dtype == torch.float32
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p, e, rtol=0 if exact else 2**-7, atol=0 if exact else 1e-3)


@settings(max_examples=40)
@given(lr=st.floats(0, 1), weight_decay=st.floats(0, 1), scale=st.floats(0.01, 100), seed=st.integers(0, 10**6))
def test_bitwise_torch_for_any_rate(lr, weight_decay, scale, seed):
    params, updates = tensors(torch.float32, seed), tensors(torch.bfloat16, seed + 1)
    scales = [scale] * len(params)
    expected = statements_of_torch(params, updates, lr, weight_decay, scales)
    muon_apply(params, updates, lr=lr, weight_decay=weight_decay, scale=scales)
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(p, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momenta_move_and_what_is_skipped_is_not_written(dtype):
    params, updates, momenta, grads = (tensors(dtype, seed) for seed in range(4))
    given = [x.clone() for x in (*params, *momenta)]
    averages = Averages(momenta, grads, 0.05)
    muon_apply(params, updates, lr=0.02, weight_decay=0.1, scale=SCALES, averages=averages, found_inf=torch.tensor(1.0))
    assert all(map(torch.equal, (*params, *momenta), given))
    expected = statements_of_torch(params, updates, 0.02, 0.1, SCALES)
    expected += [m.clone().lerp_(g, 0.05) for m, g in zip(momenta, grads, strict=True)]
    muon_apply(params, updates, lr=0.02, weight_decay=0.1, scale=SCALES, averages=averages, found_inf=torch.tensor(0.0))
    assert all(map(torch.equal, (*params, *momenta), expected))


@given(numbers=st.tuples(*[st.floats(0, 1)] * 3), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_rates_that_are_tensors_give_the_bits_of_numbers(numbers, dtype):
    written = []
    for lr, weight_decay, factor in (numbers, torch.tensor(numbers, dtype=torch.float64)):
        params, updates, momenta, grads = (tensors(dtype, seed) for seed in range(4))
        averages = Averages(momenta, grads, 1 - factor)
        muon_apply(params, updates, lr=lr, weight_decay=weight_decay, scale=SCALES, averages=averages)
        written.append([*params, *momenta])
    assert all(map(torch.equal, *written))


@pytest.mark.parametrize(
    ("updates", "scales", "message"),
    [
        ([torch.zeros(2, 2)], [1.0, 1.0], "2 params, 1 updates, 2 scales"),
        ([torch.zeros(2, 2), torch.zeros(2, 3)], [1.0, 1.0], r"update 1 has shape \(2, 3\)"),
    ],
)
def test_bad_lists_change_nothing(updates, scales, message):
    params = [torch.ones(2, 2), torch.ones(2, 2)]
    with pytest.raises(ValueError, match=message):
        muon_apply(params, updates, lr=0.1, weight_decay=0.1, scale=scales)
    assert all(torch.equal(p, torch.ones(2, 2)) for p in params)
