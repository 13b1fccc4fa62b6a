"""Which library computes, asked for by name; quack's products, over functions that do what its own say; and memory."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compile_muon.kernels import check_backend, newton_schulz, newton_schulz_list, quack, reference
from compile_muon.kernels.batching import one_batch_per_shape
from compile_muon.kernels.newton_schulz import make_plan


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("backend", "dtype", "device", "message"),
    [
        ("cutlass", torch.float16, "cuda", "backend='cutlass': expected one of 'auto', 'aten', 'triton', 'quack'"),
        ("triton", torch.float32, "cuda", "dtype='float32': computes in float16 and bfloat16 only; use backend='auto'"),
        ("triton", torch.bfloat16, "cpu", "on cpu: runs on CUDA devices only"),
        ("quack", torch.bfloat16, "cpu", "on cpu: runs on CUDA devices only"),
        ("quack", torch.bfloat16, "cuda", "quack-kernels is not installed; pip install it, or use backend='auto'"),
    ],
)
def test_a_backend_that_cannot_is_refused(
    backend: str, dtype: torch.dtype, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quack, "installed", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=message):
        check_backend(backend, dtype, device)


@pytest.mark.parametrize("backend", ["auto", "aten"])
def test_aten_is_everywhere(backend: str) -> None:
    check_backend(backend, torch.float64, "cpu")
    x = randn(5, 9)
    assert torch.equal(newton_schulz(x, backend=backend), newton_schulz(x))


def test_a_list_refuses_before_it_computes() -> None:
    with pytest.raises(ValueError, match="backend='quack' on cpu"):
        newton_schulz_list([randn(4, 4)], dtype="float16", backend="quack")


# --- quack ------------------------------------------------------------------------------------------------------------


def gemm(A: Tensor, B: Tensor, out: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    return torch.matmul(A, B, out=out)


def gemm_add(A: Tensor, B: Tensor, C: Tensor, out: Tensor | None = None, beta: float = 1.0) -> Tensor:
    return torch.add(beta * C, A @ B, out=out)


def gemm_symmetric(A: Tensor, B: Tensor, C: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Of A @ B the lower triangle, mirrored."""
    whole = alpha * (A @ B) + (0 if C is None else beta * C)
    return whole.tril() + whole.tril(-1).mT


@pytest.fixture
def fake_quack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("quack.gemm_interface")
    for function in (gemm, gemm_add, gemm_symmetric):
        setattr(module, function.__name__, function)
    package = types.ModuleType("quack")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    quack.products.cache_clear()
    yield
    quack.products.cache_clear()


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (3, 5, 9)])
def test_the_same_polynomial_on_quack(fake_quack: None, shape: tuple[int, ...], method: str) -> None:
    x = randn(*shape)
    plan = make_plan(method, "you", None, torch.float64, "cpu", 1e-7)
    ours = reference.orthogonalize(x.double(), plan, quack.products())
    torch.testing.assert_close(ours, reference.orthogonalize(x.double(), plan), atol=1e-9, rtol=0)


@pytest.mark.skipif(not quack.installed(), reason="quack-kernels is not installed")
def test_quack_takes_the_arguments_it_is_given() -> None:
    products = quack.products()
    for function, names in (
        (products.gemm, {"out"}),
        (products.gemm_add, {"C", "out", "beta"}),
        (products.gemm_symmetric, {"C", "alpha", "beta"}),
    ):
        assert names <= set(inspect.signature(function).parameters), function


# --- bounded batches --------------------------------------------------------------------------------------------------


def test_batches_stay_under_the_memory_limit() -> None:
    xs = [randn(7, 6, 10), randn(6, 10, seed=1), randn(2, 2, 6, 10, seed=2), randn(10, 6, seed=3)]
    plan = make_plan("standard", "jordan", 5, torch.float32, "cpu", 1e-7)
    each = 6 * 10 * (4 + 3 * 4 + 4) + 4 * 36 * 4  # what one matrix takes beside its input and result
    for limit, most in ((10 * each, 10), (3 * each, 3), (each, 1), (0, 1)):
        sizes: list[int] = []

        def recording(x: Tensor, plan: object, sizes: list[int] = sizes) -> Tensor:
            sizes.append(1 if x.ndim == 2 else len(x))
            return reference.orthogonalize(x, plan)  # type: ignore[arg-type]

        limited = make_plan("standard", "jordan", 5, torch.float32, "cpu", 1e-7)
        limited = type(limited)(**{**vars(limited), "memory_limit": limit})
        results = one_batch_per_shape(xs, limited, recording)
        assert max(sizes) == most and sum(sizes) == 13, (limit, sizes)
        for x, result in zip(xs, results, strict=True):
            exact = reference.orthogonalize(x.reshape(-1, *x.shape[-2:]), plan).view(x.shape)
            torch.testing.assert_close(result, exact, atol=1e-5, rtol=1e-4)
            assert result.untyped_storage().nbytes() == result.numel() * 4
