"""muon_momentum against the two statements of torch.optim.Muon, bit for bit."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from compile_muon.kernels import muon_momentum

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def statements_of_torch(grad, momentum, beta, nesterov):
    buf = momentum.clone()
    buf.lerp_(grad, 1 - beta)
    return (grad.lerp(buf, beta) if nesterov else buf), buf


def as_tensors(beta, dtype=torch.float32):
    return torch.tensor(1 - beta, dtype=dtype), torch.tensor(beta, dtype=dtype)


def pair(dtype, shape=(33, 65), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.47, 0.5, 0.6, 0.9, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_torch(dtype, beta, nesterov):
    grad, momentum = pair(dtype)
    update, new = statements_of_torch(grad, momentum, beta, nesterov)
    weights = as_tensors(beta, torch.float64 if dtype == torch.float64 else torch.float32)
    for given_beta in (beta, weights, tuple(w.reshape(1) for w in weights)):
        ours = muon_momentum(grad, momentum, beta=given_beta, nesterov=nesterov, out_dtype=torch.bfloat16)
        assert torch.equal(ours[0], update.bfloat16())
        assert torch.equal(ours[1], new)


def test_gradient_in_lower_precision_than_the_momentum():
    grad, momentum = pair(torch.bfloat16)[0], pair(torch.float32)[1]
    update, new = muon_momentum(grad, momentum, beta=0.95, nesterov=True, out_dtype=torch.bfloat16)
    expected = statements_of_torch(grad.float(), momentum, 0.95, True)
    assert new.dtype == torch.float32
    assert torch.equal(new, expected[1])
    assert torch.equal(update, expected[0].bfloat16())


@pytest.mark.parametrize("table", ["none", "inductor"])
def test_traced_beta_is_an_input(table):
    """One traced graph serves every beta, and stays bitwise, also after Inductor's decompositions."""

    def f(grad, momentum, toward_grad, toward_new):
        return muon_momentum(grad, momentum, beta=(toward_grad, toward_new), nesterov=True, out_dtype=torch.float32)

    if table == "inductor" and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 decomposes lerp with a tensor weight into other roundings")
    grad, momentum = pair(torch.float32)
    decompositions = select_decomp_table() if table == "inductor" else None
    graph = make_fx(f, decomposition_table=decompositions)(grad, momentum, *as_tensors(0.95))
    for beta in (0.95, 0.5, 0.2):
        expected = statements_of_torch(grad, momentum, beta, True)
        for ours, theirs in zip(graph(grad, momentum, *as_tensors(beta)), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"grad has shape \(2, 3\), momentum \(3, 2\)"):
        muon_momentum(torch.zeros(2, 3), torch.zeros(3, 2), beta=0.9, nesterov=True, out_dtype=torch.float32)
