"""Which library computes, asked for by name; and memory."""

import pytest
import torch
from torch import Tensor

from compile_muon.kernels import check_backend, newton_schulz_list, reference
from compile_muon.kernels.batching import one_batch_per_shape
from compile_muon.kernels.newton_schulz import make_plan


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("backend", "dtype", "device", "message"),
    [
        ("cutlass", torch.float16, "cuda", "backend='cutlass': expected one of 'auto', 'aten', 'triton'"),
        ("triton", torch.float32, "cuda", "dtype='float32': computes in float16 and bfloat16 only; use backend='auto'"),
        ("triton", torch.bfloat16, "cpu", "on cpu: runs on CUDA devices only"),
    ],
)
def test_a_backend_that_cannot_is_refused(
    backend: str, dtype: torch.dtype, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=message):
        check_backend(backend, dtype, device)


def test_a_list_refuses_before_it_computes() -> None:
    with pytest.raises(ValueError, match="backend='cutlass'"):
        newton_schulz_list([randn(4, 4)], dtype="float16", backend="cutlass")


def test_batches_stay_under_the_memory_limit() -> None:
    xs = [randn(7, 6, 10), randn(6, 10, seed=1), randn(2, 2, 6, 10, seed=2), randn(10, 6, seed=3)]
    plan = make_plan("standard", "jordan", 5, torch.float32, "cpu", 1e-7)
    each = 6 * 10 * (4 + 3 * 4 + 4) + 4 * 36 * 4  # what one matrix takes beside its input and result
    for limit, most in ((10 * each, 10), (3 * each, 3), (each, 1), (0, 1)):
        sizes: list[int] = []

        def recording(x: Tensor, plan: object, sizes: list[int] = sizes) -> Tensor:
            sizes.append(1 if x.ndim == 2 else len(x))
            return reference.orthogonalize(x, plan)

        limited = make_plan("standard", "jordan", 5, torch.float32, "cpu", 1e-7)
        limited = type(limited)(**{**vars(limited), "memory_limit": limit})
        results = one_batch_per_shape(xs, limited, recording)
        assert max(sizes) == most and sum(sizes) == 13, (limit, sizes)
        for x, result in zip(xs, results, strict=True):
            exact = reference.orthogonalize(x.reshape(-1, *x.shape[-2:]), plan).view(x.shape)
            torch.testing.assert_close(result, exact, atol=1e-5, rtol=1e-4)
            assert result.untyped_storage().nbytes() == result.numel() * 4
