"""Which library computes, asked for by name; quack's products, over functions that do what its own say; and memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compile_muon.kernels import check_backend, newton_schulz, newton_schulz_list, quack, reference
from compile_muon.kernels.batching import one_batch_per_shape
from compile_muon.kernels.dispatch import orthogonalize
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
    monkeypatch.setattr(quack, "why_not", lambda: "quack-kernels is not installed; pip install it")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=message):
        check_backend(backend, dtype, device)


def test_a_list_refuses_before_it_computes() -> None:
    with pytest.raises(ValueError, match="backend='quack' on cpu"):
        newton_schulz_list([randn(4, 4)], dtype="float16", backend="quack")


# --- quack ------------------------------------------------------------------------------------------------------------


GEMM_INTERFACE = """
import torch

calls = []


def unit_stride(*matrices):
    for x in matrices:
        assert x is None or x.ndim == 3 and 1 in x.stride()[-2:], x.stride()


def gemm(A, B, out=None, alpha=1.0, dynamic_scheduler=False, tuned=True):
    assert not tuned
    unit_stride(A, B, out)
    calls.append("gemm")
    return torch.matmul(A, B, out=out)


def gemm_add(A, B, C, out=None, alpha=1.0, beta=1.0, dynamic_scheduler=False, tuned=True):
    assert not tuned and type(beta) is float
    unit_stride(A, B, C, out)
    calls.append("gemm_add")
    return torch.add(beta * C, A @ B, out=out)


def gemm_symmetric(A, B, C=None, out=None, out_dtype=None, dynamic_scheduler=False, alpha=1.0, beta=1.0):
    assert type(alpha) is type(beta) is float
    unit_stride(A, B, C)
    calls.append("gemm_symmetric")
    whole = alpha * (A @ B) + (0 if C is None else beta * C)
    return whole.tril() + whole.tril(-1).mT
"""


@pytest.fixture
def distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a distribution of that name and version where Python looks first; its functions do what quack's own say."""

    def forget() -> None:
        quack.why_not.cache_clear()
        quack.products.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "quack"]:
            del sys.modules[name]

    def distribute(version: str, source: str = GEMM_INTERFACE, name: str = "quack-kernels") -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        files = {
            tmp_path / "quack/__init__.py": "",
            tmp_path / "quack/gemm_interface.py": source,
            info / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            info / "RECORD": "quack/__init__.py,,\nquack/gemm_interface.py,,\n",
        }
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    yield distribute
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("distribution", "problem"),
    [
        ({"version": "0.6.4"}, None),
        ({"version": "0.4.1"}, None),
        ({"version": "0.3.11"}, "quack-kernels 0.3.11 is installed; install quack-kernels from 0.4.1 up to before 0.7"),
        ({"version": "0.7.0rc1"}, "quack-kernels 0.7.0rc1 is installed; install quack-kernels from 0.4.1"),
        ({"version": "0.6.4", "name": "quack"}, "quack-kernels is not installed; pip install it"),
        (
            {"version": "0.6.4", "source": "def gemm(A, B, out=None): ..."},
            r"no quack.gemm_interface.gemm\(out, tuned\)",
        ),
        ({"version": "0.6.4", "source": "import no_cutlass"}, "cannot be imported .ModuleNotFoundError: .*no_cutlass"),
    ],
)
def test_a_module_of_that_name_is_quack_in_the_right_version_only(
    distributed: Callable[..., None], distribution: dict[str, str], problem: str | None
) -> None:
    distributed(**distribution)
    found = quack.why_not()
    assert (found is None) if problem is None else (found is not None and re.search(problem, found)), found
    if problem is not None:
        with pytest.raises(ImportError):
            quack.products()


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_same_polynomial_on_quack(distributed: Callable[..., None], method: str) -> None:
    """Square, wide and tall matrices, alone and in stacks, and in chunks: without a copy of a factor or a result."""
    distributed("0.6.4")
    xs = [randn(8, 24), randn(24, 8, seed=1), randn(3, 8, 24, seed=2), randn(2, 3, 16, 8, seed=3), randn(8, 8, seed=4)]
    plan = replace(make_plan(method, "you", None, torch.float64, "cpu", 1e-7), memory_limit=20_000)
    ours = quack.orthogonalize_list([x.double() for x in xs], plan, quack.products())
    for x, result in zip(xs, ours, strict=True):
        expected = reference.orthogonalize(x.double().reshape(-1, *x.shape[-2:]), plan).view(x.shape)
        torch.testing.assert_close(result, expected, atol=1e-9, rtol=0)
        assert result.is_contiguous() and result.untyped_storage().nbytes() == result.numel() * 8


def test_quack_serves_what_it_multiplies_and_auto_what_was_measured(
    distributed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed("0.6.4")
    xs = [randn(16, 32), randn(4, 64, 16), randn(12, 32), randn(16, 36), randn(16, 32).double(), randn(0, 16, 32)]
    half = make_plan("standard", "jordan", 5, torch.bfloat16, "cpu", 1e-7)
    plans = {backend: [replace(half, backend=backend)] * len(xs) for backend in ("aten", "triton", "quack", "auto")}
    assert not any(quack.serves(xs, plans["quack"]))  # on a CPU
    monkeypatch.setattr(quack, "architecture", lambda device: "sm_90")
    assert quack.serves(xs, plans["quack"]) == [True, True, False, False, False, False]
    assert not any(quack.serves(xs, [replace(half, dtype=torch.float32, backend="quack")] * len(xs)))
    assert not any(any(quack.serves(xs, plans[backend])) for backend in ("aten", "triton", "auto"))

    region = quack.Region("standard", ("bfloat16",), (16, 32), (64, 64), (2, 4), 0.9, "")
    for regions, expected in (
        ((region,), [False, True, False, False, False, False]),
        ((replace(region, time=1.0),), [False] * 6),
        ((replace(region, matrices=(5, 8)),), [False] * 6),
        ((replace(region, method="gram"), replace(region, dtypes=("float16",))), [False] * 6),
    ):
        monkeypatch.setattr(quack, "load_regions", lambda regions=regions: {"sm_90": regions})
        assert quack.serves(xs, plans["auto"]) == expected

    # The operator: each shape where it is served, in the order of the list.
    monkeypatch.setattr(quack, "load_regions", lambda: {"sm_90": (region,)})
    auto = make_plan("standard", "jordan", 5, torch.bfloat16, "cpu", 1e-7)
    results = orthogonalize(xs, auto)
    assert sys.modules["quack.gemm_interface"].calls.count("gemm_add") == 5
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, newton_schulz(x, dtype="bfloat16", backend="aten"), atol=0.04, rtol=0)


def test_the_table_of_quack_is_read_as_regions(tmp_path: Path) -> None:
    assert all(region.time < 1 for regions in quack.load_regions().values() for region in regions)
    fields = '"method": "gram", "dtypes": ["float16"], "k": [1, 2], "l": [3, 4], "matrices": [5, 6], "time": 0.5'
    path = tmp_path / "table.json"
    path.write_text(f'{{"sm_90": [{{{fields}, "source": "here"}}]}}')
    region = quack.Region("gram", ("float16",), (1, 2), (3, 4), (5, 6), 0.5, "here")
    assert quack.load_regions(path) == {"sm_90": (region,)}


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
