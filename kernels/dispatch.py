"""Which arithmetic runs: the compute dtype, standard or gram, and the implementation. Decided here and only here."""

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

__all__ = [
    "BACKENDS",
    "FORMS",
    "admissible_form",
    "chosen_form",
    "check_backend",
    "orthogonalize",
    "resolve_dtype",
    "symmetric_kernels",
]

BACKENDS = ("auto", "aten", "triton")
FORMS = ("auto", "standard", "gram")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def resolve_dtype(
    dtype: str | torch.dtype,
    device: torch.device | str,
    coefficients: CoefficientSet | None = None,
    method: str = "auto",
) -> torch.dtype:
    """The dtype Newton-Schulz computes in and returns.

    "auto" is float32 off CUDA, for most CPUs have no fast half-precision product. On CUDA it is float16: an eighth of
    the error of bfloat16, in which torch.optim.Muon computes, at the same speed. ``coefficients`` that do not survive
    it make it float32.

    Args:
        dtype: "auto", one of the four floating dtypes, or its name.
        device: where it will run.
        coefficients: of the steps; None for any that survive half precision.
        method: as asked for, "auto" included.
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
        survives = coefficients.gram_is_stable(half) if method == "gram" else coefficients.survives(half)
        return half if survives else torch.float32
    names = ", ".join(map(repr, DTYPES))
    raise ValueError(f"dtype={dtype!r}: expected 'auto', {names}, or the torch dtype of that name")


def admissible_form(method: str, dtype: torch.dtype, coefficients: CoefficientSet) -> str:
    """``method``, with "auto" kept only where standard and gram are about equally accurate.

    They are where ``coefficients.gram_is_accurate(dtype)``: with the set's restarts the gram form's error is then less
    than the bfloat16 standard form's (float16), or at most 3.2 times that (bfloat16), on the spectra of
    tests/kernels/test_accuracy.py. Elsewhere
    (cans in float16, polar_express in bfloat16) "auto" becomes "standard".

    Args:
        method: "auto", "standard" or "gram".
        dtype: that Newton-Schulz computes in.
        coefficients: of the steps.
    Returns:
        "auto", "standard" or "gram".
    Raises:
        ValueError: an unknown method; "gram" in half precision with a schedule it does not survive; any method in
            bfloat16 with a schedule that diverges in it.
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
    return "standard" if method == "auto" and not coefficients.gram_is_accurate(dtype) else method


def chosen_form(method: str, rows: int, cols: int, steps: int, restarts: int, *, symmetric: bool = False) -> str:
    """``method``, or for "auto" whichever form takes fewer operations: gram above an aspect ratio of 1.5, or from 4/3
    on with symmetric products halved, where as many operations are fewer launches.

    Args:
        method: "auto", "standard" or "gram".
        rows, cols: of the matrix, in either order.
        steps, restarts: how many; fewer restarts than one after every step.
        symmetric: symmetric products are computed by one triangle.
    Returns:
        "standard" or "gram".
    """
    if method != "auto":
        return method
    k, l = min(rows, cols), max(rows, cols)  # noqa: E741
    gram = gram_flops(k, l, steps, restarts, symmetric=symmetric)
    standard = standard_flops(k, l, steps, symmetric=symmetric)
    return "gram" if gram < standard or (symmetric and gram == standard) else "standard"


def symmetric_kernels(dtype: torch.dtype, device: torch.device | str, backend: str) -> bool:
    """Whether products of ``dtype`` on ``device`` compute one triangle of what is symmetric.

    Where there is no GPU, the answer is that of one which ``gpu/tiles.json`` has: for plans, which are made on CPUs,
    and for half precision on these, which has the same form there.

    Args:
        dtype: that Newton-Schulz computes in.
        device: where it will run.
        backend: "auto", "aten" or "triton".
    """
    device = torch.device(device)
    if backend == "aten" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    gpu = triton_kernels()
    products = None if gpu is None else gpu.products_on(device)
    return products is not None and products.table.taken(backend)


def check_backend(backend: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Whether ``backend`` computes in ``dtype`` on ``device``.

    Args:
        backend: "auto", "aten" or "triton".
        dtype: that Newton-Schulz computes in.
        device: where it will run.
    Raises:
        ValueError: an unknown backend; "triton" where it is not there, or in another dtype than float16 and
            bfloat16.
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
    """Newton-Schulz of every matrix of a list.

    On CPUs each matrix by itself on aten. On GPUs in half precision, on architectures that ``gpu/tiles.json`` has
    measurements of, and where that is expected to be faster: by Triton's kernels, all matrices of one form at once,
    whatever their shapes. Otherwise by aten, that is cuBLAS, all matrices of a shape at once. With TRITON_INTERPRET=1
    CPUs are such a GPU.

    Args:
        xs: tensors [..., m, n] on one device, unmodified.
        plan: what to do with each.
        norms: of the rows of each, [..., m] in float32, or none; Triton's kernels take them, others their own.
    Returns:
        New contiguous tensors of the inputs' shapes in ``plan.dtype``.
    """
    plans = [_with_method(x, plan, symmetric=True) for x in xs]
    if all(x.device.type == "cpu" for x in xs) and not _interpreting():
        return one_by_one(xs, plan, _on_aten)
    gpu = triton_kernels() if plan.backend in ("auto", "triton") else None
    served = [False] * len(xs) if gpu is None else gpu.serves(xs, plan)
    results: dict[int, Tensor] = {}
    rest = [i for i in range(len(xs)) if not served[i]]
    results.update(zip(rest, one_batch_per_shape([xs[i] for i in rest], plan, _on_aten), strict=True))
    for method in ("standard", "gram"):
        of_plan = replace(plan, method=method)
        chosen = [i for i in range(len(xs)) if served[i] and plans[i] == of_plan]
        if gpu is not None and chosen:
            lists = importlib.import_module(".gpu.grouped", __package__)
            mine, theirs = [xs[i] for i in chosen], [norms[i] for i in chosen] if norms else []
            products = gpu.products_on(mine[0].device)
            results.update(zip(chosen, lists.orthogonalize_list(mine, of_plan, products, theirs), strict=True))
    return [results[i] for i in range(len(xs))]


def _on_aten(x: Tensor, plan: Plan) -> Tensor:
    return reference.orthogonalize(x, _with_method(x, plan, symmetric=False))


def _with_method(x: Tensor, plan: Plan, *, symmetric: bool) -> Plan:
    rows, cols = x.shape[-2:]
    form = chosen_form(plan.method, rows, cols, len(plan.steps), len(plan.restarts), symmetric=symmetric)
    return replace(plan, method=form)


@cache
def triton_kernels() -> ModuleType | None:
    """``gpu.newton_schulz``, imported on first use; None without Triton, or without CUDA and the interpreter."""
    on_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    if importlib.util.find_spec("triton") is None or not (on_cuda or _interpreting()):
        return None
    return importlib.import_module(".gpu.newton_schulz", __package__)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
