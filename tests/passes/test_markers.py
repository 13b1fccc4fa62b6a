"""What the orthogonalize marker gives in eager and fake mode."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from compile_muon.kernels import newton_schulz
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.markers import ORTHOGONALIZE

STEPS = (3.4445, -4.7750, 2.0315) * 5


def spec_of(dtype="bfloat16"):
    muon = MuonSpec(1, 6, 4, True, "standard", STEPS, 1.0, (), dtype, 1e-7, "local")
    return ParamSpec(Layout((6, 4), 2), "float32", "float32", "float32", muon)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_direction_is_contiguous_and_in_the_dtype_of_newton_schulz(dtype):
    generator = torch.Generator().manual_seed(0)
    grad, momentum = torch.randn(4, 6, generator=generator).t(), torch.randn(6, 4, generator=generator)
    kept = momentum.clone()
    hyper, text = torch.tensor([0.05, 0.95]), spec_of(dtype).encode()
    (direction,) = ORTHOGONALIZE(grad, momentum, hyper, [], text)
    update = grad.lerp(momentum.lerp(grad, 0.05), 0.95)
    update = update.bfloat16() if dtype == "float16" else update  # what travels has a gradient's range
    assert direction.dtype is getattr(torch, dtype) and direction.is_contiguous()
    torch.testing.assert_close(direction, newton_schulz(update, dtype=dtype, method="standard"), atol=0, rtol=0)
    assert torch.equal(momentum, kept), "the momentum is committed in step()"
    with FakeTensorMode() as mode:
        (fake,) = ORTHOGONALIZE(*map(mode.from_tensor, (grad, momentum, hyper)), [], text)
    assert (fake.shape, fake.dtype, fake.is_contiguous()) == (direction.shape, direction.dtype, True)


def test_only_muon_matrices_have_directions():
    plain = ParamSpec(Layout((6, 4), 2), "float32", "float32", "float32", None)
    with pytest.raises(ValueError, match=r"shape \(6, 4\) is not a Muon matrix"):
        ORTHOGONALIZE(torch.zeros(6, 4), torch.zeros(6, 4), torch.zeros(2), [], plain.encode())
