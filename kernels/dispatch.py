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
from .coefficients import CoefficientSet
from .operations import gram_flops, standard_flops
from .plan import Plan

__all__ = ["METHODS", "admissible_method", "cheaper_method", "orthogonalize", "resolve_dtype", "resolve_method"]

METHODS = ("auto", "standard", "gram")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def resolve_dtype(
    dtype: str | torch.dtype,
    device: torch.device | str,
    coefficients: CoefficientSet | None = None,
    method: str = "auto",
) -> torch.dtype:
    """The dtype Newton-Schulz computes in and returns.

    "auto" is float32 off CUDA, for most CPUs have no fast half-precision product. On CUDA it is bfloat16, in which
    torch.optim.Muon computes, but float16 for ``method`` "gram": an eighth of bfloat16's error at the same speed, where
    nothing asks for torch's bits. ``coefficients`` that do not survive that dtype make it float32.

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
        if method == "gram":
            survives = coefficients is None or coefficients.gram_is_stable(torch.float16)
            return torch.float16 if survives else torch.float32
        survives = coefficients is None or coefficients.survives_bfloat16
        return torch.bfloat16 if survives else torch.float32
    names = ", ".join(map(repr, DTYPES))
    raise ValueError(f"dtype={dtype!r}: expected 'auto', {names}, or the torch dtype of that name")


def resolve_method(method: str, rows: int, cols: int, dtype: torch.dtype, coefficients: CoefficientSet) -> str:
    """The form that runs for matrices of rows × cols, "standard" or "gram".

    That is what :func:`admissible_method` says, and where it leaves both, what :func:`cheaper_method` says.

    Args:
        method: as asked for, "auto" included.
        rows, cols: of the matrix, in either order.
        dtype: that Newton-Schulz computes in.
        coefficients: of the steps.
    Raises:
        ValueError: as :func:`admissible_method`.
    """
    admissible = admissible_method(method, dtype, coefficients)
    if admissible != "auto":
        return admissible
    return cheaper_method(rows, cols, len(coefficients.steps), len(coefficients.gram_restarts(dtype)))


def admissible_method(method: str, dtype: torch.dtype, coefficients: CoefficientSet) -> str:
    """``method``, with "auto" kept only where standard and gram are about equally accurate.

    They are where ``coefficients.gram_is_accurate(dtype)``: with the set's restarts the gram form's error is then at
    most 3.2 times the standard form's, mostly the same, on the spectra of tests/kernels/test_accuracy.py. Elsewhere
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
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(map(repr, METHODS))}")
    if dtype == torch.bfloat16 and not coefficients.survives_bfloat16:
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


def cheaper_method(rows: int, cols: int, steps: int, restarts: int, *, symmetric: bool = False) -> str:
    """Whichever form takes fewer operations: gram above an aspect ratio of 1.5, or 4/3 with symmetric products halved.

    Args:
        rows, cols: of the matrix, in either order.
        steps, restarts: how many; fewer restarts than one after every step.
        symmetric: symmetric products are computed by one triangle.
    Returns:
        "standard" or "gram".
    """
    k, l = min(rows, cols), max(rows, cols)  # noqa: E741
    gram = gram_flops(k, l, steps, restarts, symmetric=symmetric)
    return "gram" if gram < standard_flops(k, l, steps, symmetric=symmetric) else "standard"


def orthogonalize(xs: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """Newton-Schulz of every matrix of a list.

    On CPUs each matrix by itself on aten. On GPUs all matrices of a shape at once: by Triton's kernels in half
    precision, on the architectures and from the sizes of ``gpu/tiles.json`` on; by aten, that is cuBLAS, otherwise.
    With TRITON_INTERPRET=1 CPUs are such a GPU.

    Args:
        xs: tensors [..., m, n] on one device, unmodified.
        plan: what to do with each.
    Returns:
        New contiguous tensors of the inputs' shapes in ``plan.dtype``.
    """
    if all(x.device.type == "cpu" for x in xs) and not _interpreting():
        return one_by_one(xs, plan, _on_aten)
    return one_batch_per_shape(xs, plan, _on_device)


def _on_aten(x: Tensor, plan: Plan) -> Tensor:
    return reference.orthogonalize(x, _with_method(x, plan, symmetric=False))


def _on_device(x: Tensor, plan: Plan) -> Tensor:
    gpu = triton_kernels()
    if gpu is None or not gpu.serves(x, plan):
        return _on_aten(x, plan)
    return gpu.orthogonalize(x, _with_method(x, plan, symmetric=True), gpu.products_on(x.device))


def _with_method(x: Tensor, plan: Plan, *, symmetric: bool) -> Plan:
    if plan.method != "auto":
        return plan
    rows, cols = x.shape[-2:]
    return replace(plan, method=cheaper_method(rows, cols, len(plan.steps), len(plan.restarts), symmetric=symmetric))


@cache
def triton_kernels() -> ModuleType | None:
    """``gpu.newton_schulz``, imported on first use; None without Triton, or without CUDA and the interpreter."""
    on_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    if importlib.util.find_spec("triton") is None or not (on_cuda or _interpreting()):
        return None
    return importlib.import_module(".gpu.newton_schulz", __package__)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
