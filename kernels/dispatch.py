"""The one place that chooses a call's compute dtype, its form (standard or gram), and its implementation."""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .batching import one_batch_per_shape, one_by_one
from .call_plan import Plan
from .coefficients import CoefficientSet
from .operations import gram_flops, standard_flops

BACKENDS = ("auto", "aten", "triton")
FORMS = ("auto", "standard", "gram")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def resolve_dtype(
    dtype: str | torch.dtype,
    device: torch.device | str,
    coefficients: CoefficientSet | None = None,
    method: str = "auto",
) -> torch.dtype:
    """Return the dtype that Newton-Schulz computes in and returns.

    "auto" is float32 off CUDA, for most CPUs have no fast half-precision product. On CUDA it is float16: an eighth of
    the error of bfloat16, in which torch.optim.Muon computes, at the same speed; or float32 where ``coefficients``
    diverge in float16.

    Args:
        dtype: "auto", one of the four floating dtypes, or its name.
        device: where Newton-Schulz will run.
        coefficients: of the steps; None for any that half precision does not make diverge.
        method: the user's, "auto" included.
    Raises:
        ValueError: any other ``dtype``.
    """
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype == "auto":
        if torch.device(device).type != "cuda":
            return torch.float32
        if coefficients is None:
            return torch.float16
        half = torch.float16
        is_stable = coefficients.gram_is_stable(half) if method == "gram" else coefficients.survives(half)
        return half if is_stable else torch.float32
    names = ", ".join(map(repr, DTYPES))
    raise ValueError(f"dtype={dtype!r}: expected 'auto', {names}, or the torch dtype of that name")


def admissible_form(method: str, dtype: torch.dtype, coefficients: CoefficientSet) -> str:
    """Return ``method``, with "auto" kept only where standard and gram are about equally accurate in ``dtype``.

    Raises ValueError for an unknown method, and for a schedule that diverges in ``dtype`` or makes "gram" diverge.
    """
    if method not in FORMS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(map(repr, FORMS))}")
    if dtype == torch.bfloat16 and not coefficients.survives(torch.bfloat16):
        raise ValueError(
            f"dtype=bfloat16 with coefficients {coefficients.name!r} diverges: their steps reach the edge of what "
            "the next step contracts; use dtype='float32', or other coefficients"
        )
    if method == "gram" and not coefficients.gram_is_stable(dtype):
        raise ValueError(
            f"method='gram' with coefficients {coefficients.name!r} is unstable in {dtype}: they amplify its rounding "
            "of the Gram matrix; use method='standard', or dtype float32 or float64"
        )
    # Where gram is accurate, its error with the set's restarts is less than the bfloat16 standard form's (float16), or
    # at most 3.2 times that (bfloat16), on the spectra of tests/kernels/test_accuracy.py. Gram is not accurate for cans
    # in float16, nor for polar_express in bfloat16.
    return "standard" if method == "auto" and not coefficients.gram_is_accurate(dtype) else method


def chosen_form(method: str, rows: int, cols: int, steps: int, restarts: int, *, symmetric: bool = False) -> str:
    """Resolve "auto" to the form with fewer operations for a ``rows`` × ``cols`` matrix, either side the longer.

    That is gram above an aspect ratio of 1.5, or from 4/3 on if ``symmetric`` products compute one triangle.
    """
    if method != "auto":
        return method
    k, l = min(rows, cols), max(rows, cols)  # noqa: E741
    gram = gram_flops(k, l, steps, restarts, symmetric=symmetric)
    standard = standard_flops(k, l, steps, symmetric=symmetric)
    # With as many operations, at an aspect ratio of 4/3, gram has fewer launches.
    return "gram" if gram < standard or (symmetric and gram == standard) else "standard"


