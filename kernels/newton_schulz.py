"""Orthogonalization of matrices by Newton-Schulz: X → UVᵀ approximately, where X = UΣVᵀ."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .call_plan import MEMORY_LIMIT, Plan
from .coefficients import CoefficientsLike, resolve_coefficients
from .dispatch import admissible_form, check_backend, resolve_dtype
from .ops import arguments, newton_schulz_op


def newton_schulz(
    x: Tensor,
    *,
    method: str = "auto",
    coefficients: CoefficientsLike = "jordan",
    steps: int | None = 5,
    dtype: str | torch.dtype = "auto",
    eps: float = 1e-7,
    backend: str = "auto",
    memory_limit: int = MEMORY_LIMIT,
) -> Tensor:
    """Orthogonalize every matrix of a tensor.

    X ← x / max(‖x‖, eps), then per step A = XXᵀ, X ← aX + (bA + cA²)X, on the wide orientation. Singular values end
    near one; how near depends on ``coefficients``. Not differentiable; ``torch.vmap`` works.

    A zero matrix gives zeros, a NaN or infinite entry a whole matrix of NaN (bfloat16: as torch.optim.Muon). In
    float16, float32 and float64 the division by the norm happens in at least float32, before the cast, and is right
    for entries from 1e-30 to 1e+30. In bfloat16, method "standard" and a single matrix, the result is bitwise that of
    torch.optim.Muon.

    Args:
        x: [..., m, n] of a real floating dtype and any strides, unmodified.
        method: "standard" as written, "gram" for the same polynomial iterated on XXᵀ, or "auto" for the cheaper of the
            two where they are about equally accurate.
        coefficients: a name, a triple or triples, see :func:`resolve_coefficients`.
        steps: number of steps, or None for as many as the coefficients have.
        dtype: dtype of the products; "auto" is float16 on CUDA, float32 elsewhere.
        eps: smallest norm that x is divided by: smaller matrices stay small; 0 makes the result independent of scale.
        backend: "aten" (cuBLAS on GPUs) or "triton"; "auto" is the one expected to be fastest on the device
            and at the shape.
        memory_limit: bytes of work memory on a GPU, beside inputs and results; a single matrix may exceed it.
    Returns:
        A new contiguous tensor of x's shape in the compute dtype.
    Raises:
        ValueError: x has fewer than two dimensions or no real floating dtype; the method, coefficients, dtype or
            backend is unknown; the backend is not installed or does not compute in that dtype; the coefficients do not
            have so many steps, or diverge in half precision; eps is negative or not finite.
    """
    options = {"method": method, "coefficients": coefficients, "steps": steps, "dtype": dtype}
    limits = {"eps": eps, "backend": backend, "memory_limit": memory_limit}
    return newton_schulz_list([x], **options, **limits)[0]  # type: ignore[arg-type]


def newton_schulz_list(
    xs: Sequence[Tensor],
    *,
    method: str = "auto",
    coefficients: CoefficientsLike = "jordan",
    steps: int | None = 5,
    dtype: str | torch.dtype = "auto",
    eps: float = 1e-7,
    backend: str = "auto",
    memory_limit: int = MEMORY_LIMIT,
) -> list[Tensor]:
    """Orthogonalize every tensor of a list as :func:`newton_schulz` does, in one operator call.

    On CUDA the matrices share launches: all of them in Triton's kernels, those of equal shape in cuBLAS.

    Args:
        xs: tensors [..., m, n] of any shapes on one device.
        method, coefficients, steps, dtype, eps, backend, memory_limit: as for :func:`newton_schulz`.
    Returns:
        A new tensor for each of ``xs``.
    Raises:
        ValueError: as :func:`newton_schulz`, and mixed devices.
    """
    if not xs:
        return []
    for x in xs:
        _check(x, xs[0].device)
    _check_eps(eps)
    triples, form, name, safety, restarts = _constants(method, coefficients, steps, dtype, xs[0].device, backend)
    return newton_schulz_op(list(xs), triples, form, name, eps, safety, restarts, backend, memory_limit, [])


def make_plan(
    method: str,
    coefficients: CoefficientsLike,
    steps: int | None,
    dtype: str | torch.dtype,
    device: torch.device | str,
    eps: float,
    backend: str = "auto",
) -> Plan:
    """Resolve the settings of :func:`newton_schulz` for ``device``; the same ValueErrors, except those about x."""
    _check_eps(eps)
    schedule = resolve_coefficients(coefficients, steps)
    compute = resolve_dtype(dtype, device, schedule, method)
    form = admissible_form(method, compute, schedule)
    check_backend(backend, compute, device)
    return Plan(schedule.steps, form, compute, float(eps), schedule.safety, schedule.gram_restarts(compute), backend)


@torch.compiler.assume_constant_result
def _constants(
    method: str,
    coefficients: CoefficientsLike,
    steps: int | None,
    dtype: str | torch.dtype,
    device: torch.device,
    backend: str,
) -> tuple[list[float], str, str, float, list[int]]:
    """Resolve the operator's arguments to constants of the caller's graph, without tracing this function."""
    # Without eps, because with dynamic=True a float is no constant.
    plan = make_plan(method, coefficients, steps, dtype, device, 0.0, backend)
    triples, form, name, _, safety, restarts, *_ = arguments(plan)
    return triples, form, name, safety, restarts


def _check_eps(eps: float) -> None:
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps={eps!r}: expected a finite number that is not negative")


def _check(x: Tensor, device: torch.device) -> None:
    if x.ndim < 2:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} is no matrix: Newton-Schulz takes [..., m, n]")
    if not x.dtype.is_floating_point:
        raise ValueError(f"a matrix of dtype {x.dtype}: Newton-Schulz takes real floating dtypes")
    if x.device != device:
        raise ValueError(f"matrices on {device} and {x.device}: pass one list per device")