def symmetric_kernels(dtype: torch.dtype, device: torch.device | str, backend: str) -> bool:
    """Tell whether symmetric products in ``dtype`` on ``device`` compute one triangle, with this backend."""
    device = torch.device(device)
    if backend == "aten" or dtype not in (torch.float16, torch.bfloat16):
        return False
    # Without a GPU the answer is that of a measured one: CPUs plan for GPUs, and take the same form in half precision.
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    gpu = triton_kernels()
    products = None if gpu is None else gpu.products_on(device)
    return products is not None and products.table.taken(backend)


def check_backend(backend: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Raise ValueError unless ``backend`` computes in ``dtype`` on ``device``.

    "triton" has to be installed, and computes in float16 and bfloat16 on CUDA devices only.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    if backend in ("auto", "aten"):
        return
    remedy = "use backend='auto', which takes what is there"
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"backend={backend!r} with dtype={name!r}: computes in float16 and bfloat16 only; {remedy}")
    if torch.device(device).type != "cuda" and not _interpreting():
        raise ValueError(f"backend={backend!r} on {torch.device(device).type}: runs on CUDA devices only; {remedy}")
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"backend={backend!r}: Triton is not installed; {remedy}")


def orthogonalize(xs: Sequence[Tensor], plan: Plan, norms: Sequence[Tensor] = ()) -> list[Tensor]:
    """Orthogonalize every matrix of ``xs``, tensors [..., m, n] on one device, by the fastest implementation.

    ``norms``: row norms of each of ``xs``, [..., m] in float32, or none; only Triton's kernels read them. Results are
    new contiguous tensors of the inputs' shapes in ``plan.dtype``; ``xs`` stay unmodified.
    """
    plans = [_with_method(x, plan, symmetric=True) for x in xs]
    # CPUs: each matrix by itself on aten. With TRITON_INTERPRET=1 a CPU counts as a measured GPU.
    if all(x.device.type == "cpu" for x in xs) and not _interpreting():
        return one_by_one(xs, plan, _on_aten)
    # Triton: in half precision, by name, or on GPUs that gpu/tiles.json has measurements of where it is expected to be
    # faster; all matrices of a form at once, whatever their shapes. The others: cuBLAS, matrices of a shape at once.
    gpu = triton_kernels() if plan.backend in ("auto", "triton") else None
    on_triton = [False] * len(xs) if gpu is None else gpu.serves(xs, plan)
    results: dict[int, Tensor] = {}
    on_cublas = [i for i in range(len(xs)) if not on_triton[i]]
    results.update(zip(on_cublas, one_batch_per_shape([xs[i] for i in on_cublas], plan, _on_aten), strict=True))
    for method in ("standard", "gram"):
        form_plan = replace(plan, method=method)
        indices = [i for i in range(len(xs)) if on_triton[i] and plans[i] == form_plan]
        if gpu is not None and indices:
            grouped = importlib.import_module(".gpu.grouped", __package__)
            form_xs, form_norms = [xs[i] for i in indices], [norms[i] for i in indices] if norms else []
            products = gpu.products_on(form_xs[0].device)
            form_results = grouped.orthogonalize_list(form_xs, form_plan, products, form_norms)
            results.update(zip(indices, form_results, strict=True))
    return [results[i] for i in range(len(xs))]


def _on_aten(x: Tensor, plan: Plan) -> Tensor:
    return reference.orthogonalize(x, _with_method(x, plan, symmetric=False))


def _with_method(x: Tensor, plan: Plan, *, symmetric: bool) -> Plan:
    rows, cols = x.shape[-2:]
    form = chosen_form(plan.method, rows, cols, len(plan.steps), len(plan.restarts), symmetric=symmetric)
    return replace(plan, method=form)


@cache
def triton_kernels() -> ModuleType | None:
    """Import ``gpu.newton_schulz`` on first use; None without Triton, or without both CUDA and the interpreter."""
    on_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    if importlib.util.find_spec("triton") is None or not (on_cuda or _interpreting()):
        return None
    return importlib.import_module(".gpu.newton_schulz", __package__)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
